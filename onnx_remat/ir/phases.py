"""Phases: whether each op of the step belongs to the forward, backward or optimizer section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnx import TensorProto

from onnx_remat.errors import ModelError, UsageError, did_you_mean
from onnx_remat.ir.graph import NODE, Graph, Op
from onnx_remat.ir.metadata import entries
from onnx_remat.ir.shapes import Tensor
from onnx_remat.memory.problem import BACKWARD, FORWARD, OPTIMIZER
from onnx_remat.messages import Setting

LABELS = {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER}
NAMES = tuple(LABELS)

_FLOATS = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_FORWARD_ONLY = (
    "the graph has no backward section: it was planned as an inference graph; python -m onnx_remat.converters.autodiff "
    "makes a training graph of it"
)
_UPDATES = ("Add", "Sub", "Mul", "Div", "Sum", "Cast")  # state in half precision is cast first


def split(graph: Graph, tensors: Mapping[str, Tensor], loss: str | None = None) -> list[int]:
    """Return the phase of every op.

    Labels in node metadata (key ``phase``: forward, backward or optimizer) have priority; the structure decides for
    unlabelled ops: ancestors of the loss are forward; ops that combine a gradient with a parameter or an optimizer
    state of the same shape, and their descendants, are optimizer; the rest is backward. If no output can be a loss, as
    in an inference graph, all are forward.

    Parameters
    ----------
    graph, tensors
        The IR and its shapes.
    loss : str, optional
        Name of the loss value; by default the output called ``loss``, otherwise the only scalar float output.

    Raises
    ------
    UsageError
        There is no value called `loss`.
    ModelError
        There are no ops, or some op is unlabelled and several outputs could be the loss.
    """
    if not graph.ops:
        raise ModelError("the graph has no nodes: there is nothing to plan")
    if loss is not None and loss not in graph.values:
        raise UsageError("{}: there is no value {!r}{}", Setting("loss"), loss, did_you_mean(loss, graph.values))
    if loss is not None and graph.values[loss].kind != NODE:
        raise UsageError("{}: {!r} is an {}, no node makes it", Setting("loss"), loss, graph.values[loss].kind)
    labels = [label_of(op) for op in graph.ops]
    if loss is None and None not in labels:
        phases = [label for label in labels if label is not None]
    else:
        found = loss or find_loss(graph, tensors)
        structure = [FORWARD] * len(graph.ops) if found is None else _by_structure(graph, tensors, found)
        phases = [s if label is None else label for s, label in zip(structure, labels, strict=True)]
    return phases


def note(phases: Sequence[int]) -> tuple[str, ...]:
    """Return a note for a graph without a backward section, nothing for a training step."""
    return () if any(phase != FORWARD for phase in phases) else (_FORWARD_ONLY,)


def label_of(op: Op) -> int | None:
    """Return the phase that a node's metadata states, None if it states none."""
    return LABELS.get(entries(op.node).get("phase", ""))


def find_loss(graph: Graph, tensors: Mapping[str, Tensor]) -> str | None:
    """Return the output that is the loss, None if there is none; raise ModelError if several could be it."""
    outputs = [name for name, value in graph.values.items() if value.is_output]
    if "loss" in outputs:
        return "loss"
    scalars = [n for n in outputs if tensors[n].dtype in _FLOATS and tensors[n].shape in ((), (1,))]
    if len(scalars) <= 1:
        return scalars[0] if scalars else None
    if len(ancestors(graph, scalars)) == len(graph.ops):  # no op depends on them: there is no backward section
        return None
    raise ModelError(
        "several scalar outputs could be the loss ({}): name it with {}",
        ", ".join(scalars[:5]),
        Setting("loss"),
    )


def _by_structure(graph: Graph, tensors: Mapping[str, Tensor], loss: str) -> list[int]:
    forward = ancestors(graph, [loss])
    updated: set[str] = set()
    phases = []
    for op in graph.ops:
        if op.index in forward:
            phases.append(FORWARD)
        elif any(name in updated for name in op.reads) or _is_update(graph, tensors, op):
            updated.update(op.writes)
            phases.append(OPTIMIZER)
        else:
            phases.append(BACKWARD)
    return phases


def ancestors(graph: Graph, names: Sequence[str]) -> set[int]:
    """Return the ops that compute the values in `names`, directly or indirectly."""
    producer = graph.makers
    found: set[int] = set()
    pending = [producer[name] for name in names if name in producer]
    while pending:
        index = pending.pop()
        if index not in found:
            found.add(index)
            pending.extend(producer[name] for name in graph.ops[index].reads if name in producer)
    return found


def _is_update(graph: Graph, tensors: Mapping[str, Tensor], op: Op) -> bool:
    """Whether an op combines a parameter or a state with a value of its shape, towards an output of that shape."""
    if op.node.domain or op.node.op_type not in _UPDATES or not op.outputs[0]:
        return False
    shape = tensors[op.outputs[0]].shape
    return any(n in graph.fed and tensors[n].shape == shape for n in op.reads) and (
        _reaches_output_elementwise(graph, tensors, op)
    )


def _reaches_output_elementwise(graph: Graph, tensors: Mapping[str, Tensor], op: Op) -> bool:
    """Whether the path of first readers from `op` keeps its shape until a graph output."""
    name, shape = op.outputs[0], tensors[op.outputs[0]].shape
    for _ in range(16):  # an update is a few ops: AdamW's longest chain is under ten
        if graph.values[name].is_output:
            return True
        readers = graph.readers[name]
        if not readers:
            return False
        name = graph.ops[readers[0]].outputs[0]
        if not name:  # an optional output that the node leaves out
            return False
        if tensors[name].shape != shape:
            return False
    return False
