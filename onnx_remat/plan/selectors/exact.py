"""Retention intervals as a constraint program, solved to proved optimality on small graphs.

Class: first executions follow the ops' numbering, changed only as donations require; between two of them each op may
run again at most once, in that order (Checkmate's staged schedules); liveness ignores views, shared and in-place
buffers. A result marked OPTIMAL has the least cost under the budget within that class.

References
----------
Jain et al.: Checkmate, MLSys 2020 (stages). Bartan et al.: Moccasin, ICML 2023 (constraint programming).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from onnx_remat.memory.donation import after_readers
from onnx_remat.memory.problem import Problem, Schedule
from onnx_remat.plan.request import Deadline, Request, register
from onnx_remat.plan.search.candidates import cheapest_within
from onnx_remat.plan.selectors.search import search

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

_MOST_OPS = 60  # the model has a variable per pair of ops
_COST_UNITS = 10**6  # integer units that stand for the cost of all ops
_DETERMINISTIC_SECONDS_PER_SECOND = 0.4  # solver's deterministic seconds per second of effort


@dataclass(frozen=True, slots=True)
class Proof:
    """A schedule, if one was found in the class, and whether the answer is proved."""

    schedule: Schedule | None
    optimal: bool


def solve(
    problem: Problem, budget: int, effort: float, hint: Schedule | None = None, deadline: Deadline | None = None
) -> Proof:
    """Find the least-cost staged schedule under `budget`.

    Parameters
    ----------
    effort : float
        Deterministic seconds of the solver.
    hint : Schedule or None
        A schedule to start from, in the class or not.
    deadline : Deadline or None
        When to give up, also while the model is built.

    Returns
    -------
    Proof
        ``optimal`` without a schedule: the class has none under the budget.
    """
    from ortools.sat.python import cp_model  # its import takes as long as all others of the command line together

    deadline = deadline or Deadline()
    n, life = problem.n_ops, problem.lifetimes
    first = after_readers(problem, range(n)).tolist()  # the op at each place of a stage
    place = np.argsort(first)
    model = cp_model.CpModel()
    run = {(t, i): model.new_bool_var(f"run{t}_{i}") for t in range(n) for i in range(t + 1)}
    total = float(problem.cost.sum()) or 1.0
    prices = [round(float(problem.cost[op]) / total * _COST_UNITS) for op in first]
    inputs = [sorted({v for v in problem.inputs(op) if life.maker[v] >= 0}) for op in first]
    closes = [min((int(place[q]) for q in _renewing(problem, op)), default=n) for op in first]
    values = [(v, i) for i, op in enumerate(first) for v in problem.outputs(op)]
    # has[t, i, v]: value v is available after place (t, i); place (t, i) follows (t, i - 1).
    before: dict[int, cp_model.IntVar] = {}
    for t in range(n):
        if deadline.passed():
            return Proof(None, False)
        for i in range(t + 1):
            here = run[t, i]
            if i == t:
                model.add(here == 1)
            elif not life.recomputable[first[i]] or closes[i] < t:
                model.add(here == 0)
            for v in inputs[i]:
                model.add_implication(here, before[v])
            after = dict(before)
            occupied = []
            for v, maker in values:
                if maker > t:
                    continue
                now = model.new_bool_var(f"has{t}_{i}_{v}")
                if maker == i:
                    if v in before:
                        model.add(now <= before[v] + here)
                        occupied.append((_either(model, before[v], here), int(life.nbytes[v])))
                    else:
                        model.add(now <= here)
                        occupied.append((here, int(life.nbytes[v])))
                elif v in before:
                    model.add(now <= before[v])
                    occupied.append((before[v], int(life.nbytes[v])))
                else:
                    model.add(now == 0)
                if life.kept[v] and (v in before or maker == i):
                    model.add(now >= before.get(v, here))
                after[v] = now
            scratch = int(problem.workspace[first[i]]) + (int(problem.rerun_workspace[first[i]]) if i < t else 0)
            room = budget - problem.base_bytes - scratch
            model.add(sum(size * flag for flag, size in occupied) <= room).only_enforce_if(here)
            before = after
    if hint is not None:
        _suggest(model, run, [int(place[op]) for op in hint.order])
    model.minimize(sum(prices[i] * run[t, i] for t, i in run if i < t))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    if math.isfinite(deadline.left()):
        solver.parameters.max_time_in_seconds = max(deadline.left(), 0.0)
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        order = tuple(first[i] for t in range(n) for i in range(t + 1) if solver.value(run[t, i]))
        return Proof(Schedule(order), status == cp_model.OPTIMAL)
    return Proof(None, status == cp_model.INFEASIBLE)


def _renewing(problem: Problem, op: int) -> list[int]:
    """Return the ops after which `op` must not run: they overwrite its inputs."""
    life = problem.lifetimes
    found = {int(life.renewed_by[life.root[v]]) for v in problem.inputs(op)}
    return sorted(found - {-1, op})


def _either(model: cp_model.CpModel, a: cp_model.IntVar, b: cp_model.IntVar) -> cp_model.IntVar:
    """Return a variable that is true if and only if `a` or `b` is."""
    both = model.new_bool_var("")
    model.add_max_equality(both, [a, b])
    return both


def _suggest(model: cp_model.CpModel, run: dict[tuple[int, int], cp_model.IntVar], hint: list[int]) -> None:
    """Hint which place runs in which stage; `hint` lists places in execution order."""
    chosen, stage, seen = set(), 0, set()
    for place in hint:
        chosen.add((stage, place))
        if place not in seen:
            seen.add(place)
            stage = max(stage, place + 1)
    for key, flag in run.items():
        model.add_hint(flag, int(key in chosen))


@register("exact")
def exact(request: Request) -> Schedule:
    """CP-SAT over retention intervals, optimal among staged schedules where it finishes; small graphs only.

    Larger graphs, and budgets where nothing in the class fits, are left to `search`.
    """
    found = search(request)
    if request.problem.n_ops > _MOST_OPS or request.deadline.passed():
        return found
    effort = request.effort * _DETERMINISTIC_SECONDS_PER_SECOND if request.work is None else request.work * 1e-4
    proof = solve(request.problem, request.budget, effort, found, request.deadline)
    request.deadline.passed()  # sets `cut_short` if the deadline cut the solver short
    return cheapest_within(request, [found] if proof.schedule is None else [found, proof.schedule])
