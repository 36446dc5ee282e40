"""Half-precision values that ONNX Runtime's CPU provider may or may not round, depending on who reads them.

An op without a half kernel runs as Cast -> float kernel -> Cast. Where the file itself has a Cast next to it, the
runtime takes both Casts out, optimisations off or on, and with them the rounding::

    file          x32 -> Cast16 -> Tanh -> Cast32            as it runs    x32 -> Tanh
    with a node   x32 -> Cast16 -> Unsqueeze -> Tanh         as it runs    x32 -> Cast16 -> Unsqueeze -> Cast32 -> Tanh

Any node in between, and any second reader, brings the rounding back. The result is right in either case, and equal
within rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import TensorProto

from onnx_remat.ir.graph import Graph
from onnx_remat.ir.shapes import Tensor

_MOVERS = frozenset(
    {
        "Concat", "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "Reshape",
        "Shape", "Size", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Ops that move data and take every type: of all others some version of the runtime has no half kernel."""


def rounded_at_will(graph: Graph, tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Half-precision values between a Cast and an op that may have no half kernel.

    Parameters
    ----------
    graph, tensors
        The original and its shapes.

    Examples
    --------
    >>> import onnx
    >>> from onnx_remat.ir import graph, shapes
    >>> text = '''<ir_version: 9, opset_import: ["" : 20]> g (float[4] x) => (float[4] y) {
    ...     h = Cast <to = 10> (x)
    ...     t = Tanh (h)
    ...     u = Concat <axis = 0> (t)
    ...     y = Cast <to = 1> (u) }'''
    >>> ir = graph.build(onnx.parser.parse_model(text))
    >>> sorted(rounded_at_will(ir, shapes.infer(ir, {})))
    ['h']
    """
    readers = graph.consumers()
    found = []
    for op in graph.ops:
        for name in op.writes:
            if tensors[name].dtype != TensorProto.FLOAT16:
                continue
            ends = [(op.node.op_type, graph.ops[reader].node.op_type) for reader in readers[name]]
            if any("Cast" in pair and _MOVERS.isdisjoint(pair) for pair in ends):
                found.append(name)
    return frozenset(found)
