"""ExpertMesh: an expert-parallel inference server for Kimi K3-style models."""

__version__ = "0.1.0"
