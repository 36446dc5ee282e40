"""Offsets against brute force, against packings that are perfect by construction, and against their validator."""

from __future__ import annotations

import time
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_remat.memory import layout as layouts
from onnx_remat.memory import layout_ascending, layout_ledges
from onnx_remat.memory.layout import Layout, solve
from onnx_remat.memory.layout_sections import sections
from onnx_remat.memory.problem import Longs
from scripts.tables import placement
from tests.support.layout_check import check_layout

Instance = tuple[Longs, Longs, Longs]


def live(lower: Longs, upper: Longs, size: Longs) -> int:
    """The largest sum that lives at once, step by step."""
    return max((int(size[(lower <= t) & (t < upper)].sum()) for t in range(int(upper.max()))), default=0)


def lowest(lower: Longs, upper: Longs, size: Longs) -> int:
    """The lowest pile: drop the buffers in every order; each falls on what lies below it."""
    best = int(size.sum())
    for order in permutations(range(len(size))):
        tops = np.zeros(int(upper.max()), np.int64)
        for b in order:
            tops[lower[b] : upper[b]] = tops[lower[b] : upper[b]].max() + size[b]
        best = min(best, int(tops.max()))
    return best


def cut(rng: np.random.Generator, n: int, steps: int, height: int) -> Instance:
    """A rectangle cut at random into at least `n` pieces or until none can be cut: they pack without waste."""
    pieces = [(0, steps, height)]
    while len(pieces) < n:
        areas = np.array([(b - a) * h if b - a > 1 or h > 1 else 0 for a, b, h in pieces], float)
        a, b, h = pieces.pop(int(rng.choice(len(pieces), p=areas / areas.sum())))
        if h == 1 or (b - a > 1 and rng.random() < 0.5):
            t = int(rng.integers(a + 1, b))
            pieces += [(a, t, h), (t, b, h)]
        else:
            low = int(rng.integers(1, h))
            pieces += [(a, b, low), (a, b, h - low)]
    lower, upper, size = np.array(pieces, np.int64)[rng.permutation(len(pieces))].T
    return lower, upper, size


def step(rng: np.random.Generator, n: int) -> Instance:
    """Lifetimes like a training step's: activations that wait for the backward pass, and short-lived values."""
    half = n // 2
    forward, backward = np.arange(half), np.arange(half, 2 * half)
    waits = rng.random(half) < 0.4
    upper = np.where(waits, 2 * half - forward, forward + 1 + rng.integers(1, 5, half))
    return (
        np.concatenate([forward, backward]),
        np.concatenate([upper, backward + 1 + rng.integers(1, 6, half)]),
        rng.choice(1 << np.arange(8, 22), 2 * half),
    )


def checked(instance: Instance, **options: int) -> Layout:
    """A layout that the validator has passed, with the figures it must show."""
    layout = solve(*instance, **options)
    check_layout(*instance, layout.offsets)
    assert layout.height == int((layout.offsets + instance[2]).max(initial=0))
    return layout


small = st.lists(st.tuples(st.integers(0, 7), st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=6)
large = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 40), st.integers(0, 900)), min_size=0, max_size=60)


def instance(rows: list[tuple[int, int, int]]) -> Instance:
    lower, lasts, size = np.array(rows, np.int64).reshape(-1, 3).T
    return lower, lower + lasts, size


@settings(max_examples=80, deadline=None)
@given(small)
def test_tiny_instances_are_solved_as_brute_force_does(rows: list[tuple[int, int, int]]) -> None:
    layout = checked(instance(rows), alignment=1)
    assert layout.optimal
    assert layout.height == lowest(*instance(rows))


@settings(max_examples=60, deadline=None)
@given(large, st.integers(0, 2))
def test_random_layouts_are_valid_and_the_same_again(rows: list[tuple[int, int, int]], effort: int) -> None:
    layout = checked(instance(rows), alignment=1, effort=effort)
    assert layout.lower_bound == (live(*instance(rows)) if rows else 0) <= layout.height
    again = solve(*instance(rows), alignment=1, effort=effort)
    assert again.offsets.tolist() == layout.offsets.tolist()


