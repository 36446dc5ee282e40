"""Plan a `Session` for a step in a separate process.

Planning takes memory: the model in Python, compiled kernels, ONNX Runtime's optimisations. To free all of it before
training, `plan_in_child` starts a process (`child`) that writes the model to load, returns the addresses to bind, and
exits.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx_remat import errors
from onnx_remat.errors import ModelError, UsageError
from onnx_remat.messages import Setting
from onnx_remat.process import cache
from onnx_remat.process.child import Child, Failed
from onnx_remat.session import kernel_file, plan_cache
from onnx_remat.session.arrays import BY_BITS, NUMPY, Array, Place
from onnx_remat.session.slab_layout import (
    Donate,
    Fused,
    SlabLayout,
    bookkeeping,
    kept,
    lay_out,
    makers,
    searched,
    workspace,
)

if TYPE_CHECKING:
    import onnx

    from onnx_remat.ir import model_io
    from onnx_remat.session import offsets


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """Plan of a `Session`, which it needs in addition to the model to load.

    Attributes
    ----------
    inputs : tuple of Array
        Graph inputs; those in `defaults` are optional.
    defaults : tuple of str
        Inputs with a default value.
    shaping : mapping of str to list
        Values of the defaults that decide shapes, which the plan takes as fixed.
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
        See `offsets.Offsets`.
    nodes : int
        Number of nodes of the model to load.
    execution_providers : tuple of str
        Execution providers of ONNX Runtime's session.
    random : str
        A node that draws random numbers, empty if there is none.
    moved_in_turn : int
        Peak of bytes moved to the host on the stream of the kernels; copies alongside them move none of these.
    state_on_host : mapping of str to int
        Inputs that lie on the host between steps, and their offsets in that memory.
    read_on_host : str
        An input that a kernel of a device reads in host memory, empty if there is none.
    books : int
        Bytes of ONNX Runtime's bookkeeping, as predicted; 0 on a device.
    in_turn : str
        Why copies to the host run in turn with the kernels, see `overlap.why_in_turn`.
    fused : Fused
    """

    inputs: tuple[Array, ...]
    defaults: tuple[str, ...]
    shaping: Mapping[str, list[Any]]
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
    moved_in_turn: int
    state_on_host: Mapping[str, int]
    read_on_host: str
    books: int
    in_turn: str
    fused: Fused

    @property
    def loose(self) -> list[str]:
        """Return the outputs that ONNX Runtime allocates: empty ones, inputs, weights."""
        bound = {place.name for place in self.places}.union(self.donated)
        return [array.name for array in self.outputs if array.name not in bound]


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
    """Plan the layout of a step's values in a separate process, or find the plan of an earlier one.

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
    key = plan_cache.key_of(path, asdict(request))
    known = plan_cache.find(key, target) if key else None
    if known is not None and (not known["fused"]["kernels"] or kernel_file.fit_here(kernel_file.path_of(target))):
        return _read(known)
    try:
        with Child() as process:
            if request.check:
                compared = {"dims": request.dims, "level": request.level, "donate": request.donate}
                process.call(_CHECK, {"path": path, "provider": request.provider, **compared})
            job = {"path": path, "target": target, "request": asdict(request)}
            answer = process.call("onnx_remat.session.plan_session:planned", job, last=True)
    except Failed as failed:
        error = failed.error() or ModelError(f"{path.name} could not be opened: {failed}")
        raise (ModelError(str(error)) if isinstance(error, errors.BudgetInfeasibleError) else error) from None
    plan = answer["plan"]
    if key and answer["read"] == key.file:
        plan_cache.keep(key, target, plan)
    return _read(plan)


_CHECK = "onnx_remat.measure.verify:session"
"""Function for `SessionRequest.check`, by name: it compares two sessions, so its room is above that of sessions."""


