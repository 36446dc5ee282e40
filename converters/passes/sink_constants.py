"""Compute large constants of the backward pass after the loss, not when the file is loaded."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from ..dims import dims, is_static
from ..values import constant
from .after_loss import AfterLoss
from .base import Fact, rewrite

_LARGE = 4096
"""Elements of the largest constant that may stay allocated for the whole session."""
_ADDED = {
    ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.INT32,
    ir.DataType.INT64,
}  # fmt: skip
"""Types that ONNX Runtime adds; of the others, only zeros are computed during the run."""


@rewrite(requires=[Fact.SHAPES], ensures=[Fact.LATE], breaks=[Fact.STATED])
def sink_constants(model: ir.Model) -> None:
    """Compute large constants of the backward pass during the run, so that ONNX Runtime can free them.

    Such a constant is one number, repeated. ONNX Runtime's default optimisations fold every node that depends on no
    input when they load the file, and the result stays allocated as long as the session. An example is the zeros to
    which the gradients of an embedding are added: they are as large as the embedding.
    """
    after = AfterLoss(model.graph)
    tape, made = after.tape, dict[tuple[ir.DataType, bytes], ir.Value]()
    for node in filter(_is_large, after.nodes):
        fill, dtype = _fill(node), node.outputs[0].dtype
        assert dtype is not None
        if fill and dtype not in _ADDED:
            continue
        key, never = (dtype, fill.tobytes()), after.never()
        if key not in made:
            with tape.ahead_of(after.nodes[0], "backward"):
                number = tape.cast(never, dtype)
                made[key] = number if not fill else tape.add(number, tape.constant(fill))
        wanted = tuple(int(d) for d in dims(node.outputs[0]))
        given = constant(node.inputs[1]) if node.op_type == "Expand" else None
        # An Expand keeps leading axes of its input that its shape does not state; the number here has none.
        shape = node.inputs[1] if given is not None and tuple(given) == wanted else tape.ints(*wanted)
        node.op_type = "Expand"
        node.attributes.clear()
        node.resize_inputs(2)
        node.replace_input_with(0, made[key])
        node.replace_input_with(1, shape)


def _is_large(node: ir.Node) -> bool:
    """Return whether a node repeats one number into a large value of static shape."""
    if node.domain or node.op_type not in ("Expand", "ConstantOfShape") or node.outputs[0].shape is None:
        return False
    shape, source = dims(node.outputs[0]), node.inputs[0]
    if not is_static(shape) or math.prod(int(d) for d in shape) <= _LARGE or source is None:
        return False
    target = node.inputs[1] if node.op_type == "Expand" else source
    fixed = target is not None and target.const_value is not None and not target.is_graph_input()
    if node.op_type == "ConstantOfShape":
        return fixed
    known = source.const_value if not source.is_graph_input() else None
    return fixed and known is not None and known.size == 1


def _fill(node: ir.Node) -> np.generic:
    """Return the repeated number."""
    if node.op_type == "Expand":
        assert node.inputs[0] is not None and node.inputs[0].const_value is not None
        value = node.inputs[0].const_value.numpy()
    else:
        value = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, np.float32)
    return value.reshape(-1)[0]  # type: ignore[no-any-return]
