"""Budget-driven search: several seeds, annealed over retention intervals against the liveness profile.

Seeds are orders without recompute, priced cuts, segment plans, plans for a stack of equal layers derived from a few of
its layers, and recursive plans if none of these is small enough. A value may be recomputed more than once, and the
order, unless fixed, is part of the plan. Buffers that the runtime shares can make the simulated peak higher than that
of liveness; the search is then repeated with a lower target.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from onnx_remat.memory.problem import Ints, Longs, Problem, Schedule
from onnx_remat.plan.request import Request, register, silent
from onnx_remat.plan.search.candidates import Candidate, Heat, annealed, apart, best_of, fits, in_parallel, priced
from onnx_remat.plan.search.core import LivenessModel, liveness_model
from onnx_remat.plan.search.effort import allowance
from onnx_remat.plan.search.tuning import (
    AIMS,
    ALMOST,
    CONTINUE_HEAT,
    CONTINUE_SHARE,
    DEAR,
    LANES,
    LARGE_OPS,
    LAST_HEATS,
    LAST_ROUNDS,
    LAYERS_WORK_PER_OP,
    MOST_TRIES,
    PATIENCE,
    PLANS_CONTINUED,
    RECURSION_SECONDS_PER_OP,
    TIGHTER_TARGETS,
    TRIAL_HEATS,
    TRY_SHARE,
    WORK_PER_CANDIDATE,
    WORK_PER_OP,
)
from onnx_remat.plan.selectors.keep_all import reordered
from onnx_remat.plan.selectors.layers import layered
from onnx_remat.plan.selectors.min_cut import cut_seeds
from onnx_remat.plan.selectors.revolve import recursive_plans
from onnx_remat.plan.selectors.sqrt_n import segment_seeds
from onnx_remat.units import format_bytes


def seeds(request: Request, view: LivenessModel, work: int) -> tuple[list[Candidate], list[Candidate]]:
    """Return plans without recompute and plans by the classical methods, each list best first."""
    problem, budget = request.problem, request.budget
    plain = reordered(request, view, work)
    bases = [plain[0].schedule] if request.fixed_order else [plain[0].schedule, request.baseline]
    classical: list[Candidate] = []
    if plain[0].over and not request.fixed_order and not request.deadline.passed():
        classical += _from_few_layers(request, plain[0].schedule, work)
    for base in bases:
        if classical and request.deadline.passed():
            break
        plans = segment_seeds(problem, base.array())
        if problem.n_ops <= LARGE_OPS:
            plans += cut_seeds(problem, base.array(), budget, request.deadline)
        classical += [priced(problem, plan.order, budget) for plan in plans]
        too_tight = all(plan.over for plan in (*plain, *classical))  # for plans with one recompute per op
        if too_tight and not request.deadline.ends_within(RECURSION_SECONDS_PER_OP * problem.n_ops):
            classical += recursive_plans(problem, base.array(), budget, request.fixed_order)
    return plain, sorted(classical, key=lambda plan: plan.key)


def _from_few_layers(request: Request, base: Schedule, work: int) -> list[Candidate]:
    """Return plans for a stack of equal layers, derived from plans for a few layers searched with at least 2 `work`."""
    candidates = max(2 * work, LAYERS_WORK_PER_OP * request.problem.n_ops) // WORK_PER_CANDIDATE

    def solve(problem: Problem, budget: int, order: Ints) -> Schedule:
        few = replace(request, problem=problem, budget=budget, baseline=Schedule(tuple(order.tolist())), known=())
        return find(replace(few, work=candidates, use_time=False, progress=silent)).schedule

    found = layered(request.problem, base.array(), request.budget, solve)
    return [priced(request.problem, schedule.order, request.budget) for schedule in found]


def find(request: Request) -> Candidate:
    """Return the best plan found within the allowance; no plan of `Request.known` within the budget costs less."""
    view = liveness_model(request.problem, request.fixed_order)
    work = allowance(request)
    request.progress("seeds", 0.0)
    given = [priced(request.problem, schedule.order, request.budget) for schedule in request.known]
    if given and request.use_time:
        repaired = _repair_target(request, view, given, work)
        if not repaired.over:
            return _continue_from(request, view, repaired, request.budget, work)
        given.append(repaired)
    plain, classical = seeds(request, view, work // 10)
    best = best_of([*plain, *classical, *given])
    if not plain[0].over:
        return best
    target, cheap = request.budget, DEAR * plain[0].cost
    nearest = plain[0]
    for _ in range(TIGHTER_TARGETS):
        if request.deadline.passed():
            break
        annealings = _anneal_seeds(request, view, plain, [*given, *classical], target, work)
        found = best_of(annealings)
        plans = [with_budget(plan, request.budget) for plan in annealings]
        best = best_of([best, *plans])
        nearest = min((plan for plan in (nearest, *plans) if plan.over and plan.cost <= cheap), key=lambda p: p.peak)
        if not best.over or not fits(view, found, target):
            break  # if even liveness exceeds the target, a lower one does not help
        target = int(target * request.budget / max(found.peak, request.budget + 1) * 0.995)
        work //= 4
    if best.over or best.cost > cheap:
        start = best if best.over else nearest
        best = best_of([best, _extend_effort(request, view, start, target, allowance(request))])
    if request.use_time:
        best = _continue_from(request, view, best, target, allowance(request))
    request.progress("done", 1.0)
    return best


def _repair_target(request: Request, view: LivenessModel, known: list[Candidate], work: int) -> Candidate:
    """Anneal the known plan of the lowest peak towards the budget, which is faster than a search from the seeds.

    It takes at most half of the time left. Return the best plan, known plans included.
    """
    nearest, half = min(known, key=lambda plan: (plan.peak, plan.cost)), request.deadline.sooner(0.0, 0.5)
    run = partial(annealed, view, nearest, request.budget, work, Heat(*CONTINUE_HEAT), request.seed)
    found = apart(run, half)
    return best_of([*known, with_budget(found, request.budget)])


def _continue_from(request: Request, view: LivenessModel, best: Candidate, budget: int, work: int) -> Candidate:
    """Continue from the best plan until the deadline, with twice the work each round, while that finds better plans."""
    fruitless = turn = 0
    while fruitless < PATIENCE and not request.deadline.passed():
        better = best_of([best, *_round(request, view, best, budget, work << turn, turn)])
        fruitless = fruitless + 1 if better is best else 0
        best, turn = better, turn + 1
    return best


def _extend_effort(request: Request, view: LivenessModel, best: Candidate, budget: int, work: int) -> Candidate:
    """Continue from a plan above the budget, for as long as each round gains enough to reach the budget in time."""
    for turn in range(LAST_ROUNDS):
        lower = best_of([best, *_round(request, view, best, budget, work, turn)])
        gained, best = best.peak - lower.peak, lower
        missing = best.peak - request.budget
        if not best.over or request.deadline.passed() or gained * (LAST_ROUNDS - turn - 1) < missing:
            break
    return best


def _round(
    request: Request, view: LivenessModel, start: Candidate, budget: int, work: int, turn: int
) -> list[Candidate]:
    """Run one annealing per lane from `start`: a hot one with alternating temperatures, and a cool one."""
    heats = TRIAL_HEATS[turn % len(TRIAL_HEATS)], CONTINUE_HEAT
    request.progress("improving further", 0.0)

    def run(lane: int, stop: Longs) -> Candidate:
        seed, heat = request.seed + 1000 + LANES * turn + lane, Heat(*heats[lane])
        return annealed(view, start, budget, work, heat, seed, stop)

    return [with_budget(plan, request.budget) for plan in in_parallel(run, range(LANES), request.deadline)]


def with_budget(plan: Candidate, budget: int) -> Candidate:
    """Return `plan` with `over` for another budget."""
    return replace(plan, over=plan.peak > budget)


def _anneal_seeds(
    request: Request, view: LivenessModel, plain: list[Candidate], others: list[Candidate], budget: int, work: int
) -> list[Candidate]:
    """Anneal from several starting points, then continue from the best plans; return all found. `work` is per lane."""
    clock = request.deadline
    work *= LANES
    others = sorted((with_budget(plan, budget) for plan in others), key=lambda plan: plan.key)
    almost = [plan for plan in others if budget < plan.peak <= ALMOST * budget and plan.cost < others[0].cost]
    almost = sorted(almost, key=lambda plan: plan.cost)[:1]
    starts = [*plain[:1], *others[:1], *almost, *(plain[1:2] if not request.fixed_order else [])]
    tries = min(MOST_TRIES, max(1, int(work * TRY_SHARE / (WORK_PER_OP * request.problem.n_ops))))

    def start(i: int, stop: Longs) -> Candidate:
        request.progress("starting", i * TRY_SHARE / tries)
        heat = Heat(*TRIAL_HEATS[i % len(TRIAL_HEATS)])
        plan = starts[(i // len(TRIAL_HEATS) + i) % len(starts)]
        share, seed = int(work * TRY_SHARE / tries), request.seed + i
        return annealed(view, plan, budget, share, heat, seed, stop, keep=i % 2 == 0)

    tried = sorted([*others[:1], *in_parallel(start, range(tries), clock)], key=lambda plan: plan.key)
    above = [plan for plan in (*tried, *others) if plan.over]
    if tried[0].over or (above and tried[0].cost > DEAR * plain[0].cost):
        above = sorted(above, key=lambda plan: plan.peak)
        cheap = [plan for plan in above if plan.cost <= DEAR * plain[0].cost]
        starting = above[0], (cheap or above)[0]
        kept = [(plan, int(budget * aim)) for plan, aim in zip(starting, AIMS, strict=True)]
    else:
        kept = [(plan, budget) for plan in tried[: PLANS_CONTINUED if tries > 1 else LANES]]
    longer = LANES if kept[0][0].over else 1  # where no plan fits, each lane has the whole share
    most = int(work * CONTINUE_SHARE * longer / len(kept))

    def go_on(i: int, stop: Longs) -> Candidate:
        plan, aim = kept[i]
        request.progress(_improving(request, plan), TRY_SHARE + i * CONTINUE_SHARE / len(kept))
        seed = request.seed + tries + i
        return with_budget(annealed(view, plan, aim, most, Heat(*CONTINUE_HEAT), seed, stop), budget)

    found = [*tried, kept[0][0], *in_parallel(go_on, range(len(kept)), clock)]
    best = best_of(found)
    rest = int(work * (1 - TRY_SHARE - CONTINUE_SHARE) / len(LAST_HEATS))

    def finish(i: int, stop: Longs) -> Candidate:
        return annealed(view, best, budget, rest, Heat(*LAST_HEATS[i]), request.seed + i, stop)

    return [*found, *in_parallel(finish, range(len(LAST_HEATS)), clock)]


def _improving(request: Request, plan: Candidate) -> str:
    """Return the progress message for improving `plan`."""
    if plan.over:
        return f"no plan within the budget yet, lowest peak {format_bytes(plan.peak)}"
    return f"improving a plan of +{plan.cost / (float(request.problem.cost.sum()) or 1.0) - 1:.1%} compute"


@register("search")
def search(request: Request) -> Schedule:
    """Own method: cuts, segments and annealed retention intervals; any number of recomputes, any order."""
    return find(request).schedule
