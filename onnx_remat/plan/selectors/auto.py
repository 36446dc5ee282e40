"""The default selector: reorder only if that meets the budget, otherwise search."""

from __future__ import annotations

from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Schedule
from onnx_remat.plan.request import Request, register
from onnx_remat.plan.selectors.keep_all import keep_all
from onnx_remat.plan.selectors.search import search


@register("auto")
def auto(request: Request) -> Schedule:
    """keep_all if it meets the budget at no extra compute, search otherwise."""
    for plan in (request.baseline, keep_all(request)):
        if simulate(request.problem, plan).peak <= request.budget:
            return plan
    return search(request)
