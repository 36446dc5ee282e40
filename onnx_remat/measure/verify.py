"""Is the written model what was promised? On paper (`check`) and in ONNX Runtime (`run`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnx

from onnx_remat import files
from onnx_remat.errors import VerificationError
from onnx_remat.ir import model_io, native, shapes
from onnx_remat.ir.body import into_body
from onnx_remat.ir.graph import Graph, build
from onnx_remat.ir.shapes import Tensor
from onnx_remat.measure import fixed_draws, processes, training_memory
from onnx_remat.measure.probe import FEEDS
from onnx_remat.ort import runtime
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.ort.moves import DOWN, UP
from onnx_remat.ort.prepare import Compiled
from onnx_remat.ort.shape_askers import SHAPE_ASKERS
from onnx_remat.units import format_bytes

MODES = ("none", "check", "run")

_TOLERANCE = {"float16": 2e-2, "float32": 2e-4, "float64": 1e-9}
"""Relative tolerance by dtype where optimisations may fuse a forward chain and not its recompute."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What fresh processes on ONNX Runtime saw (``--verify run``); bytes and seconds.

    `before` and `after` are peaks without the allocator's reserves, the plan's own figure; `before_beyond` and
    `after_beyond`, taken off them, are what whole pages and ONNX Runtime's books add (`processes.beyond_tensors`);
    `before_default` and
    `after_default` are what the process holds over several steps with session options as they are by default, arena
    and memory patterns included; `after_arena` is the same of the result with `session_options()`, where the budget was
    to cover that; the seconds are medians of steps with default options. `unresolved` is by how much `after` or
    `after_arena` exceeds the budget, where that is less than two measurements of one file differ by: such a run
    neither shows that the budget is kept nor that it is not. `trained_before` and `trained_after` are all that training
    by `session.Session` takes, see `training_memory`, where the budget covers that.
    """

    before: int
    after: int
    before_default: int
    after_default: int
    after_arena: int | None
    before_seconds: float
    after_seconds: float
    outputs_equal: str
    order_kept: bool
    unresolved: int = 0
    trained_before: int | None = None
    trained_after: int | None = None
    before_beyond: int = 0
    after_beyond: int = 0


def check(original: onnx.ModelProto, rewritten: onnx.ModelProto, graph: Graph) -> None:
    """What can be told without running: a valid model with the same interface that still computes every output.

    Parameters
    ----------
    original, rewritten : onnx.ModelProto
    graph : Graph
        Of `rewritten`; building it has already shown it to be topologically ordered and free of name clashes.

    Raises
    ------
    VerificationError
    """
    # The checker does not know everything that originals use (custom domains, say): that is not our doing.
    if (why := native.check(_standard(model_io.without_weights(rewritten)))) and not native.check(
        model_io.without_weights(original)
    ):
        raise VerificationError(f"the rewritten model is not valid ONNX: {why}")
    for what in ("input", "output"):
        before, after = getattr(original.graph, what), getattr(rewritten.graph, what)
        if [v.SerializeToString() for v in before] != [v.SerializeToString() for v in after]:
            raise VerificationError(f"the rewritten model's {what}s differ from the original's")
    made = {name for op in graph.ops for name in op.writes}
    if lost := [
        n.name for n in original.graph.node if not made.issuperset(filter(None, n.output)) and n.op_type != "Constant"
    ]:
        raise VerificationError(f"node {lost[0]!r} was lost")


def _standard(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose copies between device and host, ops of ONNX Runtime's own, are copies as ONNX has them."""
    for node in model.graph.node:
        if node.op_type in (DOWN, UP) and not node.domain:
            node.op_type = "Identity"
    return model