@given(small)
def test_sections_keep_who_overlaps_whom(rows: list[tuple[int, int, int]]) -> None:
    lower, upper, size = instance(rows)
    first, last, sums = sections(lower, upper, size)
    meet = (lower[:, None] < upper) & (lower < upper[:, None])
    assert np.array_equal(meet, (first[:, None] < last) & (first < last[:, None]))
    assert sums.max() == live(lower, upper, size)


@pytest.mark.parametrize("seed", range(3))
def test_perfect_packings_are_found(seed: int) -> None:
    """Pieces of one rectangle, for which the greedy start alone is too high."""
    pieces = cut(np.random.default_rng(seed), 100, 100, 1 << 20)
    assert solve(*pieces, alignment=1, effort=0).height > 1 << 20
    assert checked(pieces, alignment=1).height == 1 << 20


Trees = layout_ascending.Tree | layout_ledges.Tree


def tree_of(kind: type[Trees], lower: Longs, upper: Longs, size: Longs) -> Trees:
    first, last, sums = sections(lower, upper, size)
    if kind is layout_ascending.Tree:
        tree: Trees | None = kind.of(first, last, size, sums, upper - lower)
    else:
        tree = layout_ledges.Tree.of(first, last, np.ascontiguousarray(size))
    assert tree is not None
    return tree


EACH = pytest.mark.parametrize("kind", [layout_ascending.Tree, layout_ledges.Tree])


@EACH
@settings(max_examples=150, deadline=None)
@given(small, st.integers(0, 5))
def test_a_search_finds_the_lowest_layout_and_rules_out_all_lower_ones(
    kind: type[Trees], rows: list[tuple[int, int, int]], turn: int
) -> None:
    lower, upper, size = instance(rows)
    tree, height = tree_of(kind, lower, upper, size), lowest(lower, upper, size)
    found = tree.search(height, turn, 1_000_000_000).offsets
    assert found is not None
    check_layout(lower, upper, size, found)
    assert (found + size).max() == height
    assert tree.search(height - 1, turn, 1_000_000_000).impossible


@EACH
@pytest.mark.parametrize("seed", range(20))
def test_a_search_never_calls_a_perfect_packing_impossible(kind: type[Trees], seed: int) -> None:
    """It looks at the whole tree of these, so that a branch cut off in error would show."""
    lower, upper, size = cut(np.random.default_rng(seed), 25, 30, 100)
    tree = tree_of(kind, lower, upper, size)
    answer = tree.search(100, seed, 1_000_000_000)
    assert answer.offsets is not None
    check_layout(lower, upper, size, answer.offsets)
    assert tree.search(99, seed, 1_000_000_000).impossible


def test_sizes_are_rounded_up_to_the_alignment() -> None:
    layout = solve([0, 0, 0], [1, 1, 1], [1, 65, 0])
    assert layout.height == layout.lower_bound == 3 * 64
    assert (layout.offsets % 64 == 0).all()


def test_nothing_to_place() -> None:
    layout = solve([], [], [])
    assert (len(layout.offsets), layout.height, layout.lower_bound, layout.optimal) == (0, 0, 0, True)


def test_ascending_offsets_find_a_layout_of_a_training_step_that_ledges_do_not() -> None:
    rng = np.random.default_rng(0)
    lower, upper, size = step(rng, 400)
    drawn = lower, upper, rng.integers(1, 1 << 20, len(size))
    assert tree_of(layout_ledges.Tree, *drawn).search(live(*drawn), 0, 100_000_000).offsets is None
    assert checked(drawn, alignment=1, effort=0).height > live(*drawn)
    assert checked(drawn, alignment=1, effort=1).height == live(*drawn)


