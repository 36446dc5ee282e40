"""Graph + tables of facts -> `Problem`: the flat arrays for simulation and planning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import onnx
from onnx import TensorProto

from onnx_remat.errors import ModelError, ShapeError, UsageError
from onnx_remat.ir import shape_arithmetic
from onnx_remat.ir.body import bytes_in_bodies
from onnx_remat.ir.dropout import is_product, is_random_node
from onnx_remat.ir.dtypes import bits
from onnx_remat.ir.graph import INITIALIZER, NODE, Graph, Op, attributes, blames_the_node, build, constants
from onnx_remat.ir.light import without_weights
from onnx_remat.ir.op_semantics import SPLIT, overwritten, semantics
from onnx_remat.ir.opsets import STANDARD, STANDARD_DOMAINS, canonical, opset_of, opsets_of
from onnx_remat.ir.shapes import Tensor, infer
from onnx_remat.ir.subgraphs import workspace as body_workspace
from onnx_remat.ir.training_ops import is_pure_contrib
from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Flags, Ints, Problem
from onnx_remat.messages import Setting
from onnx_remat.ort.kernels.base import Call, Kernels, itemsize
from onnx_remat.ort.known_bugs import pads_to_share
from onnx_remat.ort.shape_askers import SHAPE_ASKERS


@dataclass(frozen=True, slots=True)
class OpTable:
    """Facts about each op of a graph beyond its edges; rows are op indices.

    `workspace` has the bytes of each block of scratch memory.
    """

    recomputable: tuple[bool, ...]
    foldable: tuple[bool, ...]
    workspace: tuple[tuple[int, ...], ...]
    rerun_workspace: tuple[int, ...]


def tabulate(graph: Graph, tensors: Mapping[str, Tensor], kernels: Kernels, allow: Sequence[str] = ()) -> OpTable:
    """Collect the facts about each op of a graph.

    Parameters
    ----------
    graph, tensors
        The IR and its shapes.
    kernels : Kernels
        Facts about the provider's kernels.
    allow : sequence of str
        ``DOMAIN::OP`` names of custom ops that the user allows to recompute.

    Raises
    ------
    UsageError
        `allow` names an op that is known to differ in a second run, or a standard op.
    """
    _check_recomputable(allow)
    foldable = _foldable(graph, tensors)
    stated, versions = constants(graph.model.graph), opsets_of(graph.model)
    known, padded = _read_in_bodies(graph, tensors, stated), pads_to_share(graph)
    return OpTable(
        recomputable=tuple(
            _recomputable(graph, op, kernels, allow, stated, versions)
            and op.index not in padded
            and all(tensors[name].dtype for name in (*op.reads, *op.writes))
            for op in graph.ops
        ),
        foldable=foldable,
        rerun_workspace=tuple(tensors[op.writes[0]].nbytes if is_product(op) else 0 for op in graph.ops),
        workspace=tuple(
            (_body_workspace(op, graph.model, tensors, known, kernels),)
            if op.has_body
            else _workspace(op, tensors, kernels, versions, stated)
            for op in graph.ops
        ),
    )


def _check_recomputable(allow: Sequence[str]) -> None:
    for name in allow:
        domain, _, op_type = name.partition("::")
        says = semantics(domain, op_type)
        if says.random:
            why = "draws new samples in every run: it cannot be recomputed"
        elif says.stateful:
            why = "changes state in every run: it cannot be recomputed"
        elif canonical(domain) == STANDARD and says.known:
            why = "is a standard op, which is recomputed where that is safe: leave it out"
        else:
            continue
        raise UsageError("{}: {!r} " + why, Setting("allow_recompute"), name)


def _read_in_bodies(
    graph: Graph, tensors: Mapping[str, Tensor], stated: Mapping[str, onnx.TensorProto]
) -> Mapping[str, onnx.TensorProto]:
    """Return the small integers that bodies read, if they follow from shapes and constants of the graph."""
    read = dict.fromkeys(name for op in graph.ops for name in op.captured)
    small = [
        name for name in read
        if tensors[name].dtype in (TensorProto.INT32, TensorProto.INT64)
        and math.prod(tensors[name].shape) <= shape_arithmetic.MOST
    ]  # fmt: skip
    given = {n: stated[n] for n in small if n in stated and stated[n].data_location != TensorProto.EXTERNAL}
    needed = [name for name in small if name not in stated and graph.values[name].kind == NODE]
    if not needed:
        return given
    types = {
        name: onnx.helper.make_tensor_type_proto(tensor.dtype, tensor.shape)
        for name, tensor in tensors.items()
        if tensor.dtype != TensorProto.UNDEFINED
    }
    return given | shape_arithmetic.values(without_weights(graph.model), types, needed)


@blames_the_node
def _body_workspace(
    op: Op,
    model: onnx.ModelProto,
    tensors: Mapping[str, Tensor],
    known: Mapping[str, onnx.TensorProto],
    kernels: Kernels,
) -> int:
    """Return the bytes that the op's bodies allocate; ShapeError if they are unknown."""

    def peak(body: onnx.ModelProto) -> int:
        graph = build(body, kernels.no_kernel)
        sizes = infer(graph, askers=SHAPE_ASKERS)
        nothing = [0] * len(graph.ops)
        problem = compile_problem(graph, sizes, tabulate(graph, sizes, kernels), kernels, nothing, nothing)
        return simulate(problem, range(problem.n_ops)).peak

    try:
        return body_workspace(op, model, tensors, known, peak)
    except ModelError as error:
        raise ShapeError(f"memory of node {op.label!r} ({op.node.op_type}) while it runs: {error}") from error


