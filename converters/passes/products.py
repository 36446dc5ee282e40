"""Matrix products: without nodes that only rearrange their operands and results, as exporters write them."""

from __future__ import annotations

import onnx_ir as ir

from ..dims import dims, is_static, sizes
from ..values import replace, static
from .chains import RESHAPES, fuse_chain, perm_of, to_reshape

_FLOATS = {ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}


def keep_axes(node: ir.Node) -> None:
    """Multiply batches of matrices with the axes that they had before a reshape to one axis of matrices."""
    if node.domain or node.op_type != "MatMul":
        return
    made, shape = node.outputs[0], sizes(node.outputs[0])
    first, second = (_stack(value) for value in node.inputs)
    if first is None or second is None or shape is None or made.is_graph_output():
        return
    (a, turned_a), (b, turned_b) = first, second
    lead, matrix = dims(a)[:-2], shape[-2:]
    if len(shape) != 3 or lead != dims(b)[:-2] or not is_static(matrix):
        return
    readers = list(made.uses())
    node.replace_input_with(0, _turned(node, a, "a") if turned_a else a)
    node.replace_input_with(1, _turned(node, b, "b") if turned_b else b)
    flat = _follow(node, "Reshape", {}, "flat")
    to_reshape(flat, made, static(made) or (-1, *(int(size) for size in matrix)))
    made.shape = ir.Shape([*lead, *matrix])
    for user, index in readers:
        user.replace_input_with(index, flat.outputs[0])


def _stack(value: ir.Value | None) -> tuple[ir.Value, bool] | None:
    """Return the value of which a batch of matrices is a reshape, and whether the matrices are transposed after it."""
    before = value.producer() if value is not None else None
    turned = before is not None and _turns(before)
    if before is not None and turned:
        value = before.inputs[0]
        before = value.producer() if value is not None else None
    if before is None or before.domain or before.op_type not in RESHAPES:
        return None
    shape, source = sizes(value), sizes(before.inputs[0])
    if shape is None or source is None or before.inputs[0] is None or 0 in source:
        return None
    kept = len(shape) == 3 and len(source) > 3 and shape[-2:] == source[-2:]  # so the rest has become one axis
    return (before.inputs[0], turned) if kept else None


def _turned(node: ir.Node, value: ir.Value, operand: str) -> ir.Value:
    """Insert the transpose of each matrix of an operand of a node before it."""
    shape = dims(value)
    axes = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    turn = ir.node("Transpose", [value], {"perm": axes}, metadata_props=dict(node.metadata_props))
    made = turn.outputs[0]
    made.name = f"{node.outputs[0].name}.{operand}.turned"
    turn.name = f"node.{made.name}"
    made.shape, made.type = ir.Shape([shape[axis] for axis in axes]), value.type
    assert node.graph is not None
    node.graph.insert_before(node, turn)
    return made


def _follow(node: ir.Node, op_type: str, attributes: dict[str, ir.Attr], name: str) -> ir.Node:
    """Insert a node that reads the output of another after that; its output has the same shape and type."""
    made = node.outputs[0]
    new = ir.node(op_type, [made], metadata_props=dict(node.metadata_props))
    new.attributes.update(attributes)
    new.name, new.outputs[0].name = f"node.{made.name}.{name}", f"{made.name}.{name}"
    new.outputs[0].shape, new.outputs[0].type = made.shape, made.type
    assert node.graph is not None
    node.graph.insert_after(node, new)
    return new


def scale_first(node: ir.Node) -> None:
    """Multiply by a number before a transpose of matrices, not after it: a product can include the transpose then."""
    scaled, made = _scaled(node), node.outputs[0]
    before = scaled.producer() if scaled is not None else None
    source = before.inputs[0] if before is not None and _turns(before) else None
    if scaled is None or before is None or source is None or made.is_graph_output():
        return
    if all((user.op_type == "MatMul" or _turns(user)) and user.graph is node.graph for user, _ in made.uses()):
        readers = list(made.uses())
        node.replace_input_with(list(node.inputs).index(scaled), source)
        turn = _follow(node, "Transpose", dict(before.attributes), "turned")
        made.shape = ir.Shape(dims(source))
        for user, slot in readers:
            user.replace_input_with(slot, turn.outputs[0])
            fuse_chain(user)


