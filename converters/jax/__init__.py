"""JAX: export a loss function and an optax optimizer as a training step in standard ONNX operators."""

from __future__ import annotations

from ..extras import require

require("jax", "onnx_ir", "onnxruntime", "jax", "optax")

from .budgeted import Budgeted, budgeted
from .export import export_training_step, initial_feeds

__all__ = ["Budgeted", "budgeted", "export_training_step", "initial_feeds"]
