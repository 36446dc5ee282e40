"""Training loop for a step model: the documented import path of `onnx_remat.session.training`."""

from onnx_remat.session.training import Loop, initial_state

__all__ = ["Loop", "initial_state"]
