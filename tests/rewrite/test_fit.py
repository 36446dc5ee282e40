"""The search for a plan whose file keeps the budget."""

from __future__ import annotations

import onnx_remat
from onnx_remat.rewrite import fit
from sample_models.chain import chain


def test_a_tighter_plan_with_a_larger_file_sends_the_search_up(monkeypatch):
    """Below the first target each file exceeds the budget by more, for bookkeeping of recomputed nodes."""
    tried, as_file = [], fit._as_file

    def taken(plan, goal, target, *rest):
        tried.append(target)
        _, made = as_file(plan, goal, target, *rest)
        return goal.allowed + (1000 + tried[0] - target if target <= tried[0] else -1), made

    monkeypatch.setattr(fit, "_as_file", taken)
    onnx_remat.rewrite_model(chain(16, 1024, 64), "80%", effort=0.5, verify="none")
    assert tried[2] < tried[1] < tried[0] < tried[3]
