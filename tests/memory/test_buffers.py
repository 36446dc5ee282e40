"""The simulator against a second one written from the rules alone, and against peaks known by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Problem
from tests.support.naive_simulator import naive_steps
from tests.support.planner_problems import build, chain, problems, random_schedule


@settings(max_examples=150, deadline=None)
@given(problems(), st.integers(0, 2**31))
def test_agrees_with_naive_simulator(problem: Problem, seed: int) -> None:
    order = random_schedule(problem, seed)
    timeline = simulate(problem, order)
    expected = naive_steps(problem, order)
    assert timeline.step_bytes.tolist() == expected
    assert timeline.peak == max(expected)
    assert timeline.peak_step == expected.index(max(expected))


@pytest.mark.parametrize("n", [2, 5, 20])
def test_chain_of_equal_units_holds_every_activation(n: int) -> None:
    """n activations and the first gradient, each of one unit: all alive when the last gradient begins."""
    assert simulate(chain(n), range(2 * n)).peak == n + 1


def test_unread_value_is_held_as_the_runtime_does_or_freed_as_published_graphs_count() -> None:
    parts = {"ops": [([], [0]), ([], [1]), ([], [2])], "nbytes": [5, 1, 1], "outputs": [2]}
    assert simulate(build(**parts, hold_unread=True), range(3)).peak == 7
    assert simulate(build(**parts, hold_unread=False), range(3)).peak == 5


def test_latest_occurrence_is_read_and_frees_the_first() -> None:
    problem = build(ops=[([], [0]), ([0], [1]), ([1], [2]), ([2, 0], [3])], nbytes=[10, 1, 1, 1], outputs=[3])
    kept, again = simulate(problem, [0, 1, 2, 3]), simulate(problem, [0, 1, 2, 0, 3])
    assert kept.step_bytes.tolist() == [10, 11, 12, 12]
    assert again.step_bytes.tolist() == [10, 11, 2, 11, 12]


def test_alias_keeps_its_source_alive_and_costs_nothing() -> None:
    problem = build(
        ops=[([], [0]), ([0], [1]), ([], [2]), ([1, 2], [3])], nbytes=[8, 8, 1, 1], outputs=[3], alias={1: 0}
    )
    assert simulate(problem, range(4)).step_bytes.tolist() == [8, 8, 9, 10]


def test_dead_buffer_taken_over_stays_allocated_through_the_gap() -> None:
    problem = build(
        ops=[([], [0]), ([0], [1]), ([1], [2]), ([2], [3]), ([3], [4])],
        nbytes=[8, 1, 1, 8, 1], outputs=[4], shape_class=[0, -1, -1, 0, -1],
    )  # fmt: skip
    assert simulate(problem, range(5)).step_bytes.tolist() == [8, 9, 10, 9, 9]


def test_empty_schedule_holds_the_residents() -> None:
    assert simulate(build(ops=[], nbytes=[4], outputs=[], resident=[0]), np.empty(0, np.int32)).peak == 4
