"""The curve of peak against compute: the documented import path of `onnx_remat.findings.sweep`."""

from onnx_remat.findings.lowest import Lowest, lowest_budget
from onnx_remat.findings.sweep import Curve, Point, sweep

__all__ = ["Curve", "Lowest", "Point", "lowest_budget", "sweep"]
