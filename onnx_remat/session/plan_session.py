"""Plan a `Session` for a step in a separate process.

Planning takes memory: the model in Python, compiled kernels, ONNX Runtime's optimisations. To free all of it before
training, `plan_in_child` starts a process (`child`) that writes the model to load, returns the addresses to bind, and
exits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_remat import errors
from onnx_remat.errors import ModelError, UsageError
from onnx_remat.messages import Setting
from onnx_remat.process.child import Child, Failed
from onnx_remat.session import fusing
from onnx_remat.session.bookkeeping import bookkeeping_bytes, values_of
from onnx_remat.session.fusing import Fused

if TYPE_CHECKING:
    import onnx

    from onnx_remat.fuse.ir import Kernel
    from onnx_remat.ir.graph import Op
    from onnx_remat.ort.executed import Executed
    from onnx_remat.ort.prepare import Compiled
    from onnx_remat.session.binding import Binding, Program
    from onnx_remat.session.lean_graph import LeanNode

Donate = bool | Mapping[str, str]
"""Outputs to write in place of the inputs they renew: none, all by their names, or those of a mapping to inputs."""


NUMPY = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128",
}  # fmt: skip
"""numpy's type names by the numbers of ``onnx.TensorProto``."""

BY_BITS = {16: "uint16", 17: "uint8", 18: "uint8", 19: "uint8", 20: "uint8", 24: "uint8"}
"""Integer types with the bits of types that numpy lacks (bfloat16, the float8s)."""


