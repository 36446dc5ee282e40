"""A budget that a refusal names is one that was tried: asked for it, the same call writes a file."""

from __future__ import annotations

import itertools
import re

import pytest
from onnx import helper

from onnx_remat import rewrite_model
from onnx_remat.errors import BudgetInfeasibleError
from tests.support.graphs import mlp, model_of
from tests.support.steps import Steps

pytest.importorskip("onnxruntime")

CASES = [
    ("keep_all", "loop", "50%"), ("optimal_dag", "loop", "70%"), ("search", "loop", "50%"), ("auto", "session", "15%"),
    ("sqrt_n", "session", "50%"), ("min_cut", "session", "50%"), ("speed", "loop", "80%"), ("auto", "loop", "60%"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 6])
def test_a_budget_that_a_refusal_names_is_kept(rounds: int) -> None:
    named = 0
    for seed, (i, (selector, run_by, budget)) in itertools.product(range(rounds), enumerate(CASES)):
        random_step = (i + seed) % 2
        model = Steps(seed, 3, 2).model() if random_step else mlp(layers=6 + seed, batch=512, width=16)
        options = {"selector": selector, "run_by": run_by, "effort": 0.2}
        try:
            rewrite_model(model, budget, **options)
            continue
        except BudgetInfeasibleError as refusal:
            found = re.search(r"try budget=(\d+)", str(refusal))
        if found:
            named += 1
            result = rewrite_model(model, int(found[1]), **options)
            assert result.report.covered()[1] <= int(found[1]), (seed, selector, run_by)
    assert named >= len(CASES) * rounds // 2


def test_a_budget_of_a_few_bytes_is_named_with_its_unit() -> None:
    """A number up to 100 is refused: it may be meant as a percentage."""
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], {"x": [2]}, {"y": [2]})
    with pytest.raises(BudgetInfeasibleError, match="try budget='16B'"):
        rewrite_model(model, "15B", run_by="session", effort=0.02)
