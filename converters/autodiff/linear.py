"""Linear layers of sequences as Gemm: transposed weights, product and bias in one node."""

from __future__ import annotations

import onnx_ir as ir

from ..dims import dims
from ..tape import Tape
from ..values import replace


def into_gemm(t: Tape, graph: ir.Graph) -> None:
    """Rewrite, in place, a MatMul by a transposed matrix, or with a bias, as a Gemm of rows."""
    for node in list(graph):
        if node.op_type != "MatMul" or node.domain:
            continue
        x, w = node.inputs
        if (
            x is None
            or w is None
            or x.dtype is None
            or not x.dtype.is_floating_point()
            or x.shape is None
            or w.shape is None
            or len(dims(w)) != 2
            or len(dims(x)) < 2
        ):
            continue
        lead, outside = dims(x)[:-1], dims(w)[1]
        if len([d for d in lead if isinstance(d, str)]) > 1:
            continue
        turned = w.producer()
        transposed = turned is not None and turned.op_type == "Transpose" and not turned.domain
        last, bias = _bias(node, (outside,))
        if not transposed and bias is None:
            continue
        weights = turned.inputs[0] if transposed and turned is not None else w
        with t.ahead_of(last):
            rows = t.reshape(x, (t.product(lead), dims(x)[-1]))
            given = (rows, weights) if bias is None else (rows, weights, bias)
            made = t.op("Gemm", *given, shape=(t.product(lead), outside), transB=int(transposed))
            made = t.reshape(made, (*lead, outside))
        replace(last.outputs[0], made)


def _bias(product: ir.Node, shape: tuple[int | str, ...]) -> tuple[ir.Node, ir.Value | None]:
    """Return the node that adds a vector to a product, and the vector; or the product and None."""
    made = product.outputs[0]
    users = list(made.uses())
    if len(users) == 1 and users[0].node.op_type == "Add" and not made.is_graph_output():
        reader = users[0].node
        for value in reader.inputs:
            if value is not made and value is not None and value.shape is not None and dims(value) == shape:
                return reader, value
    return product, None
