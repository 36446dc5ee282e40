"""Verify a written model: without running it (`check`), and by running it on ONNX Runtime (`run`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx

from onnx_remat import files
from onnx_remat.errors import VerificationError
from onnx_remat.ir import model_io, native, shapes
from onnx_remat.ir.body import into_body
from onnx_remat.ir.graph import build
from onnx_remat.ir.light import without_weights
from onnx_remat.ir.shapes import Tensor
from onnx_remat.measure import fixed_draws, processes, training_memory
from onnx_remat.measure.comparison import compare
from onnx_remat.measure.probe import FEEDS
from onnx_remat.ort import runtime
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.ort.moves import DOWN, UP
from onnx_remat.ort.prepare import Compiled
from onnx_remat.ort.shape_askers import SHAPE_ASKERS
from onnx_remat.units import format_bytes

MODES = ("none", "check", "run")


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
    if (why := native.check(_standard(without_weights(rewritten)))) and not native.check(without_weights(original)):
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


@dataclass(frozen=True, slots=True)
class Limits:
    """What runs may take, in bytes.

    Attributes
    ----------
    tensors : int
        Limit on the peak of tensors.
    arena : bool
        Does it also apply with `runtime.session_options()`?
    training : int, optional
        Limit on all memory of training.
    beyond : (int, int)
        `processes.beyond_tensors` of original and result, to subtract from the measured peaks.
    """

    tensors: int
    arena: bool = False
    training: int | None = None
    beyond: tuple[int, int] = (0, 0)


def run(
    compiled: Compiled,
    rewritten: onnx.ModelProto,
    folder: Path | None,
    dims: Mapping[str, int],
    limits: Limits,
    order: Sequence[str],
    rounded: Sequence[str] = (),
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
    dims : mapping of str to int
        Sizes of symbolic dimensions.
    limits : Limits
    order : sequence of str
        Node names in the emulated order, without graph optimisations.
    rounded : sequence of str
        Values that only one of the two files rounds: with any, outputs need not be bit-identical.
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
    with files.scratch() as home:
        both = _Both.written(compiled, rewritten, folder, dims, home)
        first, second = both.paths.values()
        equal = both.incomparable or _equality(both, exactly=not rounded)
        executed = processes.measure(second, "disable", dims=dims, trace=True).executed
        before = processes.measure(first, dims=dims).peak_bytes - limits.beyond[0]
        of_tensors = partial(processes.measure, second, dims=dims)
        after = processes.peak_under(limits.tensors + limits.beyond[1], of_tensors) - limits.beyond[1]
        in_body = _written(into_body(rewritten), folder, home / "body") if body else second
        default = [processes.measure(path, dims=dims, default=True, steps=3) for path in (first, in_body)]
        if body and both.settled is both.paths and not both.incomparable:
            both.run_to("body", in_body)
            compare(both.outputs("after"), both.outputs("body"), exactly=False, plain=both.outputs("plain"))
        of_arena = partial(processes.measure, second, dims=dims, default=True, patterns=False, steps=3)
        with_arena = processes.peak_under(limits.tensors, of_arena) if limits.arena else None
        seconds = processes.race(first, second, dims=dims)
        trained: dict[str, int] = {}
        if limits.training is not None:
            _compare_sessions(both)
            if training_memory.available():
                trained = {n: training_memory.measure(path, dims, fuse=fuse).total for n, path in both.paths.items()}
    allowed, predicted = limits.tensors + processes.RESOLUTION, " and its prediction"
    if limits.training is not None:
        _check("training used", trained.get("after", 0), limits.training, limits.training, predicted)
    _check("the measured peak is", after, allowed, limits.tensors)
    _check("ONNX Runtime with its arena used", with_arena or 0, allowed, limits.tensors, predicted)
    return Measured(
        before=before,
        after=after,
        before_default=default[0].peak_bytes,
        after_default=default[1].peak_bytes,
        after_arena=with_arena,
        before_seconds=seconds[0],
        after_seconds=seconds[1],
        outputs_equal=equal,
        order_kept=_order_kept(order, executed),
        unresolved=max(0, max(after, with_arena or 0) - limits.tensors),
        trained_before=trained.get("before"),
        trained_after=trained.get("after"),
        before_beyond=limits.beyond[0],
        after_beyond=limits.beyond[1],
    )


@dataclass(frozen=True, slots=True)
class _Both:
    """The original and the result on the disk, and the outputs of their runs.

    Attributes
    ----------
    home : Path
    paths : dict of str to Path
        Of "before" and "after".
    settled : dict of str to Path
        The same two with equal draws; `paths` itself where no op is random.
    dims : mapping of str to int
    threads : int
        1 where kernels are not reproducible on more, else 0.
    incomparable : str
        Why outputs of two runs are not compared; empty where they are.
    """

    home: Path
    paths: dict[str, Path]
    settled: dict[str, Path]
    dims: Mapping[str, int]
    threads: int
    incomparable: str

    @classmethod
    def written(
        cls, compiled: Compiled, rewritten: onnx.ModelProto, folder: Path | None, dims: Mapping[str, int], home: Path
    ) -> _Both:
        """Write both models to a folder."""
        original = compiled.graph.model
        paths = {"before": _written(original, folder, home / "before")}
        paths["after"] = _written(rewritten, folder, home / "after")
        settled = without_chance((original, rewritten), folder, home / "settled", compiled.tensors)
        equals = dict(zip(paths, settled, strict=True)) if settled else paths
        races = bool(fixed_draws.race_warnings(original, compiled.kernels))
        return cls(home, paths, equals, dims, int(races), _incomparable(original))

    def outputs(self, name: str) -> Path:
        """Return where the outputs of a run are."""
        return self.home / f"{name}.npz"

    def run_to(self, name: str, path: Path, level: str = "all") -> None:
        """Run a file once, and write its outputs."""
        processes.measure(path, level, outputs=self.outputs(name), dims=self.dims, threads=self.threads)


def _equality(both: _Both, exactly: bool) -> str:
    """Compare all outputs, without graph optimisations and with them; return how equal they are."""
    equal = bitwise(both.settled["before"], both.settled["after"], both.dims, exactly)
    for name, path in both.settled.items():
        both.run_to(name, path)
    both.run_to("plain", both.settled["before"], "disable")
    compare(both.outputs("before"), both.outputs("after"), exactly=False, plain=both.outputs("plain"))
    fixed = "" if both.settled is both.paths else " (random draws fixed)"
    return equal + fixed + (" on one thread" if both.threads else "")


def _compare_sessions(both: _Both) -> None:
    """Compare what `session.session.Session` computes for the result with ONNX Runtime's own session."""
    known = {} if both.incomparable else {"all": both.outputs("after"), "disable": both.outputs("plain")}
    session(both.settled["after"], both.dims, level="disable")
    session(both.settled["after"], both.dims, known=known)


def _check(what: str, taken: int, allowed: int, budget: int, predicted: str = "") -> None:
    """Raise VerificationError where a run took more than is allowed."""
    if taken > allowed:
        raise VerificationError(
            f"{what} {format_bytes(taken)}, above the budget {format_bytes(budget)}{predicted}: "
            "ask for a smaller budget"
        )


def _incomparable(model: onnx.ModelProto) -> str:
    """Return why outputs of two runs are not compared; empty where they are."""
    found = fixed_draws.drawing_bodies(model)
    label = found[0].name or found[0].output[0] if found else ""
    return f"not compared: node {label!r} draws random numbers in a body" if found else ""


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


def _order_kept(expected: Sequence[str], executed: Sequence[str]) -> bool:
    """Did the nodes run in the emulated order? Nodes without a name are not compared."""
    named = [name for name in expected if name]
    known = set(named)
    return [name for name in executed if name in known] == named
