"""Recursive checkpointing: blocks of the forward pass run again as often as few held results make it necessary.

With `m` checkpoints held besides the block at work, ``n`` blocks in a row can be differentiated for any `m`; dynamic
programming over how many blocks are left and how many checkpoints are free says where to hold one. In a network that
is no chain the same order of blocks is valid; what crosses several of them is held for as long as somebody reads it.

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
from onnx_remat.plan.search.plans import Plan, best_of, priced
from onnx_remat.plan.selectors.materialize import split_step
from onnx_remat.plan.selectors.sqrt_n import crossing, segment_cuts

_BLOCKS = (512, 64, 32, 16, 8)
_SLOTS = 48  # checkpoints, at most
_LONGEST = 200_000  # ops of a plan that are worth simulating


@dataclass(frozen=True, slots=True)
class Table:
    """What dynamic programming found, by number of blocks and of checkpoints.

    Attributes
    ----------
    runs : int64 (blocks + 1, slots + 1)
        Fewest blocks run forward.
    cut : int64 (blocks + 1, slots + 1)
        How many blocks to run before the result is held; all of them: then nothing is.
    """

    runs: Longs
    cut: Longs

    def stages(self, blocks: int, slots: int) -> Iterator[tuple[int, int]]:
        """Ranges of blocks to run forward; one (k, k) says that block k is differentiated."""
        pending = [(0, blocks, slots)]  # first block, how many, checkpoints; none: the gradient of the first one
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
    """Of equal blocks.

    >>> table(10, 3).runs[10].tolist()
    [55, 24, 18, 16]
    """
    runs, cut = np.zeros((blocks + 1, slots + 1), np.int64), np.zeros((blocks + 1, slots + 1), np.int64)
    for free in range(slots + 1):
        for count in range(1, blocks + 1):
            runs[count, free], cut[count, free] = count + runs[count - 1, free], count
            if free and count > 1:
                held = np.arange(1, count)
                found = held + runs[count - held, free - 1] + runs[held - 1, free]
                if found.min() < runs[count, free]:
                    runs[count, free], cut[count, free] = found.min(), held[found.argmin()]
    return Table(runs, cut)


def recursive_plans(problem: Problem, base_order: Ints, budget: int, fixed_order: bool = False) -> list[Plan]:
    """For several numbers of blocks the plan with as many checkpoints as the budget has room for.

    Where it has none for any number of them, the plan with the lowest peak. With `fixed_order`, as in `Request`, what
    this puts off runs in its place all the same.
    """
    split = split_step(problem, base_order)
    if split < _BLOCKS[-1]:
        return []
    _, crossing_bytes, made = crossing(problem, base_order, split)
    late = _for_backward(problem, base_order[:split])
    rest = np.concatenate((base_order[:split][late[base_order[:split]]], base_order[split:]))
    plans: list[Plan] = []
    for wanted in _BLOCKS:
        cuts = list(range(1, split)) if split <= wanted else segment_cuts(crossing_bytes, made, wanted)
        if len(cuts) < 2 or (wanted == _BLOCKS[0] and split > wanted):
            continue
        blocks = [block[~late[block]] for block in np.split(base_order[:split], cuts)]
        gradients = _by_block(problem, rest, blocks)
        found = table(len(blocks), min(len(blocks) - 1, _SLOTS))
        tried: list[Plan] = []
        few, many = 0, found.runs.shape[1] - 1
        while few <= many:  # more checkpoints: less to run, more to hold
            slots = (few + many) // 2
            if found.runs[len(blocks), slots] * split > _LONGEST * len(blocks):
                few = slots + 1
                continue
            order = _ordered(problem, blocks, gradients, found, slots)
            if fixed_order:
                order = _numbered(problem, order)
            if not _is_valid(problem, order):
                break  # this number of blocks puts it so, whatever is held
            tried.append(priced(problem, order, budget))
            few, many = (few, slots - 1) if tried[-1].over else (slots + 1, many)
        plans += sorted(tried, key=lambda plan: plan.key)[:1]
    return plans


def _ordered(
    problem: Problem, blocks: Sequence[Ints], gradients: Sequence[Ints], found: Table, slots: int
) -> tuple[int, ...]:
    """The plan for a number of checkpoints."""
    order: list[int] = []
    for first, end in found.stages(len(blocks), slots):
        for part in blocks[first:end] if first < end else [gradients[first]]:
            order += part.tolist()
    return tuple(pruned(problem, [*order, *gradients[-1].tolist()]))


def _numbered(problem: Problem, order: Sequence[int]) -> tuple[int, ...]:
    """`order` with first occurrences by number: what comes late runs once before, and again unless it must not."""
    result: list[int] = []
    following = 0  # the op that is to run first now
    for op in order:
        if op >= following:
            result += range(following, op + 1)
            following = op + 1
        elif problem.lifetimes.recomputable[op]:
            result.append(op)
    return tuple(result)


def _is_valid(problem: Problem, order: tuple[int, ...]) -> bool:
    """Whether nothing is read after it was renewed: the order of blocks knows nothing of donations."""
    if not len(problem.donates):
        return True
    try:
        check_schedule(problem, Schedule(order))
    except ValueError:
        return False
    return True


def _for_backward(problem: Problem, forward: Ints) -> Flags:
    """Ops among the forward pass's that only the backward pass reads, and that are its own or made of residents."""
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
    """The ops of the backward pass that run when the gradient of each block is due, and last those due later still.

    What follows from the loss is due with the last block that makes what it reads of the forward pass, or that reads it
    far from there, once what it reads of the backward pass is there; what it renews, no earlier block may read. All
    else, such as a mask, or the slope of an activation, is due when it is first needed.
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
    block_of = np.where(until > block_of + 1, until, block_of)  # the next block reads it all the same
    latest = np.full(problem.n_ops, -1, np.int64)  # block that an op needs, others in between included
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
    """`order` without runs whose results nobody reads before they are made again, nor those that must not be."""
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
    nobody = np.ones(problem.n_values, np.bool_)
    nobody[problem.in_values] = False
    alone = [all(nobody[v] for v in values) for values in made]  # a result to keep, or one that nobody asked for
    wanted = problem.is_output.copy()
    kept: list[int] = []
    seen = np.zeros(problem.n_ops, np.bool_)
    for op in reversed(allowed):
        if any(wanted[v] for v in made[op]) or (alone[op] and not seen[op]):
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
