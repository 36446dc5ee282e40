"""Forms that avoid known bugs of ONNX Runtime (see `onnx_remat.ort.known_bugs`) and that its devices have kernels
for."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from onnx_remat.ort.known_bugs import miscounts_pads

from .base import Fact, rewrite

_POOLS = ("MaxPool", "AveragePool")
_MANY = 2048  # rows from which a sum over them is split into stages
_FEW = 16  # rows from which a stage pays off
_MOST = 2**15  # entries that one sum may have: its relative error is then about 1e-6
_AXES_ARE_INPUTS = {"ReduceSum": 13, "ReduceMean": 18}
"""First opset in which each reduction takes its axes as an input."""


@rewrite(requires=[Fact.SHAPES], ensures=[Fact.SAFE], breaks=[Fact.LEAN])
def write_safely(model: ir.Model) -> None:
    """Rewrite, in place, products, pools and sums that ONNX Runtime computes wrongly or inexactly.

    A sum over thousands of rows, such as the gradient of a bias, becomes two sums in stages, and so does the sum or
    mean of a large tensor, such as a squared error. ONNX Runtime adds the terms one after another: its mean of 16
    million numbers is off by 0.1 %, torch's by 1e-7. Sums of 16 bits stay whole: their stages would be rounded, and
    overflow, while kernels add in float32.

    A product of a matrix and a vector becomes a product with a column, between two views that cost nothing. A Pad that
    a pool reads states its axes, which prevents their fusion (from opset 18 on); pads that an AveragePool would count
    wrongly become such a Pad. Both rewrites apply even where the pattern of the known bug is absent, because ONNX
    Runtime moves a Transpose past other nodes before it fuses it.
    """
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain:
            continue
        if node.op_type == "MatMul" and _rank(node.inputs[1]) == 1 and _rank(node.inputs[0]) != 1:
            _by_column(model.graph, node)
        elif node.op_type == "Pad" and (model.opset_imports.get("") or 0) >= 18 and _is_pooled(node):
            _state_axes(model.graph, node)
        elif node.op_type == "AveragePool":
            _pad_apart(model.graph, node, model.opset_imports.get("") or 0)
        elif node.op_type == "ConvTranspose":
            _pad_evenly(model.graph, node)
        elif node.op_type in _AXES_ARE_INPUTS and (model.opset_imports.get("") or 0) >= _AXES_ARE_INPUTS[node.op_type]:
            if _is_total(node):
                _total_in_stages(model.graph, node)
            elif node.op_type == "ReduceSum":
                _in_stages(model.graph, node)


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else value.shape.rank()


def _by_column(root: ir.Graph, node: ir.Node) -> None:
    """Rewrite ``a v`` as ``a V`` without its last axis, where V is v as a column."""
    vector, made, last = node.inputs[1], node.outputs[0], _axes(root, [-1])
    assert vector is not None and vector.shape is not None and node.graph is not None
    column = ir.node("Unsqueeze", [vector, last], metadata_props=dict(node.metadata_props))
    column.outputs[0].shape, column.outputs[0].type = ir.Shape([*vector.shape, 1]), vector.type
    narrow = ir.node("Squeeze", [made, last], metadata_props=dict(node.metadata_props))
    name = made.name
    narrow.outputs[0].shape, narrow.outputs[0].type = made.shape, made.type
    for part, suffix in ((column, "column"), (narrow, "product")):
        part.name = f"node.{name}.{suffix}"
    column.outputs[0].name, made.name, narrow.outputs[0].name = f"{name}.vector", f"{name}.column", name
    if made.shape is not None:
        made.shape = ir.Shape([*made.shape, 1])
    made.replace_all_uses_with(narrow.outputs[0], replace_graph_outputs=True)
    narrow.replace_input_with(0, made)
    node.replace_input_with(1, column.outputs[0])
    node.graph.insert_before(node, column)
    node.graph.insert_after(node, narrow)


def _pad_apart(root: ir.Graph, node: ir.Node, opset: int) -> None:
    """Replace pads that an AveragePool counts by a Pad with zeros."""
    pads = list(node.attributes["pads"].as_ints()) if "pads" in node.attributes else []
    counted, rounded_up = (
        name in node.attributes and node.attributes[name].as_int() for name in ("count_include_pad", "ceil_mode")
    )
    x, rank = node.inputs[0], len(pads) // 2
    if rounded_up or x is None or x.shape is None or not miscounts_pads(opset, counted, pads):
        return
    widths, axes = _vector(root, "pads", pads), _axes(root, [axis + 2 for axis in range(rank)])
    pad = ir.node("Pad", [x, widths, None, axes], metadata_props=dict(node.metadata_props))
    more = [0, 0, *(begin + end for begin, end in zip(pads[:rank], pads[rank:], strict=True))]
    sizes = [n + extra if isinstance(n, int) else None for n, extra in zip(x.shape, more, strict=True)]
    pad.name = f"node.{node.outputs[0].name}.padded"
    padded = pad.outputs[0]
    padded.name, padded.type, padded.shape = f"{node.outputs[0].name}.padded", x.type, ir.Shape(sizes)
    del node.attributes["pads"]
    node.replace_input_with(0, padded)
    assert node.graph is not None
    node.graph.insert_before(node, pad)


def _pad_evenly(root: ir.Graph, node: ir.Node) -> None:
    """Replace pads [b, e] by pads [b, b] and a slice that removes the surplus entries at the end."""
    pads = list(node.attributes["pads"].as_ints()) if "pads" in node.attributes else []
    rank = len(pads) // 2
    over = [end - begin for begin, end in zip(pads[:rank], pads[rank:], strict=True)]
    stated = any(name in node.attributes for name in ("auto_pad", "output_padding", "output_shape"))
    if not any(over) or min(over) < 0 or stated:  # no converter writes fewer pads at the end
        return
    made, axes = node.outputs[0], [axis + 2 for axis, more in enumerate(over) if more]
    ends = _vector(root, "ends", [-over[axis - 2] for axis in axes])
    cut = ir.node(
        "Slice", [made, _vector(root, "starts", [0] * len(axes)), ends, _axes(root, axes)],
        metadata_props=dict(node.metadata_props), name=f"node.{made.name}.cut",
    )  # fmt: skip
    cut.outputs[0].shape, cut.outputs[0].type, cut.outputs[0].name = made.shape, made.type, made.name
    made.name = f"{made.name}.whole"
    if made.shape is not None:
        sizes = [n + over[i - 2] if i > 1 and isinstance(n, int) else n for i, n in enumerate(made.shape)]
        made.shape = ir.Shape(sizes) if all(isinstance(n, int) for n in sizes) else None
    node.attributes["pads"] = ir.AttrInt64s("pads", pads[:rank] * 2)
    made.replace_all_uses_with(cut.outputs[0], replace_graph_outputs=True)
    cut.replace_input_with(0, made)
    assert node.graph is not None
    node.graph.insert_after(node, cut)


def _is_total(node: ir.Node) -> bool:
    """Return whether a reduction covers all axes and keeps none of them."""
    x, axes = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    rank = _rank(x)
    if rank is None or "keepdims" not in node.attributes or node.attributes["keepdims"].as_int():
        return False
    if axes is None:
        return "noop_with_empty_axes" not in node.attributes or not node.attributes["noop_with_empty_axes"].as_int()
    known = axes.const_value
    return known is not None and {int(axis) % rank for axis in known.numpy()} == set(range(rank))


def _total_in_stages(root: ir.Graph, node: ir.Node) -> None:
    """Reduce the rows of a matrix with as many entries first; with open axes, the last axes of known size."""
    x = node.inputs[0]
    assert x is not None and x.shape is not None and node.graph is not None
    if x.dtype != ir.DataType.FLOAT:
        return
    sizes = [n if isinstance(n, int) else 0 for n in x.shape]  # 0: open
    parts: list[ir.Node] = []

    def add(op_type: str, second: ir.Value, suffix: str, shape: ir.Shape, **attributes: int) -> ir.Value:
        source = parts[-1].outputs[0] if parts else x
        part = ir.node(op_type, [source, second], attributes, metadata_props=dict(node.metadata_props))
        made = part.outputs[0]
        made.name, made.shape, made.type = f"{node.outputs[0].name}.{suffix}", shape, node.outputs[0].type
        part.name = f"node.{made.name}"
        parts.append(part)
        return made

    if all(sizes):
        count = math.prod(sizes)
        blocks = _blocks(count) if count > _MOST else None
        if blocks is None:
            return
        shape = [blocks, count // blocks]
        add("Reshape", _vector(root, "shape", shape), "rows", ir.Shape(shape))
        rows = add(node.op_type, _axes(root, [1]), "row", ir.Shape([blocks]), keepdims=0)
    else:
        first = len(sizes) - next(i for i, n in enumerate(reversed(sizes)) if not n)
        if math.prod(sizes[first:]) < _FEW:
            return
        wide = _axes(root, list(range(first, len(sizes))))
        rows = add(node.op_type, wide, "row", ir.Shape(x.shape[:first]), keepdims=0)
    node.graph.insert_before(node, parts)
    node.resize_inputs(1)
    node.attributes.pop("noop_with_empty_axes", None)
    node.replace_input_with(0, rows)


def _in_stages(root: ir.Graph, node: ir.Node) -> None:
    """Rewrite a sum over leading axes as a sum of sums over blocks."""
    x, axes = (
        node.inputs[0],
        node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] is not None else None,
    )
    if x is None or axes is None or x.shape is None or not all(isinstance(n, int) for n in x.shape):
        return
    if x.dtype is None or x.dtype.bitwidth == 16:
        return
    sizes = [n for n in x.shape if isinstance(n, int)]
    over = sorted(int(axis) % len(sizes) for axis in axes.numpy())
    keeps = "keepdims" not in node.attributes or node.attributes["keepdims"].as_int()
    count, kept = math.prod(sizes[: len(over)]), sizes[len(over) :]
    blocks = _blocks(count)
    if over != list(range(len(over))) or math.prod(kept) < 2 or blocks is None or (keeps and len(over) > 1):
        return
    shape = [blocks, count // blocks, *kept]
    view = ir.node("Reshape", [x, _vector(root, "shape", shape)], metadata_props=dict(node.metadata_props))
    stage = ir.node(
        "ReduceSum", [view.outputs[0], _axes(root, [1])], {"keepdims": 0}, metadata_props=dict(node.metadata_props)
    )
    for part, suffix, made in ((view, "blocks", shape), (stage, "stage", [blocks, *kept])):
        part.outputs[0].name = f"{node.outputs[0].name}.{suffix}"
        part.outputs[0].shape, part.outputs[0].type = ir.Shape(made), x.type
        part.name = f"node.{part.outputs[0].name}"
    node.replace_input_with(0, stage.outputs[0])
    node.replace_input_with(1, _axes(root, [0]))
    assert node.graph is not None
    node.graph.insert_before(node, [view, stage])


def _blocks(count: int) -> int | None:
    """Return the divisor of a large number that is nearest to its square root; None if there is no suitable one."""
    if count < _MANY:
        return None
    return next((n for n in range(math.isqrt(count), _FEW - 1, -1) if not count % n), None)


def _is_pooled(node: ir.Node) -> bool:
    stated = len(node.inputs) > 3 and node.inputs[3] is not None
    return not stated and any(user.op_type in _POOLS for user, _ in node.outputs[0].uses())


def _state_axes(root: ir.Graph, node: ir.Node) -> None:
    rank = _rank(node.inputs[0])
    if rank is not None:
        node.resize_inputs(4)
        node.replace_input_with(3, _axes(root, list(range(rank))))


def _axes(root: ir.Graph, axes: list[int]) -> ir.Value:
    return _vector(root, "axes", axes)


def _vector(root: ir.Graph, what: str, axes: list[int]) -> ir.Value:
    """Return a constant with these numbers, shared by all its readers."""
    name = f"safe_forms.{what}.{'.'.join(map(str, axes))}"
    known = root.initializers.get(name)
    if known is None:
        known = ir.Value(name=name, const_value=ir.tensor(np.array(axes, np.int64)))
        known.shape, known.type = ir.Shape([len(axes)]), ir.TensorType(ir.DataType.INT64)
        root.register_initializer(known)
    return known
