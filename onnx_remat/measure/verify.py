"""Verify a written model: without running it (`check`), and by running it on ONNX Runtime (`run`)."""

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
from onnx_remat.ir.graph import build
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
"""Relative tolerance by dtype, for optimisations that fuse a forward chain but not its recompute."""

_FEW, _SHARE, _ROUNDINGS = 16, 0.1, 128
"""Entries of which the whole tolerance of the largest may be used, in number and as a share of all; and the roundings
of the largest entry that all may use.

One entry may be a sum that cancels. Where many small entries are wrong, a large one alongside would hide it. Outputs of
the seven sample models (file and `session.session.Session` at level "all") differ by at most 14 roundings of the
largest entry, nine entries of ten by at most 8.
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements in fresh processes on ONNX Runtime (``--verify run``), in bytes and seconds.

    Attributes
    ----------
    before, after : int
        Peaks of tensors without the allocator's reserves, as the plan counts them.
    before_default, after_default : int
        Peaks over several steps with default session options, arena and memory patterns included.
    after_arena : int or None
        The same for the result with `session_options()`, where the budget covers that.
    before_seconds, after_seconds : float
        Medians of steps with default options.
    outputs_equal : str
        How equal the outputs are, or why they were not compared.
    order_kept : bool
        Did the nodes run in the planned order?
    unresolved : int
        Bytes by which `after` or `after_arena` exceeds the budget, below the resolution of measurements: such a run
        shows neither that the budget is kept nor that it is missed.
    trained_before, trained_after : int or None
        Memory of training by `session.Session`, see `training_memory`, where the budget covers that.
    before_beyond, after_beyond : int
        Bytes of whole pages and ONNX Runtime's bookkeeping (`processes.beyond_tensors`), already subtracted from
        `before` and `after`.
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


def check(original: onnx.ModelProto, rewritten: onnx.ModelProto) -> None:
    """Check without running that the model is valid, has the same interface and contains every node of the original.

    Its simulation has already proved it topologically ordered and free of name clashes.

    Raises
    ------
    VerificationError
        A check fails.
    """
    # The checker may reject the original too, because of custom domains for example: that is no fault of the rewrite.
    if (why := native.check(_standard(model_io.without_weights(rewritten)))) and not native.check(
        model_io.without_weights(original)
    ):
        raise VerificationError(f"the rewritten model is not valid ONNX: {why}")
    for what in ("input", "output"):
        before, after = getattr(original.graph, what), getattr(rewritten.graph, what)
        if [v.SerializeToString() for v in before] != [v.SerializeToString() for v in after]:
            raise VerificationError(f"the rewritten model's {what}s differ from the original's")
    made = {name for node in rewritten.graph.node for name in node.output}
    if lost := [
        n.name for n in original.graph.node if not made.issuperset(filter(None, n.output)) and n.op_type != "Constant"
    ]:
        raise VerificationError(f"node {lost[0]!r} was lost")


def _standard(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace copies between device and host, which are ops of ONNX Runtime, by Identity; return the model."""
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
    """Run both models in fresh processes and compare outputs, executed order, peaks and step times.

    Where ops draw random numbers, outputs are compared with the draws fixed; where ops in a body do, outputs are not
    compared.

    Parameters
    ----------
    compiled : Compiled
        The original.
    rewritten : onnx.ModelProto
    folder : Path or None
        Folder of the external data.
    dims : dict of str to int
        Sizes of symbolic dimensions.
    budget : int
        Limit on the peak of tensors, in bytes.
    order : sequence of str
        Node names in the emulated order, without graph optimisations.
    arena : bool
        Does the budget also apply with `runtime.session_options()`?
    rounded : sequence of str
        Values that only one of the two files rounds: with any, outputs need not be bit-identical.
    trained : int, optional
        Limit on all memory of training, in bytes.
    beyond : (int, int)
        `processes.beyond_tensors` of original and result, to subtract from the measured peaks.
    body : bool
        Is the result written into a body (`ir.body`)? Then the body is measured with default options and its outputs
        are compared.
    fuse : bool
        Measure training with fused elementwise kernels.

    Raises
    ------
    VerificationError
        Outputs differ, or a measured peak exceeds its limit.
    """
    original = compiled.graph.model
    models = {"before": original, "after": rewritten}
    races = bool(fixed_draws.race_warnings(original, compiled.kernels))
    with files.scratch() as home:
        paths = {name: _written(model, folder, home / name) for name, model in models.items()}
        settled = without_chance((original, rewritten), folder, home / "settled", compiled.tensors)
        equals = dict(zip(models, settled, strict=True)) if settled else paths
        plain, incomparable = home / "plain.npz", _incomparable(original)
        if not incomparable:
            equal = bitwise(equals["before"], equals["after"], dims, exactly=not rounded)
            for name, path in equals.items():
                processes.measure(path, outputs=home / f"{name}.npz", dims=dims, threads=1 if races else 0)
            processes.measure(equals["before"], "disable", outputs=plain, dims=dims, threads=1 if races else 0)
            compare(home / "before.npz", home / "after.npz", exactly=False, plain=plain)
            equal += (" (random draws fixed)" if settled else "") + (" on one thread" if races else "")
        executed = processes.measure(paths["after"], "disable", dims=dims, trace=True).executed
        before = processes.measure(paths["before"], dims=dims).peak_bytes - beyond[0]
        allowed = budget + beyond[1]
        after = processes.peak_under(allowed, partial(processes.measure, paths["after"], dims=dims)) - beyond[1]
        shown = paths | ({"after": _written(into_body(rewritten), folder, home / "body")} if body else {})
        default = {n: processes.measure(p, dims=dims, default=True, steps=3) for n, p in shown.items()}
        if body and not settled and not incomparable:
            processes.measure(shown["after"], outputs=home / "body.npz", dims=dims, threads=1 if races else 0)
            compare(home / "after.npz", home / "body.npz", exactly=False, plain=plain)
        with_arena = processes.peak_under(budget, partial(_with_arena, paths["after"], dims)) if arena else None
        seconds = processes.race(paths["before"], paths["after"], dims=dims)
        taken = {}
        if trained is not None:
            known = {} if incomparable else {"all": home / "after.npz", "disable": plain}
            session(equals["after"], dims, level="disable")
            session(equals["after"], dims, known=known)
        if trained is not None and training_memory.available():
            taken = {name: training_memory.measure(path, dims, fuse=fuse).total for name, path in paths.items()}
    if trained is not None and taken and taken["after"] > trained:
        raise VerificationError(
            f"training used {format_bytes(taken['after'])}, above the budget {format_bytes(trained)} and its "
            "prediction: ask for a smaller budget"
        )
    if after > budget + processes.RESOLUTION:
        raise VerificationError(
            f"measured peak {format_bytes(after)} exceeds the budget {format_bytes(budget)}: ask for a smaller budget"
        )
    if with_arena is not None and with_arena > budget + processes.RESOLUTION:
        raise VerificationError(
            f"ONNX Runtime used {format_bytes(with_arena)} with its arena, above the budget {format_bytes(budget)} and "
            "its prediction: ask for a smaller budget"
        )
    return Measured(
        before=before,
        after=after,
        before_default=default["before"].peak_bytes,
        after_default=default["after"].peak_bytes,
        after_arena=with_arena,
        before_seconds=seconds[0],
        after_seconds=seconds[1],
        outputs_equal=incomparable or equal,
        order_kept=_order_kept(order, executed),
        unresolved=max(0, max(after, with_arena or 0) - budget),
        trained_before=taken.get("before"),
        trained_after=taken.get("after"),
        before_beyond=beyond[0],
        after_beyond=beyond[1],
    )


