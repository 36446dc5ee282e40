"""Checkpoint selectors, one module each. Importing this package registers them all."""

from onnx_remat.plan.request import Progress, Request, Selector, get, names, register, silent
from onnx_remat.plan.selectors.auto import auto
from onnx_remat.plan.selectors.chosen import collection, speed
from onnx_remat.plan.selectors.exact import exact
from onnx_remat.plan.selectors.keep_all import keep_all
from onnx_remat.plan.selectors.materialize import materialize
from onnx_remat.plan.selectors.min_cut import min_cut
from onnx_remat.plan.selectors.optimal_dag import optimal_dag
from onnx_remat.plan.selectors.revolve import revolve
from onnx_remat.plan.selectors.search import search
from onnx_remat.plan.selectors.sqrt_n import sqrt_n

__all__ = [
    "Progress", "Request", "Selector", "auto", "collection", "exact", "get", "keep_all", "materialize",
    "min_cut", "names", "optimal_dag", "register", "revolve", "search", "silent", "speed", "sqrt_n",
]  # fmt: skip
