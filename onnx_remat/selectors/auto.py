"""The default: nothing recomputed if the right order is enough, else the search."""

from __future__ import annotations

from onnx_remat.memory import simulate
from onnx_remat.schedule import Schedule
from onnx_remat.selectors.base import Request, register
from onnx_remat.selectors.keep_all import keep_all
from onnx_remat.selectors.search import search


@register("auto")
def auto(request: Request) -> Schedule:
    """keep_all where it meets the budget at no extra compute, search otherwise."""
    for plan in (request.baseline, keep_all(request)):
        if simulate(request.problem, plan).peak <= request.budget:
            return plan
    return search(request)
