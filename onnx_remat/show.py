"""Plots of a result: the documented import path of `onnx_remat.findings.show`."""

from onnx_remat.findings.show import draw

__all__ = ["draw"]
