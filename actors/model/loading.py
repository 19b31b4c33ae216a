"""What both kinds of actors need to open a model: where it is, and how to hold it."""

from pathlib import Path
from typing import Literal, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from expertmesh.actors.model.checkpoint import Checkpoint
from expertmesh.actors.model.config import ModelConfig, load_config
from expertmesh.kernels.registry import Kernels, load_kernels, parse_choice

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
Dtype: TypeAlias = Literal["auto", "float32", "bfloat16"]


def placed(device: Device, dtype: Dtype) -> tuple[str, torch.dtype]:
    """Device type and compute dtype of this process, "auto" decided."""
    kind = device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "float32" if kind == "cpu" else "bfloat16"
    return kind, DTYPES[dtype]


class LoadSettings(BaseModel):
    """The same on every actor of a mesh; `auto` is decided by the process that loads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path = Field(description="Folder with config.json and safetensors shards.")
    dtype: Dtype = Field(
        default="auto",
        description="Activations and attention weights. auto: bfloat16 on CUDA, float32 on CPU.",
    )
    device: Device = Field(default="auto", description="auto: CUDA if there is one.")
    kernels: str = Field(
        default="auto",
        description="Kernel backend: auto, triton, torch or reference; after a comma operators "
        "that differ, as in 'auto,sample=torch'. auto: triton on CUDA, torch on CPU.",
    )
    read_mode: Literal["mmap", "sequential"] = Field(
        default="mmap", description="sequential: large reads in order, for network disks."
    )
    expert_cache_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description="Decoded experts kept per process, beside the packed ones.",
    )

    @field_validator("kernels")
    @classmethod
    def _known(cls, choice: str) -> str:
        parse_choice(choice)
        return choice

    def open(self) -> "OpenModel":
        """Reads and checks all headers. Raises ConfigError and CheckpointError."""
        config = load_config(self.model)
        return OpenModel(
            self, config, Checkpoint.open(self.model, config, read_mode=self.read_mode)
        )


class OpenModel:
    """A checked checkpoint with the device, dtype and kernels that this process uses for it."""

    def __init__(self, settings: LoadSettings, config: ModelConfig, source: Checkpoint) -> None:
        self.config, self.source = config, source
        kind, self.dtype = placed(settings.device, settings.dtype)
        self.device = torch.device(kind)
        self.kernels: Kernels = load_kernels(settings.kernels, kind, self.dtype)
