"""Plans from a given set of results to keep: the user's own list, or those of convolutions and matrix products.

References
----------
Yaroslav Bulatov, Tim Salimans: openai/gradient-checkpointing, 2018: its modes ``collection`` and ``speed``; its mode
``memory`` is `sqrt_n`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from onnx_remat.memory.problem import Flags, Schedule
from onnx_remat.plan.request import Request, register
from onnx_remat.plan.search.candidates import cheapest_within
from onnx_remat.plan.selectors.materialize import materialize, split_step


def keeping(request: Request, kept: Flags) -> Schedule:
    """Keep the forward results of the ops flagged in `kept`; recompute the others when the backward pass needs them."""
    problem, order = request.problem, request.baseline.array()
    if request.fixed_order:
        order = np.arange(problem.n_ops, dtype=np.int32)
    split = split_step(problem, order)
    dropped = ~kept
    dropped[order[split:]] = False
    return materialize(problem, order, dropped, split)


def _flagged(n: int, ops: Iterable[int]) -> Flags:
    flags = np.zeros(n, np.bool_)
    flags[[op for op in ops if op >= 0]] = True
    return flags


@register("collection")
def collection(request: Request) -> Schedule:
    """Keep the values named by --checkpoint (`Request.checkpoints`), recompute the rest of the forward pass.

    The list alone decides, whatever the budget. With an empty list the whole forward pass runs again.
    """
    problem = request.problem
    made_by = problem.producer()
    plan = keeping(request, _flagged(problem.n_ops, (int(made_by[v]) for v in request.checkpoints)))
    return cheapest_within(request, [request.baseline, plan])


@register("speed")
def speed(request: Request) -> Schedule:
    """Keep results of convolutions and matrix products (`Request.anchors`), recompute the cheap ops between them.

    Without anchors, the most expensive ops, which together make up nine tenths of the cost, stand in for them.
    """
    problem = request.problem
    anchors = request.anchors
    if not anchors:
        rank = np.argsort(-problem.cost, kind="stable")
        share = np.cumsum(problem.cost[rank])
        anchors = tuple(rank[: int(np.searchsorted(share, 0.9 * share[-1])) + 1].tolist()) if len(rank) else ()
    return cheapest_within(request, [request.baseline, keeping(request, _flagged(problem.n_ops, anchors))])