@blames_the_node
def _recomputable(
    graph: Graph,
    op: Op,
    kernels: Kernels,
    allow: Sequence[str],
    stated: Mapping[str, onnx.TensorProto],
    versions: Mapping[str, int],
) -> bool:
    node = op.node
    if allow and f"{node.domain}::{node.op_type}" in allow:
        return True
    says = semantics(*op.kind)
    random = says.random and is_random_node(node, versions.get(op.kind[0], 0), stated)
    ours = op.kind[0] in (STANDARD, SPLIT) or is_pure_contrib(*op.kind)
    # A recompute overwrites copies, so no op may read what it writes there.
    wanted = any(
        (graph.values[name].is_output and slot in says.overwrites) or graph.readers[name]
        for slot, out in (*kernels.aliases(node), *says.renews)
        for name in op.outputs[out : out + 1]
        if slot in overwritten(node) and name
    )
    return says.known and not (says.stateful or random or op.has_body or wanted) and ours


def _foldable(graph: Graph, tensors: Mapping[str, Tensor]) -> tuple[bool, ...]:
    """Flag the ops that depend on no graph input: ONNX Runtime folds them when it loads the file."""
    constant = {name for name, value in graph.values.items() if value.kind == INITIALIZER} - graph.fed
    result = []
    for op in graph.ops:
        fixed_shape = op.kind == (STANDARD, "Shape") and not any(
            isinstance(d, str | None) for d in tensors[op.inputs[0]].symbolic or (None,)
        )
        folds = (fixed_shape or all(name in constant for name in op.reads)) and not (
            semantics(*op.kind).random or op.has_body
        )
        if folds:
            constant.update(op.writes)
        result.append(folds)
    return tuple(result)


@blames_the_node
def _workspace(
    op: Op,
    tensors: Mapping[str, Tensor],
    kernels: Kernels,
    versions: Mapping[str, int],
    stated: Mapping[str, onnx.TensorProto],
) -> tuple[int, ...]:
    if op.kind not in kernels.workspace:
        return ()
    inputs = [tensors.get(name) for name in op.inputs]
    outputs = [tensors.get(name) for name in op.outputs]
    call = Call(
        attributes(op.node),
        [t.shape if t else None for t in inputs], [itemsize(t.dtype) if t else 0 for t in inputs],
        [t.shape if t else None for t in outputs], [itemsize(t.dtype) if t else 0 for t in outputs],
        kernels.threads, versions.get(op.kind[0], 0), _axes(op, stated),
    )  # fmt: skip
    return kernels.blocks(op.kind, call)


def _axes(op: Op, stated: Mapping[str, onnx.TensorProto]) -> tuple[int, ...] | None:
    if not op.node.op_type.startswith("Reduce"):
        return None
    given = stated.get(op.inputs[1]) if len(op.inputs) > 1 else None
    if given is not None and given.data_location != TensorProto.EXTERNAL:
        return tuple(int(axis) for axis in onnx.numpy_helper.to_array(given).reshape(-1))
    attribute = attributes(op.node).get("axes")
    return tuple(int(axis) for axis in attribute) if isinstance(attribute, Sequence) else None


