"""Recursive checkpointing: recompute blocks of the forward pass as often as the number of checkpoints requires.

With `m` checkpoints in addition to the active block, a chain of ``n`` blocks can be differentiated for any `m`; dynamic
programming over the numbers of remaining blocks and free checkpoints decides where to place them. In a network that is
not a chain the same order of blocks is valid; a value that crosses several blocks stays live until its last reader.

References
----------
Andreas Griewank, Andrea Walther: Algorithm 799: revolve, ACM Trans. Math. Softw. 26 (2000).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from onnx_remat.memory.problem import FORWARD, Flags, Ints, Longs, Problem, Schedule, check_schedule
from onnx_remat.plan.request import Request, register
from onnx_remat.plan.search.candidates import Candidate, best_of, priced
from onnx_remat.plan.selectors.materialize import split_step
from onnx_remat.plan.selectors.sqrt_n import crossing, segment_cuts

_BLOCKS = (512, 64, 32, 16, 8)  # numbers of blocks tried
_MOST_CHECKPOINTS = 48
_LONGEST_PLAN = 200_000  # ops of a plan above which it is not simulated


@dataclass(frozen=True, slots=True)
class Table:
    """Solution of the dynamic program, by number of blocks and of checkpoints.

    Attributes
    ----------
    runs : int64 (blocks + 1, slots + 1)
        Minimum number of forward runs of blocks.
    cut : int64 (blocks + 1, slots + 1)
        Number of blocks to run before placing a checkpoint; all of them: place none.
    """

    runs: Longs
    cut: Longs

    def stages(self, blocks: int, slots: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of blocks to run forward; (k, k) stands for the gradient of block k."""
        pending = [(0, blocks, slots)]  # first block, number of blocks (0: gradient of the first), free checkpoints
        while pending:
            first, count, free = pending.pop()
            if not count:
                yield first, first
                continue
            cut = int(self.cut[count, free])
            yield first, first + cut
            if cut > 1:
                pending.append((first, cut - 1, free))
            pending.append((first + cut - 1, 0, 0))
            if cut < count:
                pending.append((first + cut, count - cut, free - 1))


@cache
def table(blocks: int, slots: int) -> Table:
    """Solve the dynamic program for equal blocks.

    >>> table(10, 3).runs[10].tolist()
    [55, 24, 18, 16]
    """
    runs, cut = np.zeros((blocks + 1, slots + 1), np.int64), np.zeros((blocks + 1, slots + 1), np.int64)
    for free in range(slots + 1):
        for count in range(1, blocks + 1):
            runs[count, free], cut[count, free] = count + runs[count - 1, free], count
            if free and count > 1:
                cuts = np.arange(1, count)
                found = cuts + runs[count - cuts, free - 1] + runs[cuts - 1, free]
                if found.min() < runs[count, free]:
                    runs[count, free], cut[count, free] = found.min(), cuts[found.argmin()]
    return Table(runs, cut)


def recursive_plans(problem: Problem, base_order: Ints, budget: int, fixed_order: bool = False) -> list[Candidate]:
    """Return, for several numbers of blocks, the plan with as many checkpoints as fit the budget.

    If no number of checkpoints fits, the plan with the lowest peak. With `fixed_order`, as in `Request`, postponed ops
    also run in their original place.
    """
    split = split_step(problem, base_order)
    if split < _BLOCKS[-1]:
        return []
    _, crossing_bytes, made = crossing(problem, base_order, split)
    late = _for_backward(problem, base_order[:split])
    rest = np.concatenate((base_order[:split][late[base_order[:split]]], base_order[split:]))
    plans: list[Candidate] = []
    for wanted in _BLOCKS:
        cuts = list(range(1, split)) if split <= wanted else segment_cuts(crossing_bytes, made, wanted)
        if len(cuts) < 2 or (wanted == _BLOCKS[0] and split > wanted):
            continue
        blocks = [block[~late[block]] for block in np.split(base_order[:split], cuts)]
        gradients = _by_block(problem, rest, blocks)
        found = table(len(blocks), min(len(blocks) - 1, _MOST_CHECKPOINTS))
        tried: list[Candidate] = []
        few, many = 0, found.runs.shape[1] - 1
        while few <= many:  # more checkpoints: fewer runs, more memory
            slots = (few + many) // 2
            if found.runs[len(blocks), slots] * split > _LONGEST_PLAN * len(blocks):
                few = slots + 1
                continue
            order = _ordered(problem, blocks, gradients, found, slots)
            if fixed_order:
                order = _numbered(problem, order)
            if not _is_valid(problem, order):
                break  # the order is invalid for this number of blocks, whatever the checkpoints
            tried.append(priced(problem, order, budget))
            few, many = (few, slots - 1) if tried[-1].over else (slots + 1, many)
        plans += sorted(tried, key=lambda plan: plan.key)[:1]
    return plans


def _ordered(
    problem: Problem, blocks: Sequence[Ints], gradients: Sequence[Ints], found: Table, slots: int
) -> tuple[int, ...]:
    """Return the plan for a number of checkpoints."""
    order: list[int] = []
    for first, end in found.stages(len(blocks), slots):
        for part in blocks[first:end] if first < end else [gradients[first]]:
            order += part.tolist()
    return tuple(pruned(problem, [*order, *gradients[-1].tolist()]))


def _numbered(problem: Problem, order: Sequence[int]) -> tuple[int, ...]:
    """Return `order` with first occurrences by number: a late op runs in its place, and again later if it may."""
    result: list[int] = []
    following = 0  # the next op in the numbering
    for op in order:
        if op >= following:
            result += range(following, op + 1)
            following = op + 1
        elif problem.lifetimes.recomputable[op]:
            result.append(op)
    return tuple(result)


