"""ONNX Runtime in a separate process: the documented import path of `onnx_remat.ort.runtime`."""

from onnx_remat.ort.runtime import outputs, session_options

__all__ = ["outputs", "session_options"]
