"""Reverse-mode differentiation of ONNX models: any forward model into a training step in standard ops."""

from ..extras import missing

try:
    import onnx_ir  # noqa: F401 - what the modules below write with
except ModuleNotFoundError as error:
    raise missing(error, "convert") from None

from .build import add_backward, initial_inputs
from .loss import CrossEntropy, MeanSquaredError

__all__ = ["CrossEntropy", "MeanSquaredError", "add_backward", "initial_inputs"]
