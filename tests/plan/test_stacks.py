"""Stacks of equal layers: found, planned with few of them, written out for all, and better than without."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Problem, Schedule, check_schedule
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.ort.prepare import Preparation, prepare
from onnx_remat.plan import selectors
from onnx_remat.plan.selectors import layers
from tests.support.graphs import mlp
from tests.support.planner_problems import random_problem
from tests.support.slow import few


def compiled(**settings) -> tuple[Problem, Schedule]:
    made = prepare(mlp(**settings), Preparation(kernels_of("cpu")))
    return replace(made.problem, poolable=np.zeros(made.problem.n_values, np.bool_)), made.default_order()


def searched(problem: Problem, budget: int, order) -> Schedule:
    return selectors.get("search")(selectors.Request(problem, budget, Schedule(tuple(order.tolist())), effort=0.05))


LAYERS = 160
"""Thin ones: a small problem has 67 of them."""


def test_a_stack_is_found_with_its_layers():
    problem, _ = compiled(layers=LAYERS)
    stack = layers.find(problem)
    assert stack is not None
    forward, backward = stack.runs
    assert (forward.period, backward.period) == (2, 7)
    assert LAYERS - 2 <= min(forward.layers, backward.layers) <= max(forward.layers, backward.layers) <= LAYERS
    assert (stack.home[:, 0] >= 0).mean() > 0.95  # updates follow their gradients


def test_few_layers_are_no_stack():
    assert layers.find(compiled(layers=100)[0]) is None


def test_what_is_left_is_the_network_of_that_many_layers():
    """Its ops cost what those of a network of fewer layers do, and it peaks as that one does."""
    problem, _ = compiled(layers=LAYERS, batch=512)
    stack = layers.find(problem)
    assert stack is not None
    small = layers.shrink(problem, stack)
    assert small is not None
    alone, _ = compiled(layers=(len(small.ops) - 2) // 11, batch=512)  # a layer has 2 + 7 ops, and 2 of its update
    assert alone.n_ops == len(small.ops) < 0.5 * problem.n_ops
    assert sorted(small.problem.cost) == pytest.approx(sorted(alone.cost))
    file_order = Schedule(tuple(range(small.problem.n_ops)))
    check_schedule(small.problem, file_order)
    weights = problem.base_bytes - alone.base_bytes
    assert simulate(small.problem, file_order).peak - weights == simulate(alone, file_order).peak


@pytest.mark.parametrize("share", few([0.9, 0.6, 0.45], [0.6]))
def test_a_plan_for_few_layers_serves_all(share):
    problem, baseline = compiled(layers=LAYERS, batch=2048)
    peak = simulate(problem, baseline).peak
    found = layers.layered(problem, baseline.array(), int(share * peak), searched)
    for plan in found:
        check_schedule(problem, plan)
    assert min(abs(simulate(problem, plan).peak / peak - share) for plan in found) < 0.03


@pytest.mark.parametrize("share", [pytest.param(0.6, marks=pytest.mark.slow), 0.4])
def test_the_search_is_no_worse_for_it(share, monkeypatch):
    problem, baseline = compiled(layers=300, batch=1024)
    budget = int(share * simulate(problem, baseline).peak)
    request = selectors.Request(problem, budget, baseline, effort=0.3)
    ours = selectors.get("search")(request)
    assert simulate(problem, ours).peak <= budget
    monkeypatch.setattr(layers, "find", lambda _: None)
    assert ours.overhead(problem) <= selectors.get("search")(request).overhead(problem)


@pytest.mark.slow
def test_plans_are_repeatable():
    problem, baseline = compiled(layers=LAYERS)
    budget = int(0.6 * simulate(problem, baseline).peak)
    request = selectors.Request(problem, budget, baseline, effort=0.2)
    assert selectors.get("search")(request) == selectors.get("search")(request)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), ops=st.integers(3, 120))
def test_whatever_is_no_stack_is_left_alone_or_planned_right(seed, ops):
    problem = random_problem(seed, ops)
    order = Schedule(tuple(range(problem.n_ops)))
    for plan in layers.layered(problem, order.array(), simulate(problem, order).peak // 2, searched):
        check_schedule(problem, plan)
