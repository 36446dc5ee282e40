"""PyTorch: export a module, its loss and its optimizer as one training step in standard ONNX operators."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..extras import require

require("torch", "onnx_ir", "onnxruntime", "torch", "onnxscript")

from .auto import AutoCheckpoint, auto_checkpoint
from .budgeted import budgeted
from .budgeted_step import Budgeted

if TYPE_CHECKING:
    from .export import export_training_step
    from .initial import initial_feeds

__all__ = [
    "AutoCheckpoint", "Budgeted", "auto_checkpoint", "budgeted", "export_training_step", "initial_feeds",
]  # fmt: skip

_MODULES = {"export_training_step": "export", "initial_feeds": "initial"}


def __getattr__(name: str) -> Any:
    """Import the exporter on first use: it takes memory, and a process that trains does not need it."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