def run(
    compiled: Compiled,
    rewritten: onnx.ModelProto,
    folder: Path | None,
    dims: dict[str, int],
    budget: int,
    order: Sequence[str],
    arena: bool = False,
    rounded: Sequence[str] = (),
    trained: int | None = None,
    beyond: tuple[int, int] = (0, 0),
    body: bool = False,
    fuse: bool = True,
) -> Measured:
    """Run both models in fresh processes: outputs, executed order, measured peaks, step times.

    `compiled` is the original; `order` holds the node names in the order the emulation says, graph optimisations off;
    with `arena`, the budget is to hold with `runtime.session_options()` too. Where `rounded` names values that are
    rounded in one of the two files only, outputs need not be equal to the last bit. Where ops draw random numbers,
    outputs are compared with the draws fixed. `trained` is a budget for all that training takes. `beyond` is taken off
    the measured peaks: `processes.beyond_tensors` of original and result. With `body` the file is the result in a body
    (`ir.body`): what default options make of that is measured, and its outputs are compared. `fuse`: training is
    measured with elementwise nodes fused.

    Raises
    ------
    VerificationError
        Outputs differ, the order is not the file's, or the measured peak exceeds the budget.
    """
    original = compiled.graph.model
    models = {"before": original, "after": rewritten}
    races = bool(fixed_draws.race_warnings(original, compiled.kernels))
    with files.scratch() as home:
        paths = {name: _written(model, folder, home / name) for name, model in models.items()}
        settled = without_chance((original, rewritten), folder, home / "settled", compiled.tensors)
        equals = dict(zip(models, settled, strict=True)) if settled else paths
        equal = bitwise(equals["before"], equals["after"], dims, exactly=not rounded)
        for name, path in equals.items():
            processes.measure(path, outputs=home / f"{name}.npz", dims=dims, threads=1 if races else 0)
        plain = home / "plain.npz"
        processes.measure(equals["before"], "disable", outputs=plain, dims=dims, threads=1 if races else 0)
        compare(home / "before.npz", home / "after.npz", exactly=False, plain=plain)
        executed = processes.measure(paths["after"], "disable", dims=dims, trace=True).executed
        before = processes.measure(paths["before"], dims=dims).peak_bytes - beyond[0]
        allowed = budget + beyond[1]
        after = processes.peak_under(allowed, partial(processes.measure, paths["after"], dims=dims)) - beyond[1]
        shown = paths | ({"after": _written(into_body(rewritten), folder, home / "body")} if body else {})
        default = {n: processes.measure(p, dims=dims, default=True, steps=3) for n, p in shown.items()}
        if body and not settled:
            processes.measure(shown["after"], outputs=home / "body.npz", dims=dims, threads=1 if races else 0)
            compare(home / "after.npz", home / "body.npz", exactly=False, plain=plain)
        held = processes.peak_under(budget, partial(_with_arena, paths["after"], dims)) if arena else None
        seconds = processes.race(paths["before"], paths["after"], dims=dims)
        taken = {}
        if trained is not None:
            session(equals["after"], dims, level="disable")
            session(equals["after"], dims, known={"all": home / "after.npz", "disable": plain})
        if trained is not None and training_memory.available():
            taken = {name: training_memory.measure(path, dims, fuse=fuse).total for name, path in paths.items()}
    if trained is not None and taken and taken["after"] > trained:
        raise VerificationError(
            f"training was seen to take {format_bytes(taken['after'])}, more than was foreseen and the budget "
            f"{format_bytes(trained)}: try a smaller one"
        )
    if after > budget + processes.RESOLUTION:
        raise VerificationError(f"measured peak {format_bytes(after)} exceeds the budget {format_bytes(budget)}")
    if held is not None and held > budget + processes.RESOLUTION:
        raise VerificationError(
            f"with ONNX Runtime's arena {format_bytes(held)} are held, more than was foreseen and the budget "
            f"{format_bytes(budget)}: try a smaller one"
        )
    return Measured(
        before=before,
        after=after,
        before_default=default["before"].peak_bytes,
        after_default=default["after"].peak_bytes,
        after_arena=held,
        before_seconds=seconds[0],
        after_seconds=seconds[1],
        outputs_equal=equal + (" (random draws fixed)" if settled else "") + (" on one thread" if races else ""),
        order_kept=_order_kept(order, executed),
        unresolved=max(0, max(after, held or 0) - budget),
        trained_before=taken.get("before"),
        trained_after=taken.get("after"),
        before_beyond=beyond[0],
        after_beyond=beyond[1],
    )


def _with_arena(path: Path, dims: Mapping[str, int]) -> processes.Measurement:
    """Of some steps with `runtime.session_options()`."""
    return processes.measure(path, dims=dims, default=True, patterns=False, steps=3)


def without_chance(
    models: tuple[onnx.ModelProto, onnx.ModelProto], folder: Path | None, home: Path, tensors: Mapping[str, Tensor]
) -> tuple[Path, Path] | None:
    """Original and rewritten model with the same draws, written beneath `home`; None where nothing is drawn.

    See `fixed_draws.without_chance`; `tensors` are the shapes of the original's values.
    """
    if not fixed_draws.random_nodes(models[0]):
        return None
    before, after = (
        _written(fixed_draws.without_chance(model, tensors), folder, home / name)
        for model, name in zip(models, ("before", "after"), strict=True)
    )
    return before, after


def _written(model: onnx.ModelProto, folder: Path | None, home: Path) -> Path:
    home.mkdir(parents=True)
    return runtime.write_beside(model, folder, home)


def bitwise(before: Path, after: Path, dims: Mapping[str, int] | None = None, exactly: bool = True) -> str:
    """Run two files with graph optimisations off on every kind of feeds and compare every output; see `compare`.

    What ordinary numbers do not show, zeros of both signs, denormals, NaN and infinities may.
    """
    equal = ""
    for kind in FEEDS:
        with files.scratch() as scratch:
            first, second = scratch / "before.npz", scratch / "after.npz"
            # one thread: some kernels are not reproducible on more, see `fixed_draws.race_warnings`
            run = partial(processes.measure, level="disable", dims=dims, threads=1, feeds=kind)
            try:
                run(before, outputs=first)
            except VerificationError:
                if kind == FEEDS[0]:
                    raise
                continue  # the original cannot take such feeds
            run(after, outputs=second)
            found = compare(first, second, exactly)
            equal = equal or found
    return equal if exactly else "equal within rounding"


