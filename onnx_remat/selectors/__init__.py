"""Checkpoint selectors, one module each. Importing this package registers them all."""

from onnx_remat.selectors.auto import auto
from onnx_remat.selectors.base import Progress, Request, Selector, get, names, register, silent
from onnx_remat.selectors.chosen import collection, speed
from onnx_remat.selectors.exact import exact
from onnx_remat.selectors.keep_all import keep_all
from onnx_remat.selectors.materialize import materialize
from onnx_remat.selectors.min_cut import min_cut
from onnx_remat.selectors.optimal_dag import optimal_dag
from onnx_remat.selectors.search import search
from onnx_remat.selectors.sqrt_n import sqrt_n

__all__ = [
    "Progress", "Request", "Selector", "auto", "collection", "exact", "get", "keep_all", "materialize",
    "min_cut", "names", "optimal_dag", "register", "search", "silent", "speed", "sqrt_n",
]  # fmt: skip
