"""Other people's planners as selectors, for `bench_planner`: PyTorch's own code, and Checkmate's programs.

They see the graphs of the benchmark, one output per node, and are priced by the same simulator. PyTorch's
partitioner takes no budget of peak memory: it is asked for shares of the activations from 0 to 1, and the
cheapest of its answers within the budget counts, more than its users can do. Ops that bear nine tenths of the
forward cost pass as matrix products, the others as pointwise.

References
----------
Jain et al.: Checkmate, MLSys 2020, sections 4 and 5. PyTorch: torch/_functorch/partitioners.py.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
from ortools.linear_solver import pywraplp

from onnx_remat.errors import UsageError
from onnx_remat.memory.problem import BACKWARD, Problem, Schedule
from onnx_remat.plan.search.candidates import cheapest_within
from onnx_remat.plan.selectors import Request, materialize, register
from onnx_remat.plan.selectors.materialize import split_step

_SHARES = [i / 16 for i in range(17)]
_MOST_NODES = 120  # Checkmate's programs have a variable per pair of nodes and stage: larger ones do not finish
_ROUNDING_ROOM = 0.9  # of the budget that the relaxation may use, so that its rounding fits


def _torch() -> Any:
    if importlib.util.find_spec("torch") is None:
        raise UsageError("PyTorch's planners need torch: pip install 'torch==2.13.*'")
    import torch

    return torch


def _joint(problem: Problem) -> tuple[Any, Any, list[Any]]:
    """The problem as PyTorch's partitioner sees a joint graph: graph, classification, and the node of each op."""
    torch = _torch()
    from torch._functorch import partitioners
    from torch.utils._ordered_set import OrderedSet

    graph = torch.fx.Graph()
    data, nodes = graph.placeholder("primals_1"), list[Any]()
    data.meta["val"] = torch.empty(0, dtype=torch.uint8, device="meta")
    forward = problem.phase < BACKWARD
    rank = np.argsort(-problem.cost * forward, kind="stable")
    share = np.cumsum((problem.cost * forward)[rank])
    dear = set(rank[: int(np.searchsorted(share, 0.9 * share[-1])) + 1].tolist())
    made_by = problem.producer()
    for op in range(problem.n_ops):
        target = torch.ops.aten.mm.default if op in dear else torch.ops.aten.add.Tensor
        read = tuple(nodes[made_by[v]] for v in dict.fromkeys(problem.inputs(op)))
        node = graph.call_function(target, read or (data,))
        size = sum(int(problem.nbytes[v]) for v in problem.outputs(op))
        node.meta["val"] = torch.empty(size, dtype=torch.uint8, device="meta")
        nodes.append(node)
    graph.output(tuple(node for node in nodes if not node.users))
    fw = OrderedSet([data, *(node for node, early in zip(nodes, forward, strict=True) if early)])
    bw = OrderedSet(node for node in nodes if node not in fw)
    for node in reversed(list(graph.nodes)):
        if node.op == "output":
            node.dist_from_bw = int(1e9)
        elif node not in fw:
            node.dist_from_bw = 0
        else:
            node.dist_from_bw = min((user.dist_from_bw + 1 for user in node.users), default=int(1e9))
    info = partitioners.NodeInfo(
        inputs=[data], _required_fw_nodes=fw, required_bw_nodes=bw, tangents_closure=bw, unclaimed_nodes=OrderedSet(),
        fw_order={node: i for i, node in enumerate(fw)}, static_lifetime_input_nodes=OrderedSet(),
    )  # fmt: skip
    return graph, info, nodes


def _by_torch(request: Request, solver: str, shares: list[float]) -> Schedule:
    """The cheapest within the budget of what the partitioner saves for each share."""
    torch = _torch()
    from torch._functorch import config, partitioners
    from torch._inductor.custom_graph_pass import CustomRuntimeEstimator

    problem, order = request.problem, request.baseline.array()
    graph, info, nodes = _joint(problem)
    number = {node: op for op, node in enumerate(nodes)}

    class Estimate(CustomRuntimeEstimator):
        def __call__(self, node: Any) -> float:
            return float(problem.cost[number[node]])

        def uuid(self) -> str:
            return "onnx-remat"

    split = split_step(problem, order)
    plans = [request.baseline]
    with config.patch(activation_memory_budget_runtime_estimator=Estimate(), activation_memory_budget_solver=solver):
        for share in shares:
            dropped = problem.phase < BACKWARD
            with torch.no_grad():
                saved = partitioners.choose_saved_values_set(graph, info, memory_budget=share)
            dropped[[number[node] for node in saved if node in number]] = False
            plans.append(materialize(problem, order, dropped, split))
    return cheapest_within(request, plans)


@register("torch_min_cut")
def torch_min_cut(request: Request) -> Schedule:
    """PyTorch's min-cut partitioner as it is by default, no budget."""
    return _by_torch(request, "dp", [1.0])


