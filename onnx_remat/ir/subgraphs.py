"""Memory of the bodies of If, Loop and Scan, sized as models of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx
from onnx import TensorProto, helper

from onnx_remat.errors import ModelError
from onnx_remat.ir.body import constant_bytes
from onnx_remat.ir.graph import Op
from onnx_remat.ir.shapes import Tensor

PeakOf = Callable[[onnx.ModelProto], int]
"""Peak in bytes of a model's step, its inputs included."""


def workspace(
    op: Op, model: onnx.ModelProto, tensors: Mapping[str, Tensor], known: Mapping[str, TensorProto], peak_of: PeakOf
) -> int:
    """Return the peak bytes of the bodies of an op while it runs, beyond its own inputs and outputs, without constants.

    A session keeps the constants of bodies from start to end. `known` maps names to small values of the model: shapes
    and axes that a body reads.

    If runs one branch, whose results become the op's. Loop keeps the values carried into an iteration and out of it,
    and every slice of its scan outputs until it joins them at the end. Scan writes slices in place.

    Raises
    ------
    ShapeError, ModelError
        The body's values cannot be sized.
    """
    made = sum(tensors[name].nbytes for name in op.writes)
    captured = sum(tensors[name].nbytes for name in op.captured if name not in known)
    kind, peak = op.node.op_type, 0
    for body in _models(op, model, tensors, known):
        peak = max(peak, peak_of(body) - constant_bytes(body.graph))
    if kind == "Loop":
        carried = len(op.inputs) - 2
        made = sum(tensors[name].nbytes for name in op.outputs[:carried] if name)
        peak += sum(tensors[name].nbytes for name in op.outputs[carried:] if name)
    return max(0, peak - captured - made)


def _models(
    op: Op, model: onnx.ModelProto, tensors: Mapping[str, Tensor], known: Mapping[str, TensorProto]
) -> Iterator[onnx.ModelProto]:
    outer = []
    for name in (name for name in op.captured if name not in known):
        if tensors[name].dtype == TensorProto.UNDEFINED:
            raise ModelError(f"its body reads the sequence {name!r}: read its elements outside of the body")
        outer.append(_value(name, tensors[name].dtype, tensors[name].shape))
    for attribute in op.node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            body = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
            body.graph.CopyFrom(attribute.g)
            del body.graph.input[:]
            given = _given(op, tensors)
            body.graph.input.extend(
                _value(formal.name, *actual) for formal, actual in zip(attribute.g.input, given, strict=False)
            )
            body.graph.input.extend(outer)
            body.graph.initializer.extend(_named(known[name], name) for name in op.captured if name in known)
            yield body


def _given(op: Op, tensors: Mapping[str, Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the types and shapes of a body's arguments, in the order of its inputs."""
    actual = [(tensors[name].dtype, tensors[name].shape) for name in op.inputs if name]
    if op.node.op_type == "Loop":
        carried = [(tensors[name].dtype, tensors[name].shape) for name in op.inputs[2:]]
        return [(TensorProto.INT64, ()), (TensorProto.BOOL, ()), *carried]
    if op.node.op_type == "Scan":
        attributes = {a.name: helper.get_attribute_value(a) for a in op.node.attribute if a.name != "body"}
        count = attributes["num_scan_inputs"]
        axes = attributes.get("scan_input_axes", [0] * count)
        states, scanned = actual[: len(actual) - count], actual[len(actual) - count :]
        slices = [
            (dtype, tuple(size for i, size in enumerate(shape) if i != axis % len(shape)))
            for (dtype, shape), axis in zip(scanned, axes, strict=True)
        ]
        return [*states, *slices]
    return []


def _named(constant: TensorProto, name: str) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(constant)
    copy.name = name
    return copy


def _value(name: str, dtype: int, shape: tuple[int, ...]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)
