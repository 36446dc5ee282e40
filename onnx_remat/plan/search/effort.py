"""How much a selector may try: seconds become units of work at a fixed rate, so that plans are
reproducible."""

from __future__ import annotations

from onnx_remat.plan.request import Request

_PER_SECOND = 290_000_000  # places of a profile changed, and their like, on a slow core
_PER_EVALUATION = 3000  # the same, per candidate
_SETUP = 2.5e-4  # seconds per op that seeds and bookkeeping take
_LEAST = 0.4  # share of the time that is left to the search in any case


def allowance(request: Request) -> int:
    """Work the request allows one lane of the search, in the units of `anneal`."""
    if request.work is not None:
        return max(1, request.work) * _PER_EVALUATION
    seconds = max(_LEAST * request.time_limit, request.time_limit - _SETUP * request.problem.n_ops)
    return max(1, int(seconds * _PER_SECOND))
