"""The working-set floor: bytes that no schedule can peak below."""

from __future__ import annotations

from onnx_remat.schedule import Ints, Problem, alias_roots


def lower_bound(problem: Problem) -> int:
    """Bytes below which no schedule of the problem peaks: the working-set floor.

    Class: every valid schedule, any order, any number of recomputes, under the simulator's buffer rules. When
    an op runs for the first time, the buffers it reads and those it writes are all allocated; only an alias
    lets two live values share one, and only an in-place output joins an input. In the end all graph outputs
    are held.

    Parameters
    ----------
    problem : Problem
        The graph.

    Returns
    -------
    int
        Bytes, residents included.
    """
    floor = int(problem.nbytes[problem.is_output & ~problem.resident].sum())
    root = alias_roots(problem)
    for op in range(problem.n_ops):
        floor = max(floor, _reads(problem, op, root) + writes(problem, op) + int(problem.workspace[op]))
    return problem.base_bytes + floor


def _reads(problem: Problem, op: int, root: Ints) -> int:
    """Bytes surely allocated for what `op` reads."""
    held: dict[int, int] = {}
    for value in problem.inputs(op):
        shared = int(root[value])
        if not problem.resident[shared]:
            size = min(int(problem.nbytes[shared]), int(problem.nbytes[value]))
            held[shared] = min(held.get(shared, size), size)
    return sum(held.values())


def writes(problem: Problem, op: int) -> int:
    """Bytes surely allocated for what `op` writes the first time, beside what it reads."""
    inputs = problem.inputs(op)
    total = 0
    for k in range(problem.out_ptr[op], problem.out_ptr[op + 1]):
        value = problem.out_values[k]
        if not problem.is_output[value]:
            if problem.alias_slot[k] >= 0:
                continue
            slots = problem.inplace_slots[problem.inplace_ptr[k] : problem.inplace_ptr[k + 1]]
            same = [problem.shape_class[inputs[slot]] == problem.shape_class[value] >= 0 for slot in slots]
            if any(same):
                continue
        total += int(problem.nbytes[value])
    return total
