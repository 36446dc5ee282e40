"""Find the cut: one value per parameter, such that the update depends on the batch only through these values.

References
----------
Ford & Fulkerson, "Maximal flow through a network", Canadian Journal of Mathematics 8 (1956).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ortools.graph.python import max_flow

from onnx_remat.errors import ModelError
from onnx_remat.ir.naming import NEW, gradients, renewals
from onnx_remat.ir.op_semantics import is_elementwise
from onnx_remat.split.whole import StepParts, labelled

_WHOLE = 10**9
"""Capacity of arcs that must not be cut."""

_LINEAR = ("Where", "Mul", "Div", "Add", "Sub", "Neg", "Identity")


def find_cut(step: StepParts) -> dict[str, str]:
    """Return the gradient of every parameter that has one: a minimum cut between forward pass and new parameters."""
    known = step.known_to()
    trained = step.trained(known)
    if not trained:
        raise ModelError(_nothing_to_split(step))
    able = {name: _candidates(step, name, output, known) for name, output in trained.items()}
    near = _nearest_cut(step, known, set().union(*able.values()), list(trained.values()))
    cut: dict[str, str] = {}
    for name, output in trained.items():
        found = [value for value in near if value in able[name]]
        if len(found) > 1 or output in found:
            raise ModelError(
                f"the step cannot be split: the update of {name!r} reads more of the batch than one gradient, by "
                f"{step.label(found[-1])}; export it without an optimizer"
            )
        if found:
            cut[name] = _with_the_backward_pass(step, found[0], known, able[name])
    return cut


def _with_the_backward_pass(step: StepParts, value: str, known: Collection[str], able: Collection[str]) -> str:
    """Move a gradient down to the last value that depends on it alone, by ops labelled as backward pass.

    Such ops mask rows that get no gradient, or add terms of the loss that depend on parameters only.
    """
    while True:
        readers = [op for op in step.graph.ops if value in op.reads] if value not in step.renews else []
        if len(readers) != 1 or not labelled(readers[0], "backward") or readers[0].node.op_type not in _LINEAR:
            return value
        op = readers[0]
        if sum(name in known for name in op.reads) != 1 or op.writes[0] not in able:
            return value
        value = op.writes[0]


def _nothing_to_split(step: StepParts) -> str:
    outputs = [value.name for value in step.graph.model.graph.output]
    if found := gradients(outputs):
        return (
            f"the step already ends at gradients ({next(iter(found))!r}) and has no update to split off: export it "
            "with an optimizer, or use the framework's optimizer for the update"
        )
    inputs = {value.name for value in step.graph.model.graph.input}
    defaults = [tensor.name for tensor in step.graph.model.graph.initializer if tensor.name in inputs]
    for output, name in renewals(defaults, outputs).items():
        return (
            f"the step cannot be split: input {name!r}, which {output!r} renews, has a default value: remove its "
            "initializer"
        )
    return f"the step cannot be split: no output {NEW}<name> renews an input <name> by a gradient of {step.loss!r}"


def _candidates(step: StepParts, name: str, output: str, known: Collection[str]) -> set[str]:
    """Return the values that may be a parameter's gradient: those from which elementwise ops compute its new value.

    All values in between have the parameter's type and shape. Ops labelled as optimizer need not be elementwise.
    """
    wanted = step.tensors[name]
    found, pending = {output}, [output]
    while pending:
        op = step.graph.ops[step.maker[pending.pop()]]
        if not is_elementwise(op.node.domain, op.node.op_type) and not labelled(op, "optimizer"):
            continue
        for read in op.reads:
            index, tensor = step.maker.get(read, -1), step.tensors[read]
            if read in found or read not in known or index < 0 or index in step.forward:
                continue
            if (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape):
                found.add(read)
                pending.append(read)
    return found


def _nearest_cut(step: StepParts, known: Collection[str], able: Collection[str], ends: Sequence[str]) -> list[str]:
    """Return a minimum set of values in `able` on all paths from the batch to `ends`, the nearest to the batch."""
    ops = [op for op in step.graph.ops if op.index not in step.forward]
    values = [name for op in ops for name in op.writes if name in known]
    number = {name: 2 + 2 * i for i, name in enumerate(values)}  # producer's vertex; readers': plus one
    flow = max_flow.SimpleMaxFlow()
    for op in ops:
        for read in dict.fromkeys(name for name in op.reads if name in known):
            tail = number[read] + 1 if read in number else 0
            for name in op.writes:
                flow.add_arc_with_capacity(tail, number[name], _WHOLE)
    for name, vertex in number.items():
        flow.add_arc_with_capacity(vertex, vertex + 1, 1 if name in able else _WHOLE)
    for name in ends:
        flow.add_arc_with_capacity(number[name] + 1, 1, _WHOLE)
    flow.solve(0, 1)
    near = set(map(int, flow.get_source_side_min_cut()))
    return [name for name, vertex in number.items() if vertex in near and vertex + 1 not in near]
