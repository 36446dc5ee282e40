"""Amount of search: a fixed rate converts seconds into units of work, so that plans are reproducible."""

from __future__ import annotations

from onnx_remat.plan.request import Request
from onnx_remat.plan.search.tuning import LEAST_SHARE, SETUP_SECONDS, WORK_PER_CANDIDATE, WORK_PER_SECOND


def allowance(request: Request) -> int:
    """Return the work that the request allows one lane of the search, in the units of `anneal`."""
    if request.work is not None:
        return max(1, request.work) * WORK_PER_CANDIDATE
    seconds = max(LEAST_SHARE * request.effort, request.effort - SETUP_SECONDS * request.problem.n_ops)
    return max(1, int(seconds * WORK_PER_SECOND))
