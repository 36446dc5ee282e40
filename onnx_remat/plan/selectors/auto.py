"""The default: nothing recomputed if the right order is enough, else the search."""

from __future__ import annotations

from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Schedule
from onnx_remat.plan.request import Request, register
from onnx_remat.plan.selectors.keep_all import keep_all
from onnx_remat.plan.selectors.search import search


@register("auto")
def auto(request: Request) -> Schedule:
    """keep_all where it meets the budget at no extra compute, search otherwise."""
    for plan in (request.baseline, keep_all(request)):
        if simulate(request.problem, plan).peak <= request.budget:
            return plan
    return search(request)