def compile_problem(
    graph: Graph,
    tensors: Mapping[str, Tensor],
    table: OpTable,
    kernels: Kernels,
    costs: Sequence[float],
    phases: Sequence[int],
) -> Problem:
    """Flatten a graph and its tables into a `Problem`.

    Parameters
    ----------
    graph, tensors, table
        The IR, its shapes (`shapes.infer`) and its op facts (`tabulate`).
    kernels : Kernels
        Facts about the provider's kernels.
    costs, phases : sequences, one entry per op
        Seconds of one execution; FORWARD, BACKWARD or OPTIMIZER.
    """
    number = {name: i for i, name in enumerate(graph.values)}
    kinds = [value.kind for value in graph.values.values()]
    sizes = [tensors[name] for name in graph.values]
    shape_class, poolable = shape_classes(sizes)
    alias, inplace, droppable = _sharing(graph, tensors, kernels)
    return Problem(
        in_ptr=_offsets([len(op.reads) for op in graph.ops]),
        in_values=np.array([number[name] for op in graph.ops for name in op.reads], np.int32),
        out_ptr=_offsets([len(op.writes) for op in graph.ops]),
        out_values=np.array([number[name] for op in graph.ops for name in op.writes], np.int32),
        nbytes=np.array([t.nbytes for t in sizes], np.int64),
        resident=np.array([kind != NODE for kind in kinds], np.bool_),
        is_output=np.array([value.is_output for value in graph.values.values()], np.bool_),
        shape_class=shape_class,
        poolable=poolable,
        alias_slot=np.array(alias, np.int32),
        inplace_ptr=_offsets([len(slots) for slots in inplace]),
        inplace_slots=np.array([slot for slots in inplace for slot in slots], np.int32),
        droppable=np.array(droppable, np.int8),
        workspace=np.array([sum(blocks) for blocks in table.workspace], np.int64),
        rerun_workspace=np.array(table.rerun_workspace, np.int64),
        cost=np.array(costs, np.float64),
        recomputable=np.array(table.recomputable, np.bool_),
        phase=np.array(phases, np.int8),
        base_bytes=sum(t.nbytes for t, kind in zip(sizes, kinds, strict=True) if kind != NODE)
        + sum(tensors[name].nbytes for name in _with_default(graph))
        + bytes_in_bodies(graph.model.graph.node),
    )


def _with_default(graph: Graph) -> list[str]:
    """Return the inputs with an initializer as default: the session keeps the default in addition to the fed value."""
    return [name for name in graph.fed if graph.values[name].kind == INITIALIZER]


def _offsets(lengths: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([0, *accumulate(lengths)], np.int32)


def shape_classes(sizes: Sequence[Tensor]) -> tuple[Ints, Flags]:
    """Return a number per value, equal if the runtime infers equal shapes and element sizes from the file alone, and
    whether a value takes part in the reuse of buffers; see `Problem`."""
    numbers: dict[tuple[object, ...], int] = {}
    classes = []
    for tensor in sizes:
        dims = tensor.symbolic
        if dims is None or None in dims or tensor.dtype == TensorProto.STRING:
            classes.append(-1)
        else:
            classes.append(numbers.setdefault((dims, bits(tensor.dtype)), len(numbers)))
    poolable = [c >= 0 and len(tensor.shape) > 0 for c, tensor in zip(classes, sizes, strict=True)]
    return np.array(classes, np.int32), np.array(poolable, np.bool_)


def _sharing(
    graph: Graph, tensors: Mapping[str, Tensor], kernels: Kernels
) -> tuple[list[int], list[list[int]], list[bool]]:
    """Return, per output slot, the input it aliases, the inputs it may overwrite, and whether it is optional."""
    alias: list[int] = []
    inplace: list[list[int]] = []
    droppable: list[bool] = []
    for op in graph.ops:
        node = op.node
        if len(op.outputs) == 1 and op.kind not in kernels.alias and op.kind not in kernels.inplace:  # most ops
            alias.append(-1)
            inplace.append([])
            droppable.append(False)
            continue
        dtype = tensors[op.inputs[0]].dtype if op.inputs and op.inputs[0] else TensorProto.FLOAT
        aliases, inplaces = kernels.aliases(node), kernels.may_inplace(node, dtype)
        position = {slot: i for i, slot in enumerate(s for s, name in enumerate(op.inputs) if name)}
        optional = optional_outputs(graph.model, node)
        for slot, name in enumerate(op.outputs):
            if not name:
                continue
            alias.append(next((position[i] for i, o in aliases if o == slot and i in position), -1))
            inplace.append([position[i] for i, o in inplaces if o == slot and i in position])
            droppable.append(slot in optional)
    return alias, inplace, droppable


def optional_outputs(model: onnx.ModelProto, node: onnx.NodeProto) -> set[int]:
    """Return the output slots that the operator allows to omit.

    A recompute keeps those of its original: without them ONNX Runtime may refuse the node (BatchNormalization) or take
    another kernel (MaxPool), whose results differ.
    """
    if node.domain not in STANDARD_DOMAINS or len(node.output) < 2:
        return set()
    try:
        schema = onnx.defs.get_schema(node.op_type, opset_of(model), STANDARD)
    except onnx.defs.SchemaError:
        return set()
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    return {i for i, output in enumerate(schema.outputs) if output.option == optional}
