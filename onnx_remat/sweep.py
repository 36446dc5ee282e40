"""The curve of peak against compute: the documented name of `onnx_remat.app.sweep`."""

from onnx_remat.app.lowest import Lowest, lowest_budget
from onnx_remat.app.sweep import Curve, Point, sweep

__all__ = ["Curve", "Lowest", "Point", "lowest_budget", "sweep"]
