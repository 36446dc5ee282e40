"""Training with a step model: the documented name of `onnx_remat.run.training`."""

from onnx_remat.run.training import Loop, initial_state

__all__ = ["Loop", "initial_state"]
