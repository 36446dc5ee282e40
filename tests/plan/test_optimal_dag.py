"""Feng & Huang's checkpoints: the division tree, the least memory on chains, DenseNets in seconds."""

from __future__ import annotations

import time
from itertools import combinations, pairwise

import networkx as nx
import numpy as np
import pytest

from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Problem, check_schedule
from onnx_remat.plan.request import Deadline
from onnx_remat.plan.search.core import liveness_model
from onnx_remat.plan.selectors import Request, get
from onnx_remat.plan.selectors.division import divide
from onnx_remat.plan.selectors.materialize import split_step
from onnx_remat.plan.selectors.optimal_dag import every_set, forward_tree, lightest, max_terms, spans_of
from tests.support.planner_problems import baseline, chain
from tests.support.published import problem_of


def training(sizes: list[int], edges: list[tuple[int, int]]) -> Problem:
    """A forward graph and its mirror: gradient i reads result i and the gradients of what reads it."""
    n = len(sizes)
    both = edges + [(2 * n - 1 - b, 2 * n - 1 - a) for a, b in edges] + [(i, 2 * n - 1 - i) for i in range(n)]
    return problem_of(sizes + sizes[::-1], [1.0] * (2 * n), sorted(both, key=lambda e: e[::-1]), [0] * n + [1] * n)


def tree_of(problem: Problem):  # type: ignore[no-untyped-def]
    order = np.arange(problem.n_ops, dtype=np.int32)
    return forward_tree(liveness_model(problem), order, split_step(problem, order))


@pytest.mark.parametrize("seed", range(8))
def test_chain_checkpoints_are_the_lightest_there_are(seed: int) -> None:
    """Kept bytes plus the heaviest span between them, over all subsets of a chain of nine."""
    sizes = np.random.default_rng(seed).integers(1, 50, 9).tolist()
    tree, weight = tree_of(training(sizes, [(i, i + 1) for i in range(8)]))
    spans = {id(closed): spans_of(closed, weight) for closed in every_set(tree)}
    answers = [(term, lightest(tree, weight, term, spans)) for term in max_terms(tree, weight)]
    found = min(price + term for term, (price, _) in answers)

    def memory(kept: tuple[int, ...]) -> int:
        ends = [-1, *kept, len(sizes)]
        between = max(sum(sizes[a + 1 : b]) for a, b in pairwise(ends))
        return sum(sizes[i] for i in kept) + between

    assert found == min(memory(kept) for k in range(10) for kept in combinations(range(9), k))


def test_nested_skips_divide_into_nested_sets() -> None:
    """A U-Net of two levels: each skip's ends enclose the level below."""
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (2, 4), (1, 5), (5, 6)])
    tree = divide(graph, dict.fromkeys(range(7), 1), 0, 6, range(1, 6))
    assert tree.line == (1, 5)
    assert tree.parts[1].line == (2, 4)
    assert tree.parts[1].parts[1].members == (3,)


def test_branches_and_what_has_neither_branch_nor_splitting_vertex() -> None:
    diamond = nx.DiGraph([(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)])
    tree = divide(diamond, dict.fromkeys(range(6), 1), 0, 5, range(1, 5))
    assert [part.members for part in tree.parts[1].parts] == [(2,), (3,)]
    dense = nx.DiGraph([(0, 1), (0, 3), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (1, 4), (3, 6), (0, 6)])
    tree = divide(dense, dict.fromkeys(range(7), 1), 0, 6, range(1, 6))
    assert tree.line == ()
    assert sorted([*tree.joints, *(v for part in tree.parts for v in part.members)]) == list(range(1, 6))
    assert tree.joints and tree.parts


def test_what_hangs_off_the_main_path_hides_no_splitting_vertex() -> None:
    """A source of its own read late (a transposed weight), and a result that nobody in forward reads."""
    edges = [(0, 1), (1, 3), (2, 4), (3, 4), (1, 5), (4, 6)]
    tree, _ = tree_of(training([5] * 7, edges))
    assert tree.line == (1, 2, 4, 5, 7)


def dense_net(layers: tuple[int, ...]) -> Problem:
    """Blocks of layers that each read a concatenation of all before; sizes as DenseNet's, transitions halve."""
    sizes, edges = [1000], []

    def op(inputs: list[int], size: int) -> int:
        sizes.append(size)
        edges.extend((i, len(sizes) - 1) for i in inputs)
        return len(sizes) - 1

    x, area = op([0], 6400), 100
    for depth in layers:
        features, width = [x], 64
        for _ in range(depth):
            h = op(features, width * area)
            for size in (width, width, 128, 128, 128, 32):
                h = op([h], size * area)
            features.append(h)
            width += 32
        x, area = op(features, width * area), area // 2
        for _ in range(4):
            x = op([x], width * area // 4)
    return training(sizes, edges)


def test_a_graph_of_densenet121s_size_takes_seconds() -> None:
    problem = dense_net((6, 12, 24, 16))
    peak = simulate(problem, baseline(problem)).peak
    start = time.process_time()
    plan = get("optimal_dag")(Request(problem, 0, baseline(problem)))
    assert time.process_time() - start < 20
    check_schedule(problem, plan)
    assert simulate(problem, plan).peak < 0.4 * peak
    assert plan.overhead(problem) <= 0.5


def test_a_deadline_ends_the_sweep_of_max_terms() -> None:
    problem, deadline = chain(16), Deadline(0.0)
    plan = get("optimal_dag")(Request(problem, 0, baseline(problem), deadline=deadline))
    assert deadline.cut_short and plan == baseline(problem)


def test_chains_grow_like_the_square_root() -> None:
    for n in (16, 64, 144):
        problem = chain(n)
        plan = get("optimal_dag")(Request(problem, 0, baseline(problem)))
        assert simulate(problem, plan).peak <= 2 * n**0.5 + 3


@pytest.mark.slow
def test_skips_may_be_nested_as_deep_as_the_graph() -> None:
    """A U-Net of 600 levels, deeper than Python's stack."""
    depth = 600
    down = [(i, i + 1) for i in range(depth)]
    up = [(depth + i, depth + i + 1) for i in range(depth)]
    skips = [(depth - 1 - i, depth + 1 + i) for i in range(depth)]
    problem = training([10] * (2 * depth + 1), down + up + skips)
    plan = get("optimal_dag")(Request(problem, 0, baseline(problem)))
    check_schedule(problem, plan)