def _incomparable(model: onnx.ModelProto) -> str:
    """Return why outputs of two runs are not compared; empty where they are."""
    found = fixed_draws.drawing_bodies(model)
    label = found[0].name or found[0].output[0] if found else ""
    return f"not compared: node {label!r} draws random numbers in a body" if found else ""


def _with_arena(path: Path, dims: Mapping[str, int]) -> processes.Measurement:
    """Measure some steps with `runtime.session_options()`."""
    return processes.measure(path, dims=dims, default=True, patterns=False, steps=3)


def without_chance(
    models: tuple[onnx.ModelProto, onnx.ModelProto], folder: Path | None, home: Path, tensors: Mapping[str, Tensor]
) -> tuple[Path, Path] | None:
    """Write the original and the rewritten model with the same draws to `home`; return None where no op is random.

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
    """Run two files without graph optimisations on every kind of feeds and compare every output; see `compare`.

    Zeros of both signs, denormals, NaN and infinities may reveal differences that ordinary numbers do not.
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
                continue  # the original fails on such feeds
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
    """Run a step twice with `session.session.Session`, state in place, and compare it with ONNX Runtime's own session.

    Both run on the same random values, in separate processes. At level "disable" every output must be bit-identical, at
    the others equal within rounding. Random draws are fixed; with draws in bodies, outputs are not compared. `known`
    are outputs of ONNX Runtime's own session by level (``.npz``) from an earlier run, for steps without random draws.

    Raises
    ------
    VerificationError
        An output differs, or an input was overwritten that no output renews.
    """
    path, source = Path(path), model_io.load(path)
    kernels = kernels_of(provider)
    with files.scratch() as home:
        if fixed_draws.random_nodes(source.model):
            tensors = shapes.infer(build(source.model), dims, askers=SHAPE_ASKERS)
            path = _written(fixed_draws.without_chance(source.model, tensors), source.folder, home / "settled")
        threads = 1 if level == "disable" or fixed_draws.race_warnings(source.model, kernels) else 0
        expected, made = dict(known or {}), [home / "first.npz", home / "second.npz"]
        compared = not fixed_draws.drawing_bodies(source.model)
        for each in {level: None, "disable": None}:
            if compared and each not in expected:
                expected[each] = home / f"{each}.npz"
                processes.measure(
                    path, each, outputs=expected[each], dims=dims, threads=threads, provider=provider
                )  # fmt: skip
        changed = processes.by_session(
            path, made, level, dims=dims, donate=donate, threads=threads, provider=provider
        )  # fmt: skip
        try:
            for outputs in made if compared else ():
                compare(expected[level], outputs, exactly=level == "disable", plain=expected["disable"])
        except VerificationError as error:
            raise VerificationError(f"onnx-remat's session is wrong here, use ONNX Runtime's own: {error}") from error
    if changed:
        raise VerificationError(
            f"onnx-remat's session is wrong here, use ONNX Runtime's own: input {changed[0]!r} was overwritten"
        )


