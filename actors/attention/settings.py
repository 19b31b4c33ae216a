"""What an attention replica may use: sizes of its state, tokens per step, and queueing bounds."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from expertmesh.actors.state.settings import StateSettings


class EngineSettings(BaseModel):
    """Fixed for the life of an engine. Sizes that a request must fit are named in its refusal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pages: int = Field(
        512, ge=1, description="64-token pages of the latent cache, shared by all sequences."
    )
    slots: int = Field(
        32, ge=1, description="KDA state slots: the most sequences that run at the same time."
    )
    step_tokens: int = Field(
        512,
        ge=1,
        description="Tokens per step: a decode row for each running sequence, prompt chunks in "
        "what is left. One 64-token chunk of a prompt always fits, so that decoding cannot "
        "stall prompts. Below 64, chunks end at multiples of this number within each 64.",
    )
    max_context: int | None = Field(
        None, ge=1, description="Most tokens of prompt and answer; the model's own limit if unset."
    )
    max_waiting: int = Field(
        4096, ge=1, description="Requests that may queue; more are refused as busy."
    )
    max_bypass: int = Field(
        16,
        ge=0,
        description="How many later requests may start before one that does not fit yet. After "
        "that nothing passes it, and it starts when running ones give back enough pages.",
    )
    lookahead: int = Field(
        64, ge=1, description="How far down the queue one step looks for a request that fits."
    )
    ageing_steps: int = Field(
        256,
        ge=1,
        description="Steps of waiting that outweigh one level of priority: the bound on how long "
        "more urgent arrivals can pass a request, per level. Levels beyond +-8 age like 8.",
    )
    priority_preemption: bool = Field(
        True, description="Whether a more urgent request may take the place of a running one."
    )
    watermark: float = Field(
        0.01,
        ge=0,
        lt=1,
        description="Share of the pages that must stay free after an admission, so that running "
        "sequences can grow. Doubles for a sequence with each time it was preempted.",
    )
    max_logprobs: int = Field(20, ge=0, description="Most alternatives reported per token.")
    ping_pong: bool = Field(
        False, description="Two micro-batches in flight; same results, hides the exchange."
    )
    graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Whether decode passes are recorded as CUDA graphs and replayed. auto: on a "
        "GPU whose kernels never ask the host. on: refuse to start where that cannot be.",
    )
    state: StateSettings = Field(
        default_factory=StateSettings, description="Prefix cache, tiers below the device, sessions."
    )
