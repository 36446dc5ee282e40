"""Make a step sum its gradients over several batches."""

from __future__ import annotations

import onnx
from onnx import TensorProto, helper

from onnx_remat.errors import ModelError
from onnx_remat.ir import graph as graphs
from onnx_remat.ir.naming import NEW, WEIGHT, gradients
from onnx_remat.ir.state import rename
from onnx_remat.split.edit import append


def accumulating(step: onnx.ModelProto) -> onnx.ModelProto:
    """Return a step that adds its gradients, times `WEIGHT`, to sums: ``new.grad.<name>`` renews ``grad.<name>``.

    Each gradient is dead as soon as it is added, and one flat buffer can contain all sums.

    Parameters
    ----------
    step : onnx.ModelProto
        A step with outputs ``grad.<name>``, such as `Split.gradients`.

    Raises
    ------
    ModelError
        The step outputs no gradients, or a value already has a name that is needed.

    Examples
    --------
    >>> from onnx_remat.split import split_step
    >>> from sample_models.chain import chain
    >>> summing = accumulating(split_step(chain(2, 16, 8)).gradients)
    >>> [value.name for value in summing.graph.output], summing.graph.input[-1].name
    (['loss', 'new.grad.bias'], 'gradient_weight')
    """
    found = gradients(value.name for value in step.graph.output)
    if not found:
        raise ModelError("the step outputs no gradients: split it first, with onnx-remat split")
    model = onnx.ModelProto()
    model.CopyFrom(step)
    graph, values = model.graph, graphs.build(step).values
    raw = {name: f"one.{name}" for name in found}
    if taken := next((n for n in (WEIGHT, *raw.values(), *(NEW + name for name in found)) if n in values), None):
        raise ModelError(f"the step has a value {taken!r} of its own: rename it")
    kinds = {value.name: value.type.tensor_type.elem_type for value in graph.output}
    rename(graph, raw)
    factors: dict[int, str] = {TensorProto.FLOAT: WEIGHT}
    for value in graph.output:
        name = value.name.removeprefix("one.")
        if name not in found:
            continue
        if (kind := kinds[name]) not in factors:
            factors[kind] = f"{WEIGHT}.{kind}"
            append(graph, "Cast", [WEIGHT], factors[kind], to=kind)
        append(graph, "Mul", [raw[name], factors[kind]], f"weighed.{name}")
        append(graph, "Add", [name, f"weighed.{name}"], NEW + name)
        value.name = NEW + name
        total = onnx.ValueInfoProto(name=name)
        total.type.CopyFrom(value.type)
        graph.input.append(total)
    graph.input.append(helper.make_tensor_value_info(WEIGHT, TensorProto.FLOAT, []))
    return model
