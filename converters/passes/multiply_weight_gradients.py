"""Weight gradients of convolutions, which frameworks write as convolutions, as matrix products."""

from __future__ import annotations

import onnx_ir as ir

from ..convolutions import Geometry, by_entry, weight_gradient_by_entry
from ..dims import dims, is_static
from ..tape import Tape
from ..values import replace
from .base import Fact, rewrite
from .sums import read_once


@rewrite(requires=[Fact.SHAPES], breaks=[Fact.LEAN])
def multiply_weight_gradients(model: ir.Model) -> None:
    """Rewrite, in place, backward convolutions whose kernel is as large as an image as one product per result entry.

    Such a convolution correlates the input of a forward convolution with the gradient of its output; batch and channels
    are swapped in both. ONNX Runtime takes two to ten times as long for it as for the products (see
    `convolutions.weight_gradient`). Where strides leave entries of the input unread, the result extends beyond the
    window and its reader slices the rest off; the products do not compute that rest. `simplify` removes the Transposes.
    """
    tape = Tape(model.graph)
    for node in list(model.graph):
        if node.op_type != "Conv" or node.domain or node.metadata_props.get("phase") != "backward":
            continue
        x, g, *bias = node.inputs
        if bias or any(value is None or value.shape is None for value in (x, g, *node.outputs)):
            continue
        assert x is not None and g is not None
        made, kernel = _window(node.outputs[0])
        how = _geometry(node, kernel)
        swapped = [1, 0, *range(2, 2 + len(kernel))]
        inside, outside = dims(x)[0], dims(g)[0]
        if not (isinstance(inside, int) and isinstance(outside, int)):
            continue
        shape = (outside, inside, *kernel)
        is_window = all(n == 1 for n in dims(g)[2:])  # of the gradient of a convolution's images
        if how is None or is_window or not by_entry(dims(x)[2:] + dims(g)[2:], shape, how):
            continue
        with tape.ahead_of(node, "backward"):
            product = weight_gradient_by_entry(tape, tape.transpose(x, swapped), tape.transpose(g, swapped), shape, how)
            replace(made, tape.transpose(product, swapped))


def _window(value: ir.Value) -> tuple[ir.Value, tuple[int, ...]]:
    """Follow the Slices that cut off the end of a value's spatial axes; return the last result and its spatial
    sizes."""
    while read_once(value):
        ((reader, _),) = value.uses()
        if reader.op_type != "Slice" or len(reader.inputs) < 4:
            break
        starts, _, axes, *steps = (v.const_value if v is not None else None for v in reader.inputs[1:])
        if starts is None or axes is None or any(s is None or (s.numpy() != 1).any() for s in steps):
            break
        if starts.numpy().any() or any(axis < 2 for axis in axes.numpy()):
            break
        value = reader.outputs[0]
    found = dims(value)[2:]
    return value, tuple(d for d in found if isinstance(d, int)) if is_static(found) else ()


def _geometry(node: ir.Node, kernel: tuple[int, ...]) -> Geometry | None:
    """Return the geometry of the convolution whose weight gradient a node is: strides and dilations are swapped."""
    rank = len(kernel)
    known = {name: attribute.value for name, attribute in node.attributes.items()}
    if not rank or known.get("group", 1) != 1 or known.get("auto_pad", "NOTSET") != "NOTSET":
        return None
    ones, pads = [1] * rank, list(known.get("pads") or [0] * (2 * rank))
    strides, dilations = (known.get(name) or ones for name in ("dilations", "strides"))
    return Geometry(kernel, tuple(strides), tuple(dilations), tuple(pads[:rank]), tuple(pads[rank:]))
