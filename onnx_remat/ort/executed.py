"""A model as ONNX Runtime will execute it: its optimised graph and the execution order of its nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import onnx

from onnx_remat.errors import ModelError
from onnx_remat.ir import model_io, shapes
from onnx_remat.ir.light import INLINE_LIMIT, without_weights
from onnx_remat.ir.opsets import STANDARD_DOMAINS
from onnx_remat.ir.shapes import Dim
from onnx_remat.memory import buffers
from onnx_remat.memory.problem import Schedule
from onnx_remat.messages import Message, Setting
from onnx_remat.ort import half_precision, runtime
from onnx_remat.ort.compile import shape_classes
from onnx_remat.ort.kernels.base import Kernels
from onnx_remat.ort.prepare import Compiled, Preparation, prepare_for_simulation


@dataclass(frozen=True)
class Executed:
    """A model as ONNX Runtime will execute it: its optimised graph and the order of its nodes.

    `emulated`: why the runtime was not queried or could not load it, so that this is the file's own graph; else empty.
    """

    compiled: Compiled
    order: Schedule
    emulated: str = ""

    @cached_property
    def timeline(self) -> buffers.Timeline:
        """Simulation of its buffers."""
        return buffers.simulate(self.compiled.problem, self.order)


_CUSTOM_OPS = (
    "onnxruntime cannot load this model's custom ops here: the plan follows the file as it is, and neither graph "
    "optimisations nor the memory of custom kernels were checked"
)
_MANY_NODES = (
    f"onnxruntime takes a minute or more to load some graphs of over {runtime.MOST_NODES} nodes: it was not queried, "
    "the plan follows the file as it is, and graph optimisations were not checked (onnx-remat-bench measures both "
    "files)"
)


_LEVELS_AT_A_TIME = 2  # optimisation levels for which ONNX Runtime is queried in parallel


def at_levels(
    model: onnx.ModelProto,
    folder: Path | None,
    levels: Sequence[str],
    stated: Preparation,
    known: Compiled | None = None,
) -> dict[str, Executed]:
    """Return a model as ONNX Runtime executes it at several optimisation levels; see `as_executed`."""
    if not _is_asked(model, stated):
        return dict.fromkeys(levels, as_executed(model, folder, "all", stated, known))
    shown = shapes.declared(model) if set(levels) != {"disable"} and _is_shown_whole(model, stated) else None
    with ThreadPoolExecutor(_LEVELS_AT_A_TIME) as pool:  # each query runs in a separate process
        executed = pool.map(lambda level: as_executed(model, folder, level, stated, known, shown), levels)
        return dict(zip(levels, executed, strict=True))


def _is_asked(model: onnx.ModelProto, stated: Preparation) -> bool:
    """Whether to query ONNX Runtime about a model: not if that takes too long, unless a `Session` needs it."""
    return runtime.available() and (stated.fixed or not runtime.is_large(model))


def as_executed(
    model: onnx.ModelProto,
    folder: Path | None,
    level: str,
    stated: Preparation,
    known: Compiled | None = None,
    shown: onnx.ModelProto | None = None,
) -> Executed:
    """Return a model as ONNX Runtime executes it at an optimisation level; emulated if it is not installed.

    Parameters
    ----------
    model : onnx.ModelProto
    folder : Path or None
        Where its external data lies.
    level : str
        One of `runtime.LEVELS`.
    stated : Preparation
        Its dims may name more dimensions than the model has.
    known : Compiled, optional
        The model as `prepare` returns it.
    shown : onnx.ModelProto, optional
        The model as `shapes.declared` returns it, if already known.

    Raises
    ------
    ModelError
        ONNX Runtime cannot load the model.
    """
    if not runtime.available() or (level == "disable" and not _gets_casts(model, stated)):
        return _emulated(model, stated, "", known)
    if not _is_asked(model, stated):
        return _emulated(model, stated, _MANY_NODES, known)
    try:
        return as_optimized(model, folder, level, stated, shown)
    except ModelError as error:
        if not _has_custom_ops(model):
            raise
        if stated.must_load:
            hint = Message("{} plans from the file alone, for a runtime that has these ops", Setting("verify", "none"))
            raise ModelError("{} ({})", error.message, hint) from error
        return _emulated(model, stated, _CUSTOM_OPS, known)


def as_optimized(
    model: onnx.ModelProto,
    folder: Path | None,
    level: str,
    stated: Preparation,
    shown: onnx.ModelProto | None = None,
) -> Executed:
    """Return the graph that ONNX Runtime itself makes of a model at an optimisation level, "disable" included.

    At every level, it inserts casts around ops that have no half-precision kernel and inlines functions.

    Raises
    ------
    ModelError
        ONNX Runtime cannot load the model.
    """
    providers, without = whom_to_ask(stated.kernels, stated.fixed)
    if not _is_shown_whole(model, stated):
        optimized = _optimized_without_weights(model, stated, level, _in_floats(model, stated))
    else:
        optimized = runtime.optimized(
            shown or shapes.declared(model), folder, level, providers, without, stated.load_dims
        )
    executed = _with_shapes_of_moved(executed_as_it_lies(optimized, stated), model, shown, stated.dims)
    # With optimisations off, ONNX Runtime saves nodes in the file's order, not in execution order.
    return replace(executed, order=executed.compiled.default_order()) if level == "disable" else executed


def _gets_casts(model: onnx.ModelProto, stated: Preparation) -> bool:
    """Whether ONNX Runtime inserts casts, also with optimisations off: around ops in half precision, on the CPU."""
    return stated.kernels.execution_providers == runtime.HOST and half_precision.has_halves(model)


def _is_shown_whole(model: onnx.ModelProto, stated: Preparation) -> bool:
    """Whether the query uses the model as it is: with all its weights, and in its own types."""
    return not _in_floats(model, stated) and model_io.weight_bytes(model) <= runtime.MOST_WEIGHTS


def _in_floats(model: onnx.ModelProto, stated: Preparation) -> bool:
    """Whether the query replaces half precision by float32, as the CPU stands in for a missing device."""
    return whom_to_ask(stated.kernels)[0] != stated.kernels.execution_providers and half_precision.has_halves(model)


def executed_as_it_lies(model: onnx.ModelProto, stated: Preparation) -> Executed:
    """Return a graph that ONNX Runtime has already loaded, its nodes in the order it saved them."""
    compiled = prepare_for_simulation(model, stated)
    return Executed(compiled, Schedule(tuple(range(compiled.problem.n_ops))))


def _with_shapes_of_moved(
    executed: Executed, model: onnx.ModelProto, shown: onnx.ModelProto | None, dims: Mapping[str, int]
) -> Executed:
    """Return an optimised graph with the shapes that ONNX Runtime knows of the results that it gave to nodes.

    It moves a Transpose behind a node by giving the node another result, of the same type and shape but for the order
    of axes (``transpose_optimization/onnx_transpose_optimization.cc``, ``TransposeOutput``). The graph that it saves
    does not state this shape, which cannot be inferred if the file hides that of the node's input. A result of another
    type, of a kernel that computes in float32, has no known shape.
    """
    compiled = executed.compiled
    own = {name for node in model.graph.node for name in node.output}
    hidden = {name for name, t in compiled.tensors.items() if t.symbolic is None and name not in own}
    moved = [op for op in compiled.graph.ops if op.node.name and not hidden.isdisjoint(op.node.output)]
    if not moved:
        return executed
    graph = (shown or shapes.declared(model)).graph
    stated = {value.name: value.type for value in (*graph.value_info, *graph.output)}
    before = {node.name: node.output for node in model.graph.node}
    tensors = dict(compiled.tensors)
    for op in moved:
        for name, old in zip(op.node.output, before.get(op.node.name, ()), strict=False):
            kind = stated.get(old)
            if name in hidden and kind is not None and kind.tensor_type.elem_type == tensors[name].dtype:
                axes = _reordered(shapes.axes(kind), tensors[name].shape, dims)
                tensors[name] = replace(tensors[name], symbolic=axes)
    shape_class, poolable = shape_classes([tensors[name] for name in compiled.graph.values])
    problem = replace(compiled.problem, shape_class=shape_class, poolable=poolable)
    return replace(executed, compiled=replace(compiled, tensors=tensors, problem=problem))


def _reordered(known: Sequence[Dim], shape: Sequence[int], dims: Mapping[str, int]) -> tuple[Dim, ...] | None:
    """Return known axes in the order of a shape; None if they are not those of the shape, or two of one size differ.

    >>> _reordered((4, "n", 7), (7, 4, 2), {"n": 2}), _reordered((2, "n"), (2, 2), {"n": 2})
    ((7, 4, 'n'), None)
    """
    sizes = [dims.get(axis) if isinstance(axis, str) else axis for axis in known]
    of_size = dict(zip(sizes, known, strict=True))
    if None in sizes or Counter(shape) != Counter(sizes) or len(of_size) != len(set(known)):
        return None
    return tuple(of_size[size] for size in shape)


def whom_to_ask(kernels: Kernels, by_session: bool = False) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the execution providers that optimise a file for a query, and the optimisations to disable.

    Without the device, the CPU stands in, without the optimisations for itself alone; fusions that only the device's
    provider makes are not seen then, and a `Session` leaves them out.
    """
    if runtime.has_device(kernels.execution_providers[0]):
        return kernels.execution_providers, kernels.device_fusions if by_session else ()
    return runtime.HOST, kernels.host_fusions