@register("torch_dp")
def torch_dp(request: Request) -> Schedule:
    """PyTorch's activation memory budget: min-cut and dynamic-programming knapsack."""
    return _by_torch(request, "dp", _SHARES)


@register("torch_greedy")
def torch_greedy(request: Request) -> Schedule:
    """PyTorch's activation memory budget: min-cut and greedy knapsack."""
    return _by_torch(request, "greedy", _SHARES)


@register("torch_ilp")
def torch_ilp(request: Request) -> Schedule:
    """PyTorch's activation memory budget: min-cut and integer-programming knapsack."""
    return _by_torch(request, "ilp", _SHARES)


_Table = dict[tuple[int, int], float]


def _checkmate(problem: Problem, budget: float, seconds: float, whole: bool) -> tuple[_Table, _Table] | None:
    """Run (R) and kept (S) variables by stage and node, of the program or, unless `whole`, of its relaxation."""
    solver = pywraplp.Solver.CreateSolver("SCIP" if whole else "GLOP")
    solver.SetTimeLimit(int(1000 * seconds))
    n = problem.n_ops
    made_by = problem.producer()
    reads = [sorted({int(made_by[v]) for v in problem.inputs(op)}) for op in range(n)]
    users: list[list[int]] = [[] for _ in range(n)]
    for op in range(n):
        for source in reads[op]:
            users[source].append(op)
    unit = float(problem.nbytes.max()) or 1.0
    size = (problem.nbytes / unit).tolist()
    room = budget / unit
    var = solver.BoolVar if whole else (lambda name: solver.NumVar(0, 1, name))
    run = {(t, i): var("") for t in range(n) for i in range(t + 1)}
    kept = {(t, i): var("") for t in range(n + 1) for i in range(t)}
    nothing = solver.NumVar(0, 0, "")
    for t in range(n):
        solver.Add(run[t, t] == 1)
        for i in range(t):
            if t:
                solver.Add(kept[t, i] <= run[t - 1, i] + kept.get((t - 1, i), nothing))
        held: Any = sum((size[i] * kept[t, i] for i in range(t)), 0 * nothing)
        used = solver.NumVar(0, room, "")
        solver.Add(used == held + size[0] * run[t, 0])
        for k in range(t + 1):
            for i in reads[k]:
                solver.Add(run[t, i] + kept.get((t, i), nothing) >= run[t, k])
            if k == t:
                break
            freed = []
            for i in [*reads[k], k]:
                free = var("")
                later = [run[t, j] for j in users[i] if k < j <= t]
                hazards = (1 - run[t, k]) + kept.get((t + 1, i), nothing) + sum(later, 0 * nothing)
                solver.Add(1 - free <= hazards)
                solver.Add((len(later) + 2) * (1 - free) >= hazards)
                freed.append(size[i] * free)
            after = solver.NumVar(0, room, "")
            solver.Add(after == used + size[k + 1] * run[t, k + 1] - sum(freed))
            used = after
    solver.Minimize(sum(float(problem.cost[i] / problem.cost.sum()) * run[t, i] for t, i in run))
    if solver.Solve() not in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE):
        return None
    return {key: v.solution_value() for key, v in run.items()}, {key: v.solution_value() for key, v in kept.items()}


def _staged(run: dict[tuple[int, int], bool], n: int) -> Schedule:
    return Schedule(tuple(i for t in range(n) for i in range(t + 1) if run[t, i]))


@register("checkmate_milp")
def checkmate_milp(request: Request) -> Schedule:
    """Checkmate's mixed-integer program on SCIP, within the time limit; small graphs only."""
    problem = request.problem
    if problem.n_ops > _MOST_NODES:
        return request.baseline
    found = _checkmate(problem, request.budget, request.effort, whole=True)
    if found is None:
        return request.baseline
    return _staged({key: value > 0.5 for key, value in found[0].items()}, problem.n_ops)


@register("checkmate_lp")
def checkmate_lp(request: Request) -> Schedule:
    """Checkmate's relaxation on GLOP with two-phase rounding, within the time limit; small graphs only."""
    problem, n = request.problem, request.problem.n_ops
    if n > _MOST_NODES:
        return request.baseline
    found = _checkmate(problem, request.budget * _ROUNDING_ROOM, request.effort, whole=False)
    if found is None:
        return request.baseline
    kept = {key: value > 0.5 for key, value in found[1].items()}
    made_by = problem.producer()
    run = {(t, i): t == i for t in range(n) for i in range(t + 1)}
    for t in range(n):
        for i in range(t, -1, -1):  # what the next stage holds, and what later ops of this one read
            if kept.get((t + 1, i)) and not kept.get((t, i)):
                run[t, i] = True
            if run[t, i]:
                for source in (int(made_by[v]) for v in problem.inputs(i)):
                    run[t, source] = run[t, source] or not kept.get((t, source))
    return cheapest_within(request, [request.baseline, _staged(run, n)])
