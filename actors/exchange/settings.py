"""How the exchange behaves. One object, frozen, shared by every rank of an epoch."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ExchangeSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: Literal["auto", "direct", "exact", "padded", "mixed"] = Field(
        default="auto",
        description="direct: a TCP connection per pair. exact: one point-to-point message of the "
        "process group per pair, as long as its rows. padded: all_to_all_single with one capacity "
        "for all pairs. mixed: all_to_all_single, in steps of few rows padded with nothing to "
        "count, in others as long as the rows. auto: direct on CPU, mixed on CUDA (NCCL).",
    )
    dispatch_dtype: Literal["auto", "float32", "bfloat16", "float8"] = Field(
        default="auto",
        description="How latent rows travel to the experts. float8: e4m3 with one scale per row. "
        "auto: float32 on CPU, bfloat16 on CUDA.",
    )
    combine_dtype: Literal["auto", "float64", "float32", "bfloat16"] = Field(
        default="auto",
        description="How partial sums travel back. float64: the result is the same for any "
        "placement of the experts. auto: float64 where the model computes in float32, else "
        "float32.",
    )
    max_rows: int = Field(
        default=1024,
        ge=8,
        description="Most rows in one message; a larger batch goes in several. Sizes the buffers.",
    )
    deadline_s: float = Field(
        default=10.0,
        gt=0,
        description="A peer silent for longer in the middle of a step has failed.",
    )
    join_deadline_s: float = Field(
        default=60.0, gt=0, description="All ranks of a new epoch must have met within this time."
    )