@dataclass(frozen=True, slots=True)
class Array:
    """An input or output: its name, element type (``onnx.TensorProto``; 0 if it is not a tensor), and shape."""

    name: str
    dtype: int
    shape: tuple[int, ...]

    @property
    def dtype_name(self) -> str:
        """numpy's name of the element type, empty where it has none."""
        return NUMPY.get(self.dtype) or BY_BITS.get(self.dtype, "")

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return int(np.dtype(self.dtype_name).itemsize * np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Place(Array):
    """A value at an offset in the slab."""

    offset: int


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """Plan of a `Session`, which it needs in addition to the model to load.

    Attributes
    ----------
    inputs : tuple of Array
        Graph inputs; those in `defaults` are optional.
    defaults : tuple of str
        Inputs with a default value.
    outputs : tuple of Array
        Graph outputs.
    places : tuple of Place
        Values in the slab.
    slab, live : int
        Bytes of the slab, and the peak of live bytes in it.
    weights : int
        Bytes of initializers.
    workspace : int
        Peak of scratch memory in bytes.
    pool : int
        Bytes of scratch memory in a pool, which is kept between steps, see `scratch`.
    donated, not_donated : mapping of str to str
        See `binding.Binding`.
    nodes : int
        Number of nodes of the model to load.
    execution_providers : tuple of str
        Execution providers of ONNX Runtime's session.
    random : str
        A node that draws random numbers, empty if there is none.
    on_host : int
        Peak of bytes moved to the host.
    books : int
        Bytes of ONNX Runtime's bookkeeping, as predicted; 0 on a device.
    fused : Fused
    """

    inputs: tuple[Array, ...]
    defaults: tuple[str, ...]
    outputs: tuple[Array, ...]
    places: tuple[Place, ...]
    slab: int
    live: int
    weights: int
    workspace: int
    pool: int
    donated: Mapping[str, str]
    not_donated: Mapping[str, str]
    nodes: int
    execution_providers: tuple[str, ...]
    random: str
    on_host: int
    books: int
    fused: Fused


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """Request for the plan of a step; see `Session`.

    `least` is the size in bytes from which on values are bound, 0 for the default. `secret` is part of the names by
    which fused nodes find their kernels, 0 for a step that is not fused.
    """

    provider: str = "cpu"
    dims: Mapping[str, int] = field(default_factory=dict)
    donate: Donate = False
    level: str = "all"
    check: bool = False
    least: int = 0
    secret: int = 0


def plan_in_child(path: Path, target: Path, request: SessionRequest) -> SessionPlan:
    """Plan the layout of a step's values in a separate process.

    Parameters
    ----------
    path : Path
        The step, an ONNX file.
    target : Path
        Path to write the model to load.
    request : SessionRequest

    Raises
    ------
    OnnxRematError
        The step cannot be opened; the message states the reason.
    """
    try:
        with Child() as process:
            if request.check:
                compared = {"dims": request.dims, "level": request.level, "donate": request.donate}
                process.call(_CHECK, {"path": path, "provider": request.provider, **compared})
            job = {"path": path, "target": target, "request": asdict(request)}
            return _read(process.call("onnx_remat.session.plan_session:planned", job, last=True))
    except Failed as failed:
        error = failed.error() or ModelError(f"{path.name} could not be opened: {failed}")
        raise (ModelError(str(error)) if isinstance(error, errors.BudgetInfeasibleError) else error) from None


_CHECK = "onnx_remat.measure.verify:session"
"""Function for `SessionRequest.check`, by name: it compares two sessions, so its room is above that of sessions."""


def planned(path: str, target: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Call `plan` and return its result as JSON data; runs in a child process."""
    return asdict(plan(Path(path), Path(target), SessionRequest(**request)))


def _read(answer: Mapping[str, Any]) -> SessionPlan:
    def arrays(entries: list[Mapping[str, Any]]) -> tuple[Array, ...]:
        return tuple(Array(e["name"], e["dtype"], tuple(e["shape"])) for e in entries)

    places = tuple(Place(e["name"], e["dtype"], tuple(e["shape"]), e["offset"]) for e in answer["places"])
    given = dict(answer) | {"inputs": arrays(answer["inputs"]), "outputs": arrays(answer["outputs"]), "places": places}
    return SessionPlan(**given | {"defaults": tuple(answer["defaults"]), "fused": Fused(**answer["fused"])})


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """A step as it will run, and the layout of its values.

    `constants` are in addition to its weights; `kernels` are those of its fused nodes, by handle, and `members` the
    nodes that each fused node replaces, by its first output.
    """

    compiled: Compiled
    program: Program
    binding: Binding
    weights: int
    constants: tuple[onnx.TensorProto, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    members: Mapping[str, tuple[LeanNode, ...]] = field(default_factory=dict)
    fused: Fused = field(default_factory=lambda: Fused(0))


def check_openable(model: onnx.ModelProto) -> None:
    """Raise ModelError where a `Session` does not support a model."""
    from onnx import TensorProto

    from onnx_remat.ir import model_io
    from onnx_remat.ort import runtime

    if model_io.weight_bytes(model) > runtime.MOST_WEIGHTS:
        raise ModelError("a session opens models of up to 512 MiB of weights in the file: make them inputs")
    for value in (*model.graph.input, *model.graph.output):
        kind = value.type
        if not kind.HasField("tensor_type") or kind.tensor_type.elem_type == TensorProto.STRING:
            raise ModelError(f"a session cannot open this model: {value.name!r} is not a tensor of numbers")


def arrange(path: Path, target: Path, request: SessionRequest) -> SlabLayout:
    """Let ONNX Runtime optimise a step, choose the order of its nodes, lay out their values, and write the lean graph.

    Compare the graph that ONNX Runtime has loaded from that file with the lean graph; where they differ, lay out the
    loaded graph instead.

    Raises
    ------
    OnnxRematError
        The step cannot be opened; the message states the reason.
    """
    import onnx

    from onnx_remat.ir import external_data, model_io
    from onnx_remat.ir.opsets import opset_of
    from onnx_remat.ort import placement, runtime
    from onnx_remat.ort.executed import as_optimized, executed_as_it_lies
    from onnx_remat.ort.kernels.registry import kernels_of
    from onnx_remat.ort.prepare import Preparation
    from onnx_remat.session import binding, lean_graph

    source = model_io.load(path)
    check_openable(source.model)
    kernels = kernels_of(request.provider)
    if not runtime.has_device(kernels.execution_providers[0]):
        raise ModelError(
            f"onnxruntime makes no {kernels.execution_providers[0]} session here: install onnxruntime-gpu and its CUDA "
            "libraries, on a machine with a device"
        )
    if old := placement.too_old(kernels, opset_of(source.model), runtime.installed()):
        raise ModelError(f"a session cannot train well here: {old}")
    stated = Preparation(kernels, dims=_all_dims(source.model, request.dims), fixed=True)
    executed = as_optimized(source.model, source.folder, request.level, stated)
    outputs = [value.name for value in source.model.graph.output]
    least = request.least or binding.least(kernels)
    different = ""
    for _ in range(_LOADS):
        made = lay_out(executed, outputs, request.donate, least)
        model = made.compiled.graph.model
        for each in _candidates(made, least, request.secret):
            bound = [place.name for place in each.binding.placements]
            copy = lean_graph.copy_of(model, each.program.steps, bound, each.constants)
            if source.folder is not None:
                external_data.link(copy, source.folder, target.parent)
            onnx.save(copy, target)
            code = fusing.kernels_of(target)
            code.unlink(missing_ok=True)
            if each.kernels:
                fusing.write(each.kernels, request.secret, code)
            loaded = lean_graph.as_loaded(copy, target, kernels.execution_providers)
            different = lean_graph.difference(copy, loaded)
            if not different:
                return each
        del loaded.graph.output[:]
        loaded.graph.output.extend(model.graph.output)
        executed = executed_as_it_lies(loaded, stated)
    raise ModelError(
        f"a session cannot open this model: onnxruntime changes it whenever it loads it ({different}): run it with "
        "onnxruntime's own session"
    )


_LOADS = 4
"""Number of layouts to try, each of the graph that ONNX Runtime loaded for the last one."""


def _candidates(made: SlabLayout, least: int, secret: int) -> Iterator[SlabLayout]:
    """Yield the layout with fused nodes, if possible, and then, in case ONNX Runtime changes that graph, without."""
    if secret:
        other = as_fused(made, least, secret)
        why_not = other.fused.why_not
        if not why_not:
            yield other
            why_not = "onnxruntime changes it when it loads it"
        made = replace(made, fused=replace(made.fused, why_not=why_not))
    yield made


def as_fused(made: SlabLayout, least: int, secret: int = 0, seconds: float | None = None) -> SlabLayout:
    """Fuse the elementwise nodes of a layout; return the same layout and the reason where they stay unfused.

    Both opening a session and predicting its memory call this, so that they have the same step.

    Parameters
    ----------
    made : SlabLayout
    least : int
        Size in bytes from which on a value is bound.
    secret : int
        Part of the names of kernels; 0 for a step that is only predicted.
    seconds : float, optional
        Limit on the search for a small slab.
    """
    from onnx_remat.ir.opsets import opset_of

    model, why_not = made.compiled.graph.model, fusing.why_not(made.compiled.kernels.name)
    if not why_not:
        constants = fusing.numbers(model.graph, made.constants)
        integers = fusing.vectors(model.graph, made.constants)
        maker = makers(made.compiled)
        laid = fusing.fuse_step(
            made.program, made.binding, opset_of(model), constants, integers, least, secret,
            lambda steps: workspace(made.compiled, kept(maker, steps))[0], seconds,
        )  # fmt: skip
        if isinstance(laid, fusing.Laid):
            return replace(
                made, program=laid.program, binding=laid.binding, kernels=laid.kernels, members=laid.members,
                fused=replace(made.fused, kernels=len(laid.kernels), unserved=laid.unserved),
            )  # fmt: skip
        why_not = laid.why_not
    return replace(made, fused=replace(made.fused, why_not=why_not))


def lay_out(
    executed: Executed, outputs: Sequence[str], donate: Donate, least: int, seconds: float | None = None
) -> SlabLayout:
    """Lay out the values of a step that ONNX Runtime has already optimised.

    Parameters
    ----------
    executed : Executed
    outputs : sequence of str
        Graph outputs, in the original's order.
    donate : bool or mapping of str to str
        Outputs to write in place of the inputs they renew.
    least : int
        Size in bytes from which on a value is bound.
    seconds : float, optional
        Limit on the search for a small slab.

    Raises
    ------
    ModelError
        ONNX Runtime has not optimised the step: it cannot run it, or was not used.
    """
    from onnx_remat.ir.graph import INITIALIZER
    from onnx_remat.ir.opsets import opset_of
    from onnx_remat.session import binding, lean_graph

    if executed.emulated:
        raise ModelError(f"a session cannot open this model: {executed.emulated}")
    compiled = executed.compiled
    stored = {name for name, value in compiled.graph.values.items() if value.kind == INITIALIZER}
    inputs = [value.name for value in compiled.graph.model.graph.input if value.name not in stored]
    pairs = _pairs(donate, inputs, list(outputs))
    ops, opset = [compiled.graph.ops[i] for i in executed.order.order], opset_of(compiled.graph.model)
    free = lean_graph.without_control_edges(ops, compiled.graph.model, compiled.tensors)
    lean, constants = lean_graph.without_sizes(free, compiled.graph.model, compiled.tensors)
    steps = lean_graph.as_run(lean_graph.moved_when_due(lean, compiled.kernels))
    program = binding.waiting(binding.program(steps, compiled.tensors, inputs, outputs, compiled.kernels, opset), pairs)
    weights = sum(compiled.tensors[name].nbytes for name in stored)
    bound = binding.bind(program, pairs, least, seconds)
    fused = Fused(len(program.steps), values_of(program.steps), unfused_slab=bound.height)
    return SlabLayout(compiled, program, bound, weights, constants, fused=fused)


def makers(compiled: Compiled) -> dict[str, Op]:
    """Return the op that makes each value."""
    return {name: op for op in compiled.graph.ops for name in op.writes}


def kept(maker: Mapping[str, Op], steps: Iterable[LeanNode]) -> list[Op]:
    """Return the ops that ONNX Runtime runs itself among a step's nodes, in their order."""
    return [maker[name] for step in steps if (name := next(iter(step.writes), "")) in maker and step.plain is None]


def workspace(compiled: Compiled, ops: Sequence[Op]) -> tuple[int, int]:
    """Return the peak of ONNX Runtime's scratch memory for some of a step's ops in bytes, and the size of its pool.

    Kernels that call ``malloc`` take scratch memory outside the pool. A step whose nodes have bodies has no pool:
    values of the bodies would fragment it. On a device the session's own arena contains all scratch memory.
    """
    from onnx_remat.ort.kernels.base import key
    from onnx_remat.session import device_scratch, scratch

    if compiled.kernels.device != "cpu":
        return device_scratch.workspace(compiled, ops), 0
    requested = malloced = 0
    for op in ops:
        blocks = compiled.table.workspace[op.index]
        if key(op.node) in compiled.kernels.by_malloc:
            malloced = max(malloced, sum(blocks))
        else:
            requested = max(requested, sum(-(-block // scratch.UNIT) * scratch.UNIT for block in blocks))
    bodies = any(attribute.HasField("g") for op in ops for attribute in op.node.attribute)
    pool = 0 if bodies else scratch.pool_size(requested)
    return (pool + malloced if pool else max(requested, malloced)), pool


def bookkeeping(made: SlabLayout) -> int:
    """Return the bytes of ONNX Runtime's bookkeeping for a step on a CPU, as predicted."""
    from onnx_remat.fuse.convolutions import distinct

    if made.compiled.kernels.device != "cpu":
        return 0
    return bookkeeping_bytes(values_of(made.program.steps), made.fused.kernels, distinct(made.kernels))


def plan(path: Path, target: Path, request: SessionRequest) -> SessionPlan:
    """Plan a step in this process, without `SessionRequest.check`; see `plan_in_child`."""
    from onnx_remat.fuse import products
    from onnx_remat.ir.op_semantics import semantics
    from onnx_remat.ort import runtime
    from onnx_remat.session import binding, lean_graph, replay

    made = arrange(path, target, request)
    program, bound, model = made.program, made.binding, made.compiled.graph.model
    tensors = program.tensors
    order = runtime.order_by_priority(*lean_graph.edges(program.steps))
    replay.check(program, bound, order, request.least or binding.least(made.compiled.kernels))
    taken, pool = workspace(made.compiled, kept(makers(made.compiled), program.steps))
    fed = [value.name for value in model.graph.input]

    def arrays(names: Sequence[str]) -> tuple[Array, ...]:
        return tuple(Array(name, tensors[name].dtype, tensors[name].shape) for name in names)

    return SessionPlan(
        inputs=arrays(fed),
        defaults=tuple(name for name in fed if name not in program.inputs),
        outputs=arrays(program.outputs),
        places=tuple(
            Place(p.name, tensors[p.name].dtype, tensors[p.name].shape, p.offset) for p in bound.placements
        ),
        slab=bound.height,
        live=bound.live,
        weights=made.weights,
        workspace=taken + products.scratch_bytes(made.kernels),
        pool=pool,
        donated=bound.donated,
        not_donated=bound.not_donated,
        nodes=len(program.steps),
        execution_providers=made.compiled.kernels.execution_providers,
        random=next((s.label for s in program.steps if semantics(s.node.domain, s.node.op_type).random), ""),
        on_host=binding.kept_on_host(program),
        books=bookkeeping(made),
        fused=made.fused,
    )  # fmt: skip


def _all_dims(model: Any, dims: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of all symbolic dimensions: `dims`, those of the file's plan, and all that follow from them.

    Raise UsageError where one is missing or unknown.
    """
    from onnx_remat.ir import graph, shapes
    from onnx_remat.ort.shape_askers import SHAPE_ASKERS

    dims = shapes.planned_dims(model) | dict(dims)
    try:
        return shapes.all_dims(shapes.infer(graph.build(model), dims, askers=SHAPE_ASKERS), dims)
    except errors.ShapeError as error:
        if "dims" not in error.settings:
            raise
        missing = Setting("dims", error.settings["dims"])
        raise UsageError("symbolic dimensions are not bound: pass {}", missing) from None


def _pairs(donate: Donate, inputs: list[str], outputs: list[str]) -> dict[str, str]:
    from onnx_remat.ir.naming import renewals

    if isinstance(donate, bool):
        return renewals(inputs, outputs) if donate else {}
    for output, name in donate.items():
        if output not in outputs:
            raise UsageError(f"donate: the model has no output {output!r}")
        if name not in inputs:
            raise UsageError(f"donate: the model has no input {name!r}")
    return dict(donate)
