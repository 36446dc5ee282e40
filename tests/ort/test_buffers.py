"""The simulator against a second one written from the rules alone, and against peaks known by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_remat.ort.simulate.buffers import simulate
from onnx_remat.problem import Problem
from tests.support.planner_problems import build, chain, problems, random_schedule


def naive_steps(problem: Problem, order: list[int]) -> list[int]:
    """Bytes per step by the rules in `onnx_remat.ort.simulate.buffers`, with lists and dicts."""
    latest: dict[int, int] = {}
    value_of: list[int] = []
    reads_at: list[list[int]] = []
    made_at: list[list[int]] = []
    first: list[bool] = []
    for op in order:
        reads_at.append([latest.get(v, -1) for v in problem.inputs(op)])
        made_at.append([])
        for v in problem.outputs(op):
            first.append(v not in latest)
            latest[v] = len(value_of)
            made_at[-1].append(len(value_of))
            value_of.append(v)
    total_reads = [sum(r.count(i) for r in reads_at) for i in range(len(value_of))]
    buffers: list[dict[str, int]] = []  # owner, size, start, end, open reads, held
    home: dict[int, int] = {}
    dead: list[int] = []  # buffers to take over, most recently freed last
    for step, op in enumerate(order):
        inputs, read = problem.inputs(op), reads_at[step]
        for slot, inst in zip(range(problem.out_ptr[op], problem.out_ptr[op + 1]), made_at[step], strict=True):
            v = value_of[inst]
            if problem.droppable[slot] and not first[inst] and not total_reads[inst]:
                continue
            kind = int(problem.shape_class[v])
            held = bool(problem.is_output[v] and first[inst])
            chosen = None
            if not held and problem.alias_slot[slot] >= 0:
                source = read[problem.alias_slot[slot]]
                if source < 0 or source not in home:
                    continue
                chosen = home[source]
            elif not held and kind >= 0:
                for k in problem.inplace_slots[problem.inplace_ptr[slot] : problem.inplace_ptr[slot + 1]]:
                    b = home.get(read[k], -1)
                    free = b >= 0 and not buffers[b]["held"] and buffers[b]["open"] == 1
                    if free and problem.shape_class[inputs[k]] == kind:
                        chosen = b
                        break
                if chosen is None and problem.poolable[v] and total_reads[inst]:
                    same = [b for b in dead if problem.shape_class[buffers[b]["owner"]] == kind]
                    if same:
                        chosen = same[-1]
                        dead.remove(chosen)
            if chosen is None:
                chosen = len(buffers)
                buffers.append(
                    {
                        "owner": v,
                        "size": int(problem.nbytes[v]),
                        "start": step,
                        "end": -1,
                        "open": 0,
                        "held": held,
                    }
                )
            home[inst] = chosen
            buffers[chosen]["open"] += total_reads[inst] + 1
        closing = [home[i] for i in read if i in home]
        for b in closing:
            buffers[b]["end"] = step
        for b in closing + [home[i] for i in made_at[step] if i in home]:
            buffers[b]["open"] -= 1
            owner = buffers[b]["owner"]
            shared = problem.poolable[owner] and problem.shape_class[owner] >= 0
            if shared and not buffers[b]["open"] and not buffers[b]["held"]:
                dead.append(b)
    result = [problem.base_bytes + int(problem.workspace[op]) for op in order]
    for step, op in enumerate(order):
        if op in order[:step]:
            result[step] += int(problem.rerun_workspace[op])
    for b in buffers:
        end = b["end"] if b["end"] >= 0 else (len(order) - 1 if problem.hold_unread else b["start"])
        for step in range(b["start"], (len(order) - 1 if b["held"] else end) + 1):
            result[step] += b["size"]
    return result


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
