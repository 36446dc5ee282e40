"""Reverse-mode differentiation of ONNX models: any forward model into a training step in standard ops."""

from .build import add_backward, initial_inputs
from .loss import CrossEntropy, MeanSquaredError

__all__ = ["CrossEntropy", "MeanSquaredError", "add_backward", "initial_inputs"]
