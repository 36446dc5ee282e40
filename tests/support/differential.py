"""Original against result: random steps written by random schedules and by every selector, run at three levels."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import onnx

from onnx_remat.ir.metadata import RECOMPUTE_KEY, SHAPES_KEY, TAG
from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Schedule
from onnx_remat.ort import moves
from onnx_remat.ort.kernels.costs import MATRIX_OPS
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Compiled, Preparation, prepare
from onnx_remat.plan.selectors import Request, get, names
from onnx_remat.write.private_buffers import unroll
from onnx_remat.write.realize import realize, settle
from tests.support.graphs import session_of
from tests.support.steps import TABLE, Steps, hostile_feeds
from tests.write.test_writer import random_schedule

ROLES = ("recomputed", "moved", "aliased", "in place", "private")
Coverage = Counter[tuple[str, str]]
LEVELS = ("disable", "basic", "all")
SHARES = (0.0, 0.02, 0.3)  # of the feeds that are hostile; none where fusions may round in another way
_WORK = 300  # of a selector's search: the fuzzer wants schedules, not good ones


class Difference(AssertionError):
    """Original and result differ: where, and the seed that makes it again."""


def try_step(seed: int, coverage: Coverage, wanted: list[str] | None = None) -> int:
    """One random step, rewritten at random and by one selector; the number of files compared with the original."""
    model = Steps(seed, random.Random(seed).randrange(2, 6), 2, wanted).model()
    compiled = prepare(model, Preparation(CPU))
    feeds = [hostile_feeds(model, seed, share) for share in SHARES]
    expected = _outputs(model, feeds)
    tried = 0
    with_moves = _with_moves(compiled, seed)
    schedules = [(who, compiled, schedule) for who, schedule in _schedules(compiled, seed)]
    schedules.append(("moves", with_moves, random_schedule(with_moves.problem, seed, 0.5)))
    for who, of, schedule in schedules:
        result = _outputs(_written(of, schedule, coverage if of is compiled else Counter()), feeds)
        for (level, share), after in result.items():
            before = expected[level, share]
            _same(before, after, level == "disable", f"seed {seed}, {who}, {level}, hostile {share}")
        tried += 1
    return tried


def _with_moves(compiled: Compiled, seed: int) -> Compiled:
    """The same step, in which half of its values may be moved to the host and back."""
    names = moves.movable(compiled, least=1)
    return moves.split(compiled, random.Random(seed).sample(names, (len(names) + 1) // 2), moves.Link(1e9))


def _schedules(compiled: Compiled, seed: int) -> Iterator[tuple[str, Schedule]]:
    generator = random.Random(seed)
    yield "random", random_schedule(compiled.problem, seed, generator.choice([0.3, 0.8]))
    problem = replace(compiled.problem, poolable=np.zeros(compiled.problem.n_values, np.bool_))
    baseline = compiled.default_order()
    anchors = tuple(op.index for op in compiled.graph.ops if op.node.op_type in MATRIX_OPS)
    kept = tuple(problem.outputs(op)[0] for op in anchors)
    budget = int(simulate(problem, baseline).peak * generator.uniform(0.5, 0.95))
    request = Request(problem, budget, baseline, effort=1.0, work=_WORK, checkpoints=kept, anchors=anchors)
    selector = names()[seed % len(names())]
    yield selector, get(selector)(request)


def _written(compiled: Compiled, schedule: Schedule, coverage: Coverage) -> onnx.ModelProto:
    alone = replace(compiled.problem, poolable=np.zeros(compiled.problem.n_values, np.bool_))
    limit = simulate(alone, schedule).peak
    schedule = settle(compiled, alone, schedule, limit)
    model = realize(compiled, schedule, limit, {}).model
    _count(compiled, schedule, model, coverage)
    return model


def _count(compiled: Compiled, schedule: Schedule, model: onnx.ModelProto, coverage: Coverage) -> None:
    """Which ops were given which roles."""
    problem, kinds = compiled.problem, [op.node.op_type for op in compiled.graph.ops]
    found: list[tuple[str, str]] = []
    found += [
        (node.op_type, "recomputed")
        for node in model.graph.node
        if any(prop.key == RECOMPUTE_KEY for prop in node.metadata_props)
    ]
    firsts = list(dict.fromkeys(schedule.order))
    default = list(compiled.default_order().order)
    found += [(kinds[a], "moved") for a, b in zip(firsts, default, strict=True) if a != b]
    unrolled = unroll(problem, schedule)
    steps = unrolled.problem
    tenants = simulate(steps, range(steps.n_ops)).tenant_of
    for i, step in enumerate(unrolled.step.tolist()):
        reads = [v - unrolled.base for v in steps.inputs(step) if v >= unrolled.base]
        op = kinds[schedule.order[step]]
        if steps.alias_slot[i] >= 0 or any(steps.alias_slot[r] >= 0 for r in reads):
            found.append((op, "aliased"))
        elif tenants[i] >= 0 and tenants[i] in {tenants[r] for r in reads}:
            found.append((op, "in place"))
    stored = next((p.value for p in model.metadata_props if p.key == SHAPES_KEY), "")
    shared = {
        value.name
        for value in model.graph.value_info
        if any(dim.dim_param.startswith(f"{TAG}p") for dim in value.type.tensor_type.shape.dim)
    }
    ours = set(kinds)
    found += [
        (node.op_type, "private")
        for node in model.graph.node
        if node.op_type in ours and any(name in shared or f'"{name}"' in stored for name in node.output)
    ]
    coverage.update(dict.fromkeys(found, 1))


def _outputs(
    model: onnx.ModelProto, feeds: Sequence[dict[str, np.ndarray]]
) -> dict[tuple[str, float], list[np.ndarray]]:
    """By level and share: optimisations off, of all feeds; at the other levels, of the ordinary ones."""
    found = {}
    with np.errstate(all="ignore"):
        for level in LEVELS:
            session = session_of(model, level)
            for share, values in zip(SHARES, feeds, strict=True):
                if level == "disable" or not share:
                    found[level, share] = session.run(None, values)
    return found


def _same(before: list[np.ndarray], after: list[np.ndarray], bits: bool, where: str) -> None:
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Difference(f"{where}: output {i} changed its shape or type")
        numbers = ~np.isnan(a)
        if (numbers != ~np.isnan(b)).any():
            raise Difference(f"{where}: output {i} is NaN elsewhere")
        a, b = a[numbers], b[numbers]
        if bits and a.tobytes() != b.tobytes():
            raise Difference(f"{where}: output {i} differs")
        if not bits and not np.allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(a).max(initial=1, where=np.isfinite(a))):
            raise Difference(f"{where}: output {i} differs between levels of optimisation by more than a fusion may")


def rows(coverage: Coverage) -> tuple[tuple[str, ...], ...]:
    """Files per op and role; ``-`` where none."""
    ops = sorted({*TABLE, *(op for op, _ in coverage)})
    return tuple((op, *(str(coverage[op, role] or "-") for role in ROLES)) for op in ops)
