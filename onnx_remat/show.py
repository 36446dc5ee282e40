"""Pictures of a result: the documented name of `onnx_remat.findings.show`."""

from onnx_remat.findings.show import draw

__all__ = ["draw"]
