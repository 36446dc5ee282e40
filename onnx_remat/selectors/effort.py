"""How much a selector may try: seconds become simulations at a fixed rate, so that plans are reproducible."""

from __future__ import annotations

from onnx_remat.selectors.base import Request

_OPS_PER_SECOND = 9.0e6  # steps simulated per second, with the bookkeeping of a candidate, on a slow core
_FIXED_STEPS = 60  # overhead of one evaluation, as steps


def allowance(request: Request) -> int:
    """Simulator evaluations the request allows."""
    if request.work is not None:
        return max(1, request.work)
    return max(50, int(request.time_limit * _OPS_PER_SECOND / (request.problem.n_ops + _FIXED_STEPS)))
