"""Time of every node of a step, by a device's roofline or a profile."""

from __future__ import annotations

from onnx_remat.ort.kernels import costs as prices
from onnx_remat.ort.moves import DOWN, UP
from onnx_remat.session import biases, windows
from onnx_remat.session.copies import Stated, kind_of
from onnx_remat.session.lean_graph import LeanNode
from onnx_remat.session.slab_layout import SlabLayout, op_of


def node_seconds(arranged: SlabLayout, costs: str = "") -> list[float]:
    """Return the time of each node in its order; `costs` as in `Options`.

    A fused kernel takes the time of its members, scaled by the ratio of its roofline to the sum of theirs: it neither
    writes nor reads the values that are produced and consumed inside it, and it is launched once. A copy to the host or
    back on the stream of the kernels takes what the file's link takes for it; one alongside them takes none of theirs.
    A product in place of several (`windows`) takes the time of all of them.
    """
    compiled, tensors, link = arranged.compiled, arranged.compiled.tensors, Stated.of(arranged.compiled.graph.model)
    name = costs or compiled.kernels.costs
    device = prices.PRESETS.get(name, prices.PRESETS["cpu"])
    seconds = prices.price(compiled.graph, tensors, compiled.kernels, name)
    maker = {name: op for op in compiled.graph.ops for name in op.writes}
    known = {**tensors, **{name: t for name, t in arranged.program.tensors.items() if windows.are_columns(name)}}
    found = []
    for step in arranged.program.steps:
        if kind_of(step.node) is not None:
            found.append(0.0)
        elif step.node.op_type in (DOWN, UP) and link is not None:
            found.append(link.seconds(tensors[step.node.input[0]].nbytes))
        elif step.plain is None:
            op = op_of(maker, step)
            found.append(seconds[op.index] * _products(arranged, step) if op is not None else 0.0)
        else:
            members = [op for member in arranged.members[step.writes[0]] if (op := op_of(maker, member)) is not None]
            apart = sum(prices.roofline(op, tensors, compiled.kernels, device) for op in members)
            names = [name if name in known else biases.result_of(name) for name in (*step.reads, *step.writes)]
            ends = [name for name in names if name in known]  # without scratch memory
            together = prices.fused(members, ends, known, device)
            found.append(sum(seconds[op.index] for op in members) * together / apart if members else together)
    return found


def _products(arranged: SlabLayout, step: LeanNode) -> float:
    """Return the number of products of a step that a node computes in one."""
    made, tensors = step.writes[0], arranged.compiled.tensors
    whole = tensors.get(biases.result_of(made)) if made not in tensors else None
    return arranged.program.tensors[made].nbytes / whole.nbytes if whole is not None and whole.nbytes else 1
