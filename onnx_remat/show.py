"""Pictures of a result: the documented name of `onnx_remat.app.show`."""

from onnx_remat.app.show import draw

__all__ = ["draw"]