def _is_valid(problem: Problem, order: tuple[int, ...]) -> bool:
    """Whether no value is read after it was overwritten: the order of blocks ignores donations."""
    if not len(problem.donates):
        return True
    try:
        check_schedule(problem, Schedule(order))
    except ValueError:
        return False
    return True


def _for_backward(problem: Problem, forward: Ints) -> Flags:
    """Return the ops among forward steps read only by backward that belong to backward or depend on residents alone."""
    life = problem.lifetimes
    of_forward = problem.phase == FORWARD
    of_forward[forward] = True
    late, read = np.zeros(problem.n_ops, np.bool_), problem.is_output.copy()
    read[problem.in_values[np.repeat(of_forward, np.diff(problem.in_ptr))]] = True
    for op in forward.tolist():
        makers = life.maker[np.asarray(problem.inputs(op), np.int64)]
        alone = problem.phase[op] != FORWARD or bool(late[makers[makers >= 0]].all())
        late[op] = alone and not any(read[v] for v in problem.outputs(op))
    return late


def _by_block(problem: Problem, backward: Ints, blocks: Sequence[Ints]) -> list[Ints]:
    """Return the backward ops that run with the gradient of each block, and last those that run after all of them.

    A descendant of the loss is due with the latest block that makes one of its forward inputs, or that reads such an
    input from a distance, but not before its backward inputs are made; an op that overwrites a resident is due no
    earlier than the first block that reads it. Any other op, a mask or the slope of an activation say, is due when it
    is first needed.
    """
    life, last = problem.lifetimes, len(blocks) - 1
    due = np.full(problem.n_ops, -1, np.int64)  # of forward ops: the block
    for index, block in enumerate(blocks):
        due[block] = index
    due[backward[problem.phase[backward] == FORWARD]] = last  # the loss itself
    block_of = np.full(problem.n_values, -1, np.int64)
    np.maximum.at(block_of, problem.out_values, np.repeat(due, np.diff(problem.out_ptr)))
    of_forward = block_of >= 0
    until = block_of.copy()
    np.maximum.at(until, problem.in_values, np.repeat(due, np.diff(problem.in_ptr)))
    block_of = np.where(until > block_of + 1, until, block_of)  # a reader in the next block does not postpone it
    latest = np.full(problem.n_ops, -1, np.int64)  # latest block that an op depends on, directly or indirectly
    of_loss = np.zeros(problem.n_ops, np.bool_)
    makers = {}
    for op in backward.tolist():
        read = np.asarray(problem.inputs(op), np.int64)
        before = life.maker[read[~of_forward[read]]]
        makers[op] = before = before[before >= 0]
        latest[op] = max(block_of[read[of_forward[read]]].max(initial=-1), latest[before].max(initial=-1))
        of_loss[op] = latest[op] == last
        if not of_loss[op]:
            continue
        chain, aside = before[of_loss[before]], before[~of_loss[before]]
        needs = max(block_of[read[of_forward[read]]].max(initial=-1), latest[aside].max(initial=-1))
        ready = due[chain].min(initial=last)
        due[op] = min(ready, needs) if needs >= 0 else ready
        for value in problem.outputs(op):
            if len(problem.donates) and (resident := problem.donates[value]) >= 0:
                readers = life.readers[life.reader_ptr[resident] : life.reader_ptr[resident + 1]]
                due[op] = min(due[op], due[readers].min(initial=last))
    for op in reversed(backward.tolist()):
        if not of_loss[op] and due[op] < 0:
            due[op] = latest[op]
        aside = makers[op][~of_loss[makers[op]]]
        due[aside] = np.maximum(due[aside], due[op])
    return [backward[due[backward] == index] for index in (*range(len(blocks)), -1)]


def pruned(problem: Problem, order: Sequence[int]) -> list[int]:
    """Return `order` without forbidden recomputes and without runs whose results have no reader before the next run."""
    life = problem.lifetimes
    ran, renewed = np.zeros(problem.n_ops, np.bool_), np.zeros(problem.n_ops, np.bool_)
    renewing = life.renewed_by[life.root[problem.in_values]]
    allowed: list[int] = []
    for op in order:
        waits = renewing[problem.in_ptr[op] : problem.in_ptr[op + 1]]
        if ran[op] and (not life.recomputable[op] or renewed[waits[(waits >= 0) & (waits != op)]].any()):
            continue
        ran[op] = renewed[op] = True
        allowed.append(op)
    made = [problem.outputs(op) for op in range(problem.n_ops)]
    read = [problem.inputs(op) for op in range(problem.n_ops)]
    unread = np.ones(problem.n_values, np.bool_)
    unread[problem.in_values] = False
    without_reader = [all(unread[v] for v in values) for values in made]  # ops without readers: their first run stays
    wanted = problem.is_output.copy()
    kept: list[int] = []
    seen = np.zeros(problem.n_ops, np.bool_)
    for op in reversed(allowed):
        if any(wanted[v] for v in made[op]) or (without_reader[op] and not seen[op]):
            kept.append(op)
            seen[op] = True
            for value in made[op]:
                wanted[value] = False
            for value in read[op]:
                wanted[value] = True
    return kept[::-1]


@register("revolve")
def revolve(request: Request) -> Schedule:
    """Griewank & Walther 2000: blocks run again as often as it takes, for budgets below those of sqrt_n."""
    problem, order = request.problem, request.baseline
    plans = recursive_plans(problem, order.array(), request.budget, request.fixed_order)
    return best_of([priced(problem, order.order, request.budget), *plans]).schedule