def _emulated(model: onnx.ModelProto, stated: Preparation, why: str = "", known: Compiled | None = None) -> Executed:
    """Return the file's own graph in the order ONNX Runtime would execute it, without graph optimisations."""
    if known is None or len(known.graph.ops) != known.graph.n_nodes():  # some op was split
        known = prepare_for_simulation(model, stated)
    return Executed(known, known.default_order(), why)


def _optimized_without_weights(
    model: onnx.ModelProto, stated: Preparation, level: str, in_floats: bool
) -> onnx.ModelProto:
    """Optimise a model whose weights are too large, or that is queried in float32; see `runtime.optimized`.

    Weights, and values that it would fold from them when it loads the file, become inputs for the query. In the result
    they are initializers again, without contents.
    """
    compiled = prepare_for_simulation(model, stated)
    light = without_weights(shapes.declared(model))
    inputs = {value.name: value for value in model.graph.input}
    weights = {value.name: None for value in light.graph.input if value.name not in inputs}
    folded: set[str] = set()
    for op in compiled.graph.ops:
        made = [(compiled.graph.values[name], compiled.tensors[name]) for name in op.writes]
        large = all(tensor.nbytes > INLINE_LIMIT and not value.is_output for value, tensor in made)
        if compiled.table.foldable[op.index] and large and any(name in weights for name in op.reads):
            weights |= dict.fromkeys(op.writes)
            folded.update(op.writes)
    kept = [node for node in light.graph.node if folded.isdisjoint(node.output)]
    read = {name for op in compiled.graph.ops if folded.isdisjoint(op.writes) for name in op.reads}
    shown = {n: compiled.tensors[n] for n in weights if n in read or compiled.graph.values[n].is_output}
    light.graph.ClearField("node")
    light.graph.node.extend(kept)
    light.graph.ClearField("input")
    light.graph.input.extend(inputs.values())
    light.graph.input.extend(
        onnx.helper.make_tensor_value_info(name, tensor.dtype, tensor.shape) for name, tensor in shown.items()
    )
    providers, without = whom_to_ask(stated.kernels, stated.fixed)
    if in_floats:
        without = (*without, *half_precision.KEEPS_CASTS)
        optimized = runtime.optimized(
            half_precision.as_floats(light), None, level, providers, without, stated.load_dims
        )
        half_precision.as_halves(optimized, light, compiled.tensors)
    else:
        optimized = runtime.optimized(light, None, level, providers, without, stated.load_dims)
    optimized.graph.ClearField("input")
    optimized.graph.input.extend(inputs.values())
    optimized.graph.initializer.extend(
        onnx.TensorProto(
            name=name, data_type=tensor.dtype, dims=tensor.shape, data_location=onnx.TensorProto.EXTERNAL
        )
        for name, tensor in shown.items()
    )  # fmt: skip
    present = {tensor.name for tensor in optimized.graph.initializer}
    optimized.graph.initializer.extend(  # defaults of inputs, which a session keeps besides what is fed
        onnx.TensorProto(
            name=tensor.name, data_type=tensor.data_type, dims=tensor.dims, data_location=onnx.TensorProto.EXTERNAL
        )
        for tensor in model.graph.initializer
        if tensor.name in inputs and tensor.name not in present
    )  # fmt: skip
    return optimized


def _has_custom_ops(model: onnx.ModelProto) -> bool:
    return any(node.domain not in STANDARD_DOMAINS for node in model.graph.node)
