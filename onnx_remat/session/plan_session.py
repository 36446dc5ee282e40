"""What a `Session` needs to know of a step, found out in a process of its own.

Planning takes memory: the model as Python sees it, compiled kernels, ONNX Runtime while it optimises. None of it stays
with whoever trains: `open_step` starts a process (`child`) that leaves the model to load, says what to bind where, and
ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnx_remat import errors
from onnx_remat.errors import ModelError, UsageError
from onnx_remat.messages import Setting
from onnx_remat.process.child import Child, Failed
from onnx_remat.session import fusing
from onnx_remat.session.fusing import Fused

if TYPE_CHECKING:
    import onnx

    from onnx_remat.fuse.ir import Kernel
    from onnx_remat.ort.executed import Executed
    from onnx_remat.ort.prepare import Compiled
    from onnx_remat.session.binding import Binding, Program
    from onnx_remat.session.lean_graph import LeanNode

Donate = bool | Mapping[str, str]
"""Which outputs renew which inputs in place: none, all by their names, or those of the mapping, input by output."""


NUMPY = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64", 15: "complex128",
}  # fmt: skip
"""numpy's types by ``onnx.TensorProto``'s numbers."""

BY_BITS = {16: "uint16", 17: "uint8", 18: "uint8", 19: "uint8", 20: "uint8", 24: "uint8"}
"""Stand-ins for types that numpy lacks (bfloat16, the float8s): arrays of their bits."""


@dataclass(frozen=True, slots=True)
class Array:
    """An input or output: its name, element type (``onnx.TensorProto``; 0 if it is no tensor), and shape."""

    name: str
    dtype: int
    shape: tuple[int, ...]

    @property
    def dtype_name(self) -> str:
        """numpy's name of the element type; empty where it has none."""
        return NUMPY.get(self.dtype) or BY_BITS.get(self.dtype, "")

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return int(np.dtype(self.dtype_name).itemsize * np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class Place(Array):
    """A value bound to the slab."""

    offset: int


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """All that a `Session` needs besides the model to load.

    Attributes
    ----------
    inputs : tuple of Array
        Graph inputs; those in `defaults` need not be fed.
    defaults : tuple of str
    outputs : tuple of Array
        Graph outputs.
    places : tuple of Place
    slab, live : int
        Bytes of the slab, and the most of them in use at once.
    weights : int
        Bytes of initializers.
    workspace : int
        Most bytes of scratch memory at once; `pool` of them stay, see `scratch`.
    pool : int
    donated, not_donated : mapping of str to str
        See `binding.Binding`.
    nodes : int
        Nodes of the model to load.
    execution_providers : tuple of str
        What ONNX Runtime is to run it with.
    random : str
        A node that draws random numbers, if there is one.
    on_host : int
        Most bytes that the host keeps at once of what is moved there.
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
    fused: Fused


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """How a step is to be opened; see `Session`.

    `least`: bytes from which on values are bound; 0 for the default. `secret`: under which fused nodes name their
    kernels; 0 for a step that is not fused.
    """

    provider: str = "cpu"
    dims: Mapping[str, int] = field(default_factory=dict)
    donate: Donate = False
    level: str = "all"
    check: bool = False
    least: int = 0
    secret: int = 0


def open_step(path: Path, target: Path, request: SessionRequest) -> SessionPlan:
    """Plan where the values of a step lie, in a process of its own.

    Parameters
    ----------
    path : Path
        The step, an ONNX file.
    target : Path
        Where to write the model to load.
    request : SessionRequest

    Raises
    ------
    OnnxRematError
        The step cannot be opened, and why.
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
"""What `SessionRequest.check` asks for. By name: it compares two sessions, and so lies above the room of either."""


def planned(path: str, target: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """`plan`, for another process."""
    return asdict(plan(Path(path), Path(target), SessionRequest(**request)))


def _read(answer: Mapping[str, Any]) -> SessionPlan:
    def arrays(entries: list[Mapping[str, Any]]) -> tuple[Array, ...]:
        return tuple(Array(e["name"], e["dtype"], tuple(e["shape"])) for e in entries)

    places = tuple(Place(e["name"], e["dtype"], tuple(e["shape"]), e["offset"]) for e in answer["places"])
    given = dict(answer) | {"inputs": arrays(answer["inputs"]), "outputs": arrays(answer["outputs"]), "places": places}
    return SessionPlan(**given | {"defaults": tuple(answer["defaults"]), "fused": Fused(**answer["fused"])})


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """A step as it will run, what is bound where, and of what.

    `constants` it has besides its weights; `kernels` are those of its fused nodes, by handle, and `members` the steps
    that each stands for, by the first value that it makes.
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
    """ModelError where no session of ours can hold what a model has."""
    from onnx import TensorProto

    from onnx_remat.ir import model_io
    from onnx_remat.ort import runtime

    if model_io.weight_bytes(model) > runtime.MOST_WEIGHTS:
        raise ModelError("a session opens models of up to 512 MiB of weights in the file: make them inputs")
    for value in (*model.graph.input, *model.graph.output):
        kind = value.type
        if not kind.HasField("tensor_type") or kind.tensor_type.elem_type == TensorProto.STRING:
            raise ModelError(f"a session cannot open this model: {value.name!r} is no tensor of numbers")


def arrange(path: Path, target: Path, request: SessionRequest) -> SlabLayout:
    """Let ONNX Runtime optimise a step, choose the order of its nodes, lay out their values, and write what to load.

    What ONNX Runtime has once it has loaded that file is compared with what was laid out, and laid out in its stead
    where it is something else.

    Raises
    ------
    OnnxRematError
        The step cannot be opened, and why.
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
            f"onnxruntime makes no {kernels.execution_providers[0]} session here: that takes onnxruntime-gpu, its CUDA "
            "libraries and a device"
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
            beside = fusing.kernels_of(target)
            beside.unlink(missing_ok=True)
            if each.kernels:
                fusing.write(each.kernels, request.secret, beside)
            loaded = lean_graph.as_loaded(copy, target, kernels.execution_providers)
            different = lean_graph.difference(copy, loaded)
            if not different:
                return each
        del loaded.graph.output[:]
        loaded.graph.output.extend(model.graph.output)
        executed = executed_as_it_lies(loaded, stated)
    raise ModelError(
        f"a session cannot open this model: onnxruntime changes it whenever it loads it ({different}); run it with "
        "onnxruntime's own session"
    )


_LOADS = 4
"""How often a step is laid out anew, as ONNX Runtime has it once it has loaded it."""


def _candidates(made: SlabLayout, least: int, secret: int) -> Iterator[SlabLayout]:
    """A laid out step fused, if it can be, and then, should ONNX Runtime change that when it loads it, as it is."""
    if secret:
        other = as_fused(made, least, secret)
        why_not = other.fused.why_not
        if not why_not:
            yield other
            why_not = "onnxruntime changes it when it loads it"
        made = replace(made, fused=replace(made.fused, why_not=why_not))
    yield made


def as_fused(made: SlabLayout, least: int, secret: int = 0, seconds: float | None = None) -> SlabLayout:
    """A laid out step with its elementwise nodes fused, or the same step and why it is to run as it is.

    What a session does when it opens a step, and what predicts it: both have the same step from here.

    Parameters
    ----------
    made : SlabLayout
    least : int
        Bytes from which on a value is bound.
    secret : int
        Under which nodes name their kernels; 0 for a step that nobody loads.
    seconds : float, optional
        That the search for a low slab may take at most.
    """
    from onnx_remat.ir.opsets import opset_of

    model, why_not = made.compiled.graph.model, fusing.why_not(made.compiled.kernels.name)
    if not why_not:
        constants = fusing.numbers(model.graph, made.constants)
        laid = fusing.fused(made.program, made.binding, opset_of(model), constants, least, secret, seconds)
        if isinstance(laid, fusing.Laid):
            return replace(
                made, program=laid.program, binding=laid.binding, kernels=laid.kernels, members=laid.members,
                fused=replace(made.fused, kernels=len(laid.kernels)),
            )  # fmt: skip
        why_not = laid.why_not
    return replace(made, fused=replace(made.fused, why_not=why_not))


def lay_out(
    executed: Executed, outputs: Sequence[str], donate: Donate, least: int, seconds: float | None = None
) -> SlabLayout:
    """Where the values of a step lie that ONNX Runtime has optimised already.

    Parameters
    ----------
    executed : Executed
    outputs : sequence of str
        Graph outputs, in the original's order.
    donate : bool or mapping of str to str
        Which outputs renew which inputs in place.
    least : int
        Bytes from which on a value is bound.
    seconds : float, optional
        That the search for a low slab may take at most.

    Raises
    ------
    ModelError
        ONNX Runtime has not optimised it: it cannot run the step, or was not asked.
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
    return SlabLayout(
        compiled, program, bound, weights, constants, fused=Fused(len(program.steps), slab=bound.height)
    )  # fmt: skip


def workspace(compiled: Compiled) -> tuple[int, int]:
    """Bytes of scratch memory that a session takes at most, and how many of them it keeps, in a pool.

    A kernel that takes its own by ``malloc`` takes it besides the pool. Where nodes have bodies there is none: their
    values would lie in it for as long as they live, and leave gaps. On a device the session's own arena keeps it all.
    """
    from onnx_remat.ort.kernels.base import key
    from onnx_remat.session import device_scratch, scratch

    if compiled.kernels.device != "cpu":
        return device_scratch.workspace(compiled, compiled.graph.ops), 0
    asked = malloced = 0
    for op, blocks in zip(compiled.graph.ops, compiled.table.workspace, strict=True):
        if key(op.node) in compiled.kernels.by_malloc:
            malloced = max(malloced, sum(blocks))
        else:
            asked = max(asked, sum(-(-block // scratch.UNIT) * scratch.UNIT for block in blocks))
    bodies = any(attribute.HasField("g") for op in compiled.graph.ops for attribute in op.node.attribute)
    pool = 0 if bodies else scratch.pool_size(asked)
    return (pool + malloced if pool else max(asked, malloced)), pool


def plan(path: Path, target: Path, request: SessionRequest) -> SessionPlan:
    """`open_step` in this process, which compares nothing."""
    from onnx_remat.ir.op_semantics import semantics
    from onnx_remat.ort import runtime
    from onnx_remat.session import binding, lean_graph, replay

    made = arrange(path, target, request)
    program, bound, tensors, model = made.program, made.binding, made.compiled.tensors, made.compiled.graph.model
    order = runtime.order_by_priority(*lean_graph.edges(program.steps))
    replay.check(program, bound, order, request.least or binding.least(made.compiled.kernels))
    taken, pool = workspace(made.compiled)
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
        workspace=taken,
        pool=pool,
        donated=bound.donated,
        not_donated=bound.not_donated,
        nodes=len(program.steps),
        execution_providers=made.compiled.kernels.execution_providers,
        random=next((s.label for s in program.steps if semantics(s.node.domain, s.node.op_type).random), ""),
        on_host=binding.kept_on_host(program),
        fused=made.fused,
    )  # fmt: skip


def _all_dims(model: Any, dims: Mapping[str, int]) -> dict[str, int]:
    """`dims`, else what a file was planned for, and what follows for other symbolic dimensions.

    UsageError where one is missing or unknown.
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