def compare(before: Path, after: Path, exactly: bool, plain: Path | None = None) -> str:
    """Compare two ``.npz`` of outputs; return how equal they are, or raise VerificationError.

    Keys are ``<index>:<name>``, as `processes.measure` writes them. `plain` contains the original's outputs without
    graph optimisations: where the optimisations alone change an output, such as a gradient that cancels to zero and is
    pure rounding, the tolerance grows by that change. The tolerance is relative to the largest entry of an output,
    since any entry may be a sum that cancels; for many entries of one output it is smaller.
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
    # NaN compares equal to NaN, so these outputs would hide an error
    return equal + (f" (but {len(blind)} of them, {blind[0]!r} first, hold NaN on random inputs)" if blind else "")


def _same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    """Are all bits equal, except for payloads of NaN? Those depend on the alignment of a kernel's vectors."""
    if x.dtype.kind != "f":
        return x.tobytes() == y.tobytes()
    numbers = ~np.isnan(x)
    return np.array_equal(numbers, ~np.isnan(y)) and x[numbers].tobytes() == y[numbers].tobytes()


def _close(x: np.ndarray, y: np.ndarray, plain: np.ndarray) -> bool:
    tolerance = _TOLERANCE.get(x.dtype.name, 0.0)
    if not tolerance:
        return bool(np.array_equal(x, y))
    with np.errstate(invalid="ignore", over="ignore"):  # infinities, and differences in half precision
        largest, moved = _largest(x), 2 * _largest(x - plain)
        if not np.allclose(x, y, rtol=tolerance, atol=largest * tolerance + moved, equal_nan=True):
            return False
        of_many = max(tolerance / 16, _ROUNDINGS * float(np.finfo(x.dtype).eps))
        if of_many >= tolerance:
            return True
        off = np.count_nonzero(np.abs(x - y) > tolerance * np.abs(x) + (largest * of_many + moved))
    return bool(off <= max(_FEW, x.size * _SHARE))


def _largest(x: np.ndarray) -> float:
    return float(np.max(np.abs(x), initial=0.0, where=np.isfinite(x)))


def _order_kept(expected: Sequence[str], executed: Sequence[str]) -> bool:
    """Did the nodes run in the emulated order? Nodes without a name are not compared."""
    named = [name for name in expected if name]
    known = set(named)
    return [name for name in executed if name in known] == named
