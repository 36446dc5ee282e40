"""Reverse-mode differentiation of ONNX models: a forward model becomes a training step in standard ops."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..extras import require

if TYPE_CHECKING:
    from .build import add_backward, initial_inputs
    from .loss import CrossEntropy, MeanSquaredError

__all__ = ["CrossEntropy", "MeanSquaredError", "add_backward", "initial_inputs"]

_HOMES = {"CrossEntropy": "loss", "MeanSquaredError": "loss", "add_backward": "build", "initial_inputs": "build"}


def __getattr__(name: str) -> Any:
    """Import on first access, so that the command line can report a missing package in one line."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("convert", "onnx_ir", "onnxruntime")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