def session(
    path: str | Path,
    dims: Mapping[str, int] | None = None,
    *,
    level: str = "all",
    donate: bool | Mapping[str, str] = True,
    provider: str = "cpu",
    known: Mapping[str, Path] | None = None,
) -> None:
    """Run a step twice by `session.session.Session`, state in place, and compare with ONNX Runtime's own session.

    Both get the same random values, each in a process of its own. At level "disable" every output must be equal to the
    last bit, at the others within rounding. Random draws are fixed for it. `known` has what ONNX Runtime's own session
    gave already, by level (``.npz``); where nothing is drawn.

    Raises
    ------
    VerificationError
        An output differs, or an input was written over that no output renews.
    """
    path, source = Path(path), model_io.load(path)
    kernels = kernels_of(provider)
    with files.scratch() as home:
        if fixed_draws.random_nodes(source.model):
            tensors = shapes.infer(build(source.model), dims, askers=SHAPE_ASKERS)
            path = _written(fixed_draws.without_chance(source.model, tensors), source.folder, home / "settled")
        threads = 1 if level == "disable" or fixed_draws.race_warnings(source.model, kernels) else 0
        expected, made = dict(known or {}), [home / "first.npz", home / "second.npz"]
        for each in {level: None, "disable": None}:
            if each not in expected:
                expected[each] = home / f"{each}.npz"
                processes.measure(
                    path, each, outputs=expected[each], dims=dims, threads=threads, provider=provider
                )  # fmt: skip
        changed = processes.by_session(
            path, made, level, dims=dims, donate=donate, threads=threads, provider=provider
        )  # fmt: skip
        try:
            for outputs in made:
                compare(expected[level], outputs, exactly=level == "disable", plain=expected["disable"])
        except VerificationError as error:
            raise VerificationError(f"onnx-remat's session is wrong here, use ONNX Runtime's own: {error}") from error
    if changed:
        raise VerificationError(
            f"onnx-remat's session is wrong here, use ONNX Runtime's own: input {changed[0]!r} was written over"
        )


def compare(before: Path, after: Path, exactly: bool, plain: Path | None = None) -> str:
    """Compare two ``.npz`` of outputs; returns how equal they are, raises VerificationError when they are not.

    Keys are ``<index>:<name>``, as `processes.measure` writes them. `plain` has the original's outputs with graph
    optimisations off: where these alone move an output, such as a gradient that cancels to zero and is nothing but
    rounding, the two may differ by as much again.
    """
    blind = []
    with np.load(before) as a, np.load(after) as b, np.load(plain or before) as c:
        for key in a.files:
            x, y, name = a[key], b[key], key.partition(":")[2]
            if x.shape != y.shape or x.dtype != y.dtype:
                raise VerificationError(f"output {name!r} changed from {x.dtype}{x.shape} to {y.dtype}{y.shape}")
            if exactly and not _same_bits(x, y):
                raise VerificationError(f"output {name!r} is not bitwise equal with graph optimisations off")
            if not exactly and not _close(x, y, c[key]):
                raise VerificationError(
                    f"output {name!r} differs by more than {_TOLERANCE.get(x.dtype.name, 0)} relative"
                )
            if x.dtype.kind == "f" and np.isnan(x).any():
                blind.append(name)
    equal = "bitwise equal" if exactly else "equal within tolerance"
    # NaN equals NaN, so these outputs would hide a fault
    return equal + (f" (but {len(blind)} of them, {blind[0]!r} first, hold NaN on random inputs)" if blind else "")


def _same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    """To the last bit, but for what a NaN carries: that depends on where a kernel's vectors begin in memory."""
    if x.dtype.kind != "f":
        return x.tobytes() == y.tobytes()
    numbers = ~np.isnan(x)
    return np.array_equal(numbers, ~np.isnan(y)) and x[numbers].tobytes() == y[numbers].tobytes()


def _close(x: np.ndarray, y: np.ndarray, plain: np.ndarray) -> bool:
    tolerance = _TOLERANCE.get(x.dtype.name, 0.0)
    if not tolerance:
        return bool(np.array_equal(x, y))
    with np.errstate(invalid="ignore"):  # infinities
        moved = x - plain
    scale = _largest(x) * tolerance + 2 * _largest(moved)
    return bool(np.allclose(x, y, rtol=tolerance, atol=scale, equal_nan=True))


def _largest(x: np.ndarray) -> float:
    return float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))


def _order_kept(expected: Sequence[str], executed: Sequence[str]) -> bool:
    """Did the nodes run in the order the emulation says? Nodes without a name cannot be told and do not count."""
    named = [name for name in expected if name]
    known = set(named)
    return [name for name in executed if name in known] == named