def test_local_search_lowers_layouts_of_too_many_buffers_for_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_trees", lambda *_: ())
    pieces = cut(np.random.default_rng(1), 100, 100, 1 << 20)
    heights = [checked(pieces, alignment=1, effort=effort).height for effort in (0, 1, 3)]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] > heights[-1]


def test_more_effort_is_never_worse() -> None:
    pieces = cut(np.random.default_rng(9), 120, 200, 1 << 20)
    heights = [checked(pieces, alignment=1, effort=effort).height for effort in (0, 1, 3)]
    assert heights == sorted(heights, reverse=True)


def test_no_turn_begins_after_the_time_limit() -> None:
    pieces = cut(np.random.default_rng(9), 200, 200, 1 << 20)
    assert solve(*pieces, alignment=1, time_limit=0.0).turns == 0


def test_the_greedy_start_grows_at_most_with_the_square_of_the_buffers() -> None:
    """And 20,000 buffers of a training step lie within 1 % of the bound."""
    seconds = {}
    for n in (2_500, 20_000):
        drawn = step(np.random.default_rng(0), n)
        began = time.process_time()
        layout = checked(drawn, alignment=64, effort=0)
        seconds[n] = time.process_time() - began
        assert layout.height <= 1.01 * layout.lower_bound
    assert seconds[20_000] < 2 * 8**2 * seconds[2_500]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([0], [0], [1]), "buffer 0 has an empty lifetime"),
        (([0, 0], [1, 1], [1, -1]), "buffer 1 has a negative size"),
        (([0, 0], [1], [1]), "equally long"),
    ],
)
def test_unusable_input_is_refused(columns: tuple[list[int], list[int], list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        solve(*columns)
    with pytest.raises(ValueError, match="alignment"):
        solve([0], [1], [1], alignment=0)


def test_the_validator_objects_to_every_buffer_moved_into_another() -> None:
    """In a perfect packing there is nowhere else to lie: each move meets something or leaves the slab."""
    lower, upper, size = cut(np.random.default_rng(3), 40, 50, 1 << 12)
    offsets = solve(lower, upper, size, alignment=1).offsets
    top = int((offsets + size).max())
    assert top == 1 << 12
    check_layout(lower, upper, size, offsets)
    for b in range(len(size)):
        for by in (-1, 1):
            moved = offsets.copy()
            moved[b] += by
            if moved[b] + size[b] <= top:
                with pytest.raises(ValueError, match=rf"\b{b}\b"):
                    check_layout(lower, upper, size, moved)


def test_the_validator_names_the_two_that_meet() -> None:
    check_layout([0, 2], [2, 4], [8, 8], [0, 0])
    with pytest.raises(ValueError, match="buffers 0 and 1 share memory at step 1"):
        check_layout([0, 1], [2, 4], [8, 8], [0, 7])
    with pytest.raises(ValueError, match="buffers 0 and 2 share memory at step 5"):  # one within the other
        check_layout([0, 0, 5], [9, 9, 6], [100, 1, 1], [0, 100, 50])
    with pytest.raises(ValueError, match="negative offset"):
        check_layout([0], [1], [8], [-1])
    with pytest.raises(ValueError, match="1 offsets for 2 lifetimes"):
        check_layout([0, 1], [2, 4], [8, 8], [0])


def test_published_instances_are_read(tmp_path: Path) -> None:
    one, two = tmp_path / "one.8.csv", tmp_path / "two.csv"
    one.write_text("size,id,upper,lower,offset\n4,x,2,0,7\n4,y,3,1,7\n")
    two.write_text("buffer,start,end,size\n0,0,1,5\n")
    assert [column.tolist() for column in placement.read(two)] == [[0], [1], [5]]
    ((name, *figures, _),) = placement.rows(str(one), seconds=5)
    assert (name, figures) == ("one", ["2", "8", "8", "1.0000", "1.0000"])
    one.write_text("id,lower,size\n0,0,1\n")
    with pytest.raises(SystemExit, match="header must name"):
        placement.read(one)
