"""State of a step whose outputs have other names than the convention's, see `naming`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import onnx

from onnx_remat.errors import ModelError, UsageError, did_you_mean
from onnx_remat.ir.body import names_in, rename_values
from onnx_remat.ir.model_io import Source
from onnx_remat.ir.naming import NEW


def rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    """Rename values wherever a graph, its nodes and their bodies name them."""
    rename_values(graph.node, names)
    constants = (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer))
    for value in (*graph.input, *graph.output, *graph.value_info, *constants):
        value.name = names.get(value.name, value.name)


def with_state(source: Source, state: Mapping[str, str]) -> Source:
    """Return a step whose state has the names that `training.Loop` knows: the output of each input, ``new.<input>``.

    Parameters
    ----------
    source : Source
    state : mapping of str to str
        For each input the output that is its next value.

    Raises
    ------
    UsageError
        A name is no input, or no output, of the model.
    ModelError
        An output is named twice, or is not computed by a node; the two differ in type or shape; or another value is
        called ``new.<input>``.
    """
    graph = source.model.graph
    inputs, outputs = ({value.name: value for value in values} for values in (graph.input, graph.output))
    made = {name for node in graph.node for name in node.output}
    names: dict[str, str] = {}
    for name, output in state.items():
        for what, each, known in (("input", name, inputs), ("output", output, outputs)):
            if each not in known:
                raise UsageError(f"state {name}={output}: the model has no {what} {each!r}{did_you_mean(each, known)}")
        if output in names:
            raise ModelError(f"state {name}={output}: output {output!r} is already the next value of another input")
        if output not in made:
            raise ModelError(f"state {name}={output}: no node computes output {output!r}; leave this state out")
        if not _may_be_alike(inputs[name], outputs[output]):
            raise ModelError(f"state {name}={output}: the two differ in type or shape")
        names[output] = NEW + name
    used = set(names_in(graph, nodes=False)) - set(names)
    if taken := [new for new in names.values() if new in used]:
        raise ModelError(f"state {taken[0].removeprefix(NEW)}: another value is called {taken[0]!r}; rename it")
    model = onnx.ModelProto()
    model.CopyFrom(source.model)
    rename(model.graph, names)
    return replace(source, model=model)


def _may_be_alike(one: onnx.ValueInfoProto, other: onnx.ValueInfoProto) -> bool:
    """Whether no element type, rank or size that is stated of both values differs."""
    a, b = one.type.tensor_type, other.type.tensor_type
    if 0 != a.elem_type != b.elem_type != 0:
        return False
    if not (a.HasField("shape") and b.HasField("shape")):
        return True
    if len(a.shape.dim) != len(b.shape.dim):
        return False
    pairs = zip(a.shape.dim, b.shape.dim, strict=True)
    return all(x.dim_value == y.dim_value for x, y in pairs if x.HasField("dim_value") and y.HasField("dim_value"))