def turn_batch(node: ir.Node) -> None:
    """Replace transposed products of matrices, of which one is itself transposed, by products in the opposite order."""
    if not _turns(node):
        return
    scales: list[ir.Node] = []
    made = node.inputs[0]
    while made is not None and len(made.uses()) == 1 and not made.is_graph_output():
        before = made.producer()
        if before is None or before.domain:
            return
        if before.op_type == "MatMul":
            break
        made = _scaled(before)
        scales.append(before)
    else:
        return
    a, b = before.inputs
    if a is None or b is None or sizes(a) is None or sizes(b) is None or len(dims(a)) != len(dims(b)):
        return
    if not any(maker is not None and _turns(maker) for maker in (a.producer(), b.producer())):
        return
    before.replace_input_with(0, _turned(before, b, "second"))
    before.replace_input_with(1, _turned(before, a, "first"))
    for operand in before.inputs:
        turn = operand.producer() if operand is not None else None
        assert turn is not None
        fuse_chain(turn)
    for each in (before, *scales):
        each.outputs[0].shape = node.outputs[0].shape
    replace(node.outputs[0], (scales or [before])[0].outputs[0])


def _scaled(node: ir.Node) -> ir.Value | None:
    """Return the value that a node multiplies or divides by a number; None if it does something else."""
    if node.domain or node.op_type not in ("Mul", "Div"):
        return None
    a, b = node.inputs
    if static(b) == ():
        return a
    return b if node.op_type == "Mul" and static(a) == () else None


def _turns(node: ir.Node) -> bool:
    """Return whether a node transposes each matrix of a batch, or one matrix, of known shape."""
    if node.domain or node.op_type != "Transpose" or sizes(node.inputs[0]) is None:
        return False
    perm = perm_of(node) or []
    return len(perm) >= 2 and perm == [*range(len(perm) - 2), len(perm) - 1, len(perm) - 2]


def absorb_batch(node: ir.Node) -> None:
    """Remove the repetition of a matrix before a MatMul, which multiplies one matrix by a batch of matrices.

    A vector has no batch: its product with one matrix lacks the axes of the repetition.
    """
    if node.domain or node.op_type != "MatMul":
        return
    result = static(node.outputs[0])
    for index, value in enumerate(node.inputs):
        other = static(node.inputs[1 - index])
        if result is None or other is None or len(other) < 2 or other[:-2] != result[:-2] or value is None:
            continue
        if (found := _repeated(value)) is None:
            continue
        single, turned = found
        node.replace_input_with(index, _turned(node, single, f"single.{index}") if turned else single)


def _repeated(value: ir.Value) -> tuple[ir.Value, bool] | None:
    """Return the matrix that a batch repeats, and whether the batch has it transposed; None for any other batch."""
    turned = False
    while (before := value.producer()) is not None and before.inputs and before.inputs[0] is not None:
        source, shape = before.inputs[0], static(value)
        of_source = static(source)
        if shape is None or of_source is None or len(shape) < 3 or len(of_source) < 2:
            return None
        if _turns(before):
            turned = not turned
        elif before.op_type not in ("Reshape", "Expand") or of_source[-2:] != shape[-2:]:
            return None
        elif before.op_type == "Expand":
            return (source, turned) if len(of_source) == 2 else None
        value = source
    return None


def absorb_transpose(node: ir.Node) -> None:
    """Replace a product with transposed operands by a Gemm with transA, transB."""
    if node.domain or node.op_type not in ("MatMul", "Gemm") or node.outputs[0].dtype not in _FLOATS:
        return
    if any(v is None or v.shape is None or v.shape.rank() != 2 for v in node.inputs[:2]):
        return
    for index, flag in enumerate(("transA", "transB")):
        value = node.inputs[index]
        before = value.producer() if value is not None else None
        if before is not None and before.op_type == "Transpose" and perm_of(before) == [1, 0]:
            turned = node.attributes[flag].as_int() if flag in node.attributes else 0
            node.op_type = "Gemm"
            node.attributes[flag] = ir.AttrInt64(flag, 1 - turned)
            node.replace_input_with(index, before.inputs[0])


def turn_product(node: ir.Node) -> None:
    """Replace a transposed product of two matrices by the product of their transposes in the opposite order."""
    if node.domain or node.op_type != "Transpose" or node.inputs[0] is None:
        return
    before = node.inputs[0].producer()
    if before is None or before.domain or before.op_type not in ("MatMul", "Gemm") or len(before.inputs) != 2:
        return
    if perm_of(node) != [1, 0] or len(node.inputs[0].uses()) > 1 or node.inputs[0].is_graph_output():
        return
    if any(v is None or v.shape is None or v.shape.rank() != 2 or v.dtype not in _FLOATS for v in before.inputs):
        return
    turned = [before.attributes[flag].as_int() if flag in before.attributes else 0 for flag in ("transB", "transA")]
    scale = before.attributes.get("alpha")
    a, b = before.inputs
    node.op_type = "Gemm"
    node.attributes.clear()
    for flag, was in zip(("transA", "transB"), turned, strict=True):
        node.attributes[flag] = ir.AttrInt64(flag, 1 - was)
    if scale is not None:
        node.attributes["alpha"] = scale
    node.resize_inputs(2)
    node.replace_input_with(0, b)
    node.replace_input_with(1, a)