def planned(path: str, target: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Call `plan` and return its result as JSON data; runs in a child process.

    Return also the digest of what was read, empty for a model with weights in other files.
    """
    from onnx_remat.ir import model_io
    from onnx_remat.memory import layout
    from onnx_remat.process import worker

    worker.start()
    threading.Thread(target=layout.load_greedy, daemon=True).start()  # while ONNX Runtime optimises the step
    data = plan_cache.content(Path(path))
    source = model_io.of_file(Path(path), data)
    digest = "" if data is None or source.data else plan_cache.digest_of(data)
    return {"plan": asdict(plan(source, Path(target), SessionRequest(**request))), "read": digest}


def _read(answer: Mapping[str, Any]) -> SessionPlan:
    def arrays(entries: list[Mapping[str, Any]]) -> tuple[Array, ...]:
        return tuple(Array(e["name"], e["dtype"], tuple(e["shape"])) for e in entries)

    places = tuple(Place(e["name"], e["dtype"], tuple(e["shape"]), e["offset"]) for e in answer["places"])
    given = dict(answer) | {"inputs": arrays(answer["inputs"]), "outputs": arrays(answer["outputs"]), "places": places}
    return SessionPlan(**given | {"defaults": tuple(answer["defaults"]), "fused": Fused(**answer["fused"])})


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
        number = kind.tensor_type.elem_type
        if number and number not in NUMPY and number not in BY_BITS:
            name = TensorProto.DataType.Name(number)
            raise ModelError(
                f"a session cannot open this model: {value.name!r} is of {name}, which numpy lacks: use another type"
            )


def arrange(step: model_io.Model, target: Path, request: SessionRequest) -> SlabLayout:
    """Let ONNX Runtime optimise a step, choose the order of its nodes, lay out their values, and write the lean graph.

    Compare the graph that ONNX Runtime has loaded from that file with the lean graph. Where they differ, try the step
    without fused nodes, then lay out the loaded graph instead. Kernels of fused nodes are compiled and written to
    `kernel_file.path_of`.

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
    from onnx_remat.session import lean_graph, offsets
    from onnx_remat.session.copies import Stated

    source = model_io.load(step)
    check_openable(source.model)
    kernels = kernels_of(request.provider)
    runtime.check_device(kernels.execution_providers[0])
    if old := placement.too_old(kernels, opset_of(source.model), runtime.installed()):
        raise ModelError(f"a session cannot train well here: {old}")
    stated = Preparation(kernels, dims=_all_dims(source.model, request.dims), fixed=True)
    executed = as_optimized(source.model, source.folder, request.level, stated)
    outputs = [value.name for value in source.model.graph.output]
    least = request.least or offsets.least(kernels)
    different = refused = ""
    for _ in range(_LOADS):
        made = lay_out(executed, outputs, request.donate, least, search=False)
        model = made.compiled.graph.model
        for each in _candidates(made, least, request.secret):
            if refused and not each.kernels:
                each = replace(each, fused=replace(each.fused, why_not=refused))
            bound = [place.name for place in each.offsets.placements]
            on_host = {*each.state, *(state.output for state in each.state.values())}
            copy = lean_graph.copy_of(model, each.program.steps, bound, each.constants, on_host)
            if source.folder is not None:
                external_data.link(copy, source.folder, target.parent)
            with cache.replacing(target) as partial:  # what has its name may be a link to a data file of the user
                onnx.save(copy, partial)
            code = kernel_file.path_of(target)
            code.unlink(missing_ok=True)
            if each.kernels or each.copies:
                kernel_file.write(each.kernels, request.secret, code, each.copies, each.pinned)
            try:
                loaded = lean_graph.as_loaded(copy, target, kernels.execution_providers)
            except ModelError as error:  # on a device: it places a kernel on the host, or the driver refuses them
                if not (each.kernels or each.copies) or kernels.device == "cpu":
                    raise
                refused = str(error)
                continue
            different = lean_graph.difference(copy, loaded)
            if not different:
                return each
        del loaded.graph.output[:]
        loaded.graph.output.extend(model.graph.output)
        if said := Stated.of(model):  # a lean graph has no metadata
            said.put(loaded)
        executed = executed_as_it_lies(loaded, stated)
    raise ModelError(
        f"a session cannot open this model: onnxruntime changes it whenever it loads it ({different}): run it with "
        "onnxruntime's own session"
    )


_LOADS = 4
"""Number of layouts to try, each of the graph that ONNX Runtime loaded for the last one."""


def _candidates(made: SlabLayout, least: int, secret: int) -> Iterator[SlabLayout]:
    """Yield layouts in the order to try them, since ONNX Runtime may change the graph of any when it loads it.

    The first has fused nodes, and copies alongside the kernels, if possible, the second only
    such copies, the last neither.
    """
    from onnx_remat.session import fusing, overlap

    if secret:
        other = overlap.overlapped(fusing.as_fused(made, least, secret), least, secret)
        why_not = other.fused.why_not
        if not why_not or other.copies:
            yield other
            why_not = "onnxruntime changes it when it loads it"
        made = replace(made, fused=replace(made.fused, why_not=why_not))
        if other.kernels and other.copies:
            yield overlap.overlapped(made, least, secret)
    yield searched(made, least)


def plan(step: model_io.Model, target: Path, request: SessionRequest) -> SessionPlan:
    """Plan a step in this process, without `SessionRequest.check`; see `plan_in_child`."""
    from onnx_remat.fuse import products
    from onnx_remat.ir.op_semantics import semantics
    from onnx_remat.ort import runtime
    from onnx_remat.session import lean_graph, offsets, overlap, replay

    made = arrange(step, target, request)
    program, bound, model = made.program, made.offsets, made.compiled.graph.model
    tensors = program.tensors
    order = runtime.order_by_priority(*lean_graph.edges(program.steps))
    replay.check(program, bound, order, request.least or offsets.least(made.compiled.kernels))
    taken, pool = workspace(made.compiled, kept(makers(made.compiled), program.steps))
    fed = [value.name for value in model.graph.input if value.name in made.compiled.graph.fed]

    def arrays(names: Sequence[str]) -> tuple[Array, ...]:
        return tuple(Array(name, tensors[name].dtype, tensors[name].shape) for name in names)

    return SessionPlan(
        inputs=arrays(fed),
        defaults=tuple(name for name in fed if name not in program.inputs and name not in made.state),
        shaping=_shaping(step, request.dims),
        outputs=arrays([value.name for value in model.graph.output]),
        places=tuple(
            Place(p.name, tensors[p.name].dtype, tensors[p.name].shape, p.offset) for p in bound.placements
        ),
        slab=bound.height,
        live=bound.live,
        weights=made.weights,
        workspace=taken + products.scratch_bytes(made.kernels),
        pool=pool,
        donated=dict(bound.donated) | {state.output: name for name, state in made.state.items()},
        state_on_host={name: state.offset for name, state in made.state.items()},
        not_donated=bound.not_donated,
        nodes=len(program.steps),
        execution_providers=made.compiled.kernels.execution_providers,
        random=next((s.label for s in program.steps if semantics(s.node.domain, s.node.op_type).random), ""),
        moved_in_turn=offsets.kept_on_host(program),
        read_on_host=_read_on_host(program),
        books=bookkeeping(made),
        in_turn=overlap.why_in_turn(made) if request.secret else "",
        fused=made.fused,
    )  # fmt: skip


def _shaping(step: model_io.Model, dims: Mapping[str, int]) -> dict[str, list[Any]]:
    """Return the defaults of whole numbers in a step whose shapes do not follow without them."""
    import onnx
    from onnx import numpy_helper

    from onnx_remat.ir import graph, model_io, shape_arithmetic, shapes
    from onnx_remat.ir.dims import with_planned
    from onnx_remat.ir.light import without_weights
    from onnx_remat.ort.shape_askers import SHAPE_ASKERS

    model = model_io.load(step).model
    fed = {value.name for value in model.graph.input}
    stated = {tensor.name: tensor for tensor in model.graph.initializer if tensor.name in fed}
    whole = (onnx.TensorProto.INT32, onnx.TensorProto.INT64)
    numbers = {n: t for n, t in stated.items() if t.data_type in whole and math.prod(t.dims) <= shape_arithmetic.MOST}
    if not numbers:
        return {}
    without = without_weights(model)
    kept = [tensor for tensor in without.graph.initializer if tensor.name not in numbers]
    del without.graph.initializer[:]
    without.graph.initializer.extend(kept)
    try:
        shapes.infer(graph.build(without), with_planned(model, dims), askers=SHAPE_ASKERS)
    except errors.ShapeError:
        return {name: numpy_helper.to_array(each).tolist() for name, each in numbers.items()}
    return {}


def _read_on_host(program: offsets.Program) -> str:
    """Return an input that a kernel of a device reads in host memory, an empty text if there is none."""
    slots = ((step.node.input, program.kernels.host_slots(step.node)) for step in program.steps)
    read = [reads[slot] for reads, some in slots for slot in some if slot < len(reads)]
    return next((name for name in read if name in program.inputs), "")


def _all_dims(model: Any, dims: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes of all symbolic dimensions: `dims`, those of the file's plan, and all that follow from them.

    Raise UsageError where one is missing or unknown.
    """
    from onnx_remat.ir import graph, shapes
    from onnx_remat.ir.dims import symbols_of, with_planned
    from onnx_remat.ort.shape_askers import SHAPE_ASKERS

    dims = with_planned(model, dims)
    if not dims and not symbols_of(model):
        return {}
    try:
        return shapes.all_dims(shapes.infer(graph.build(model), dims, askers=SHAPE_ASKERS), dims)
    except errors.ShapeError as error:
        if "dims" not in error.settings:
            raise
        missing = Setting("dims", error.settings["dims"])
        raise UsageError("symbolic dimensions are not bound: pass {}", missing) from None
