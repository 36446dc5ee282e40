"""ONNX Runtime in a process of its own: the documented name of `onnx_remat.ort.runtime`."""

from onnx_remat.ort.runtime import outputs, session_options

__all__ = ["outputs", "session_options"]
