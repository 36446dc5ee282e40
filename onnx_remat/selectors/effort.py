"""How much a selector may try: seconds become units of work at a fixed rate, so that plans are
reproducible."""

from __future__ import annotations

from onnx_remat.selectors.base import Request

_PER_SECOND = 220_000_000  # places of a profile changed, and their like, on a slow core
_PER_EVALUATION = 1500  # the same, per candidate


def allowance(request: Request) -> int:
    """Work the request allows, in the units of `anneal`."""
    if request.work is not None:
        return max(1, request.work) * _PER_EVALUATION
    return max(1, int(request.time_limit * _PER_SECOND))
