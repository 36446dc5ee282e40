"""Budget-driven search: several seeds, annealed over retention intervals against the liveness profile.

Seeds are orders without recompute, priced cuts, segment plans, plans of a stack of equal layers from those of few of
them, and recursive ones where none of these is small enough. Values may be recomputed more than once, and where the
order is free it is part of the plan. Buffers that the runtime would share make the true peak higher than liveness says;
where the simulator finds that, the search is repeated for a smaller budget.
"""

from __future__ import annotations

from dataclasses import replace

from onnx_remat.memory.problem import Ints, Problem, Schedule
from onnx_remat.plan.request import Request, register, silent
from onnx_remat.plan.search.core import Viewless, viewless
from onnx_remat.plan.search.effort import allowance
from onnx_remat.plan.search.plans import Heat, Plan, annealed, best_of, fits, priced, side_by_side
from onnx_remat.plan.search.tuning import (
    AIMS,
    ALMOST,
    CONTINUE_HEAT,
    CONTINUE_SHARE,
    DEAR,
    FRUITLESS,
    LANES,
    LARGE_OPS,
    LAST_HEATS,
    LAST_ROUNDS,
    LAYERS_WORK_PER_OP,
    MOST_TRIES,
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


def seeds(request: Request, view: Viewless, work: int) -> tuple[list[Plan], list[Plan]]:
    """Plans without recompute and plans by the classical methods, each list best first."""
    problem, budget = request.problem, request.budget
    plain = reordered(request, view, work)
    bases = [plain[0].schedule] if request.fixed_order else [plain[0].schedule, request.baseline]
    classical: list[Plan] = []
    if plain[0].over and not request.fixed_order:
        classical += _of_layers(request, plain[0].schedule, work)
    for base in bases:
        if classical and request.deadline.passed():
            break
        plans = segment_seeds(problem, base.array())
        if problem.n_ops <= LARGE_OPS:
            plans += cut_seeds(problem, base.array(), budget)
        classical += [priced(problem, plan.order, budget) for plan in plans]
        too_tight = all(plan.over for plan in (*plain, *classical))  # for one recompute of each
        if too_tight and not request.deadline.ends_within(RECURSION_SECONDS_PER_OP * problem.n_ops):
            classical += recursive_plans(problem, base.array(), budget, request.fixed_order)
    return plain, sorted(classical, key=lambda plan: plan.key)


def _of_layers(request: Request, base: Schedule, work: int) -> list[Plan]:
    """Plans of a stack of equal layers from plans of few of them, each searched with twice `work` or more."""
    candidates = max(2 * work, LAYERS_WORK_PER_OP * request.problem.n_ops) // WORK_PER_CANDIDATE

    def solve(problem: Problem, budget: int, order: Ints) -> Schedule:
        few = replace(request, problem=problem, budget=budget, baseline=Schedule(tuple(order.tolist())), known=())
        return find(replace(few, work=candidates, use_time=False, progress=silent)).schedule

    found = layered(request.problem, base.array(), request.budget, solve)
    return [priced(request.problem, schedule.order, request.budget) for schedule in found]


def find(request: Request) -> Plan:
    """The best plan within the allowance; none of `Request.known` that keeps the budget costs less."""
    view = viewless(request.problem, request.fixed_order)
    work = allowance(request)
    request.progress("seeds", 0.0)
    given = [priced(request.problem, schedule.order, request.budget) for schedule in request.known]
    if given and request.use_time:
        mended = _mended(request, view, given, work)
        if not mended.over:
            return _going_on(request, view, mended, request.budget, work)
        given.append(mended)
    plain, classical = seeds(request, view, work // 10)
    best = best_of([*plain, *classical, *given])
    if not plain[0].over:
        return best
    target = request.budget
    for _ in range(TIGHTER_TARGETS):
        if request.deadline.passed():
            break
        found = _within(request, view, plain, [*given, *classical], target, work)
        best = best_of([best, replace_over(found, request.budget)])
        if not best.over or not fits(view, found, target):
            break  # where not even liveness keeps the target, a smaller one is no help
        target = int(target * request.budget / max(found.peak, request.budget + 1) * 0.995)
        work //= 4
    if request.use_time:
        best = _going_on(request, view, best, target, allowance(request))
    elif best.over:
        best = _pressing_on(request, view, best, target, allowance(request))
    request.progress("done", 1.0)
    return best


def _mended(request: Request, view: Viewless, known: list[Plan], work: int) -> Plan:
    """The best of known plans, annealed to keep a budget that it was not made for: sooner than another from the start.

    That may take half of the time there is.
    """
    nearest, half = min(known, key=lambda plan: (plan.peak, plan.cost)), request.deadline.sooner(0.0, 0.5)
    found = annealed(view, nearest, request.budget, work, Heat(*CONTINUE_HEAT), request.seed, deadline=half)
    return best_of([*known, replace_over(found, request.budget)])


def _going_on(request: Request, view: Viewless, best: Plan, budget: int, work: int) -> Plan:
    """Anneal on from the best plan until the deadline, in ever longer rounds, while that finds better ones."""
    fruitless = turn = 0
    while fruitless < FRUITLESS and not request.deadline.passed():
        better = best_of([best, *_turn(request, view, best, budget, work << turn, turn)])
        fruitless = fruitless + 1 if better is best else 0
        best, turn = better, turn + 1
    return best


def _pressing_on(request: Request, view: Viewless, best: Plan, budget: int, work: int) -> Plan:
    """Anneal on from a plan above the budget, for as many rounds as get lower at a pace that reaches it in the end."""
    for turn in range(LAST_ROUNDS):
        lower = best_of([best, *_turn(request, view, best, budget, work, turn)])
        gained, best = best.peak - lower.peak, lower
        missing = best.peak - request.budget
        if not best.over or request.deadline.passed() or gained * (LAST_ROUNDS - turn - 1) < missing:
            break
    return best


def _turn(request: Request, view: Viewless, start: Plan, budget: int, work: int, turn: int) -> list[Plan]:
    """One run per lane from `start`: one hot, its heat by turns, one that goes on where it is."""
    heats = TRIAL_HEATS[turn % len(TRIAL_HEATS)], CONTINUE_HEAT
    request.progress("improving further", 0.0)

    def run(lane: int) -> Plan:
        seed, heat = request.seed + 1000 + LANES * turn + lane, Heat(*heats[lane])
        return annealed(view, start, budget, work, heat, seed, deadline=request.deadline)

    return [replace_over(plan, request.budget) for plan in side_by_side(run, range(LANES))]


def replace_over(plan: Plan, budget: int) -> Plan:
    """`plan` judged by another budget."""
    return replace(plan, over=plan.peak > budget)


def _within(request: Request, view: Viewless, plain: list[Plan], others: list[Plan], budget: int, work: int) -> Plan:
    """Anneal from several starts, then go on from the best of them; `work` is for each lane."""
    clock = request.deadline
    work *= LANES
    others = sorted((replace_over(plan, budget) for plan in others), key=lambda plan: plan.key)
    almost = [plan for plan in others if budget < plan.peak <= ALMOST * budget and plan.cost < others[0].cost]
    almost = sorted(almost, key=lambda plan: plan.cost)[:1]
    starts = [*plain[:1], *others[:1], *almost, *(plain[1:2] if not request.fixed_order else [])]
    tries = min(MOST_TRIES, max(1, int(work * TRY_SHARE / (WORK_PER_OP * request.problem.n_ops))))

    def start(i: int) -> Plan:
        request.progress("starting", i * TRY_SHARE / tries)
        heat = Heat(*TRIAL_HEATS[i % len(TRIAL_HEATS)])
        plan = starts[(i // len(TRIAL_HEATS) + i) % len(starts)]
        share, seed = int(work * TRY_SHARE / tries), request.seed + i
        return annealed(view, plan, budget, share, heat, seed, keep=i % 2 == 0, deadline=clock)

    tried = sorted([*others[:1], *side_by_side(start, range(tries))], key=lambda plan: plan.key)
    above = [plan for plan in (*tried, *others) if plan.over]
    if tried[0].over or (above and tried[0].cost > DEAR * plain[0].cost):
        lowest = min(above, key=lambda plan: plan.peak)
        kept, most = [(lowest, int(budget * aim)) for aim in AIMS], int(work * CONTINUE_SHARE)
    else:
        kept = [(plan, budget) for plan in tried[: PLANS_CONTINUED if tries > 1 else LANES]]
        most = int(work * CONTINUE_SHARE / len(kept))

    def go_on(i: int) -> Plan:
        plan, aim = kept[i]
        request.progress(_improving(request, plan), TRY_SHARE + i * CONTINUE_SHARE / len(kept))
        seed = request.seed + tries + i
        return replace_over(annealed(view, plan, aim, most, Heat(*CONTINUE_HEAT), seed, deadline=clock), budget)

    best = best_of([*tried, kept[0][0], *side_by_side(go_on, range(len(kept)))])
    rest = int(work * (1 - TRY_SHARE - CONTINUE_SHARE) / len(LAST_HEATS))

    def finish(i: int) -> Plan:
        return annealed(view, best, budget, rest, Heat(*LAST_HEATS[i]), request.seed + i, deadline=clock)

    return best_of([best, *side_by_side(finish, range(len(LAST_HEATS)))])


def _improving(request: Request, plan: Plan) -> str:
    """What a person who waits is told: what is improved on."""
    if plan.over:
        return f"no plan within the budget yet, lowest peak {format_bytes(plan.peak)}"
    return f"improving a plan of +{plan.cost / float(request.problem.cost.sum()) - 1:.1%} compute"


@register("search")
def search(request: Request) -> Schedule:
    """Ours: cuts, segments and annealed retention intervals; any number of recomputes, any order."""
    return find(request).schedule
