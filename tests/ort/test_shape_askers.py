"""What ONNX Runtime knows of the shapes of its own ops."""

from __future__ import annotations

import onnx
import pytest

from onnx_remat.errors import ShapeError
from onnx_remat.ir import graph, shapes
from onnx_remat.ort import runtime
from onnx_remat.ort.shape_askers import SHAPE_ASKERS

BODIES = """u = If(c) <then_branch = a () => (float[8,4] p) {
        t = Tanh(x)
        p = If(c) <then_branch = e () => (float[8,4] f) { t = Exp(x)  f = Tanh(t) },
                   else_branch = h () => (float[8,4] i) { t = Sigmoid(x)  i = Tanh(t) }> },
    else_branch = b () => (float[8,4] s) { s = Sigmoid(x) }>"""
"""What ONNX Runtime writes, but does not load: bodies in bodies with values of one name."""

OWN = {
    "FusedMatMul": ("m = com.microsoft.FusedMatMul<transA = 1>(x, u)", (4, 4)),
    "FusedGemm": ('m = com.microsoft.FusedGemm<transA = 1, activation = "Relu">(x, u, z)', (4, 4)),
    "QuickGelu": ("m = com.microsoft.QuickGelu(u)", (8, 4)),
    "Gelu": ("m = com.microsoft.Gelu(u)", (8, 4)),
    "BiasGelu": ("m = com.microsoft.BiasGelu(u, z)", (8, 4)),
    "two in a row": ("k = com.microsoft.FusedMatMul<transB = 1>(x, u)  m = com.microsoft.FusedMatMul(k, x)", (8, 4)),
}


@pytest.mark.parametrize("bodies", [True, False], ids=["bodies", "no bodies"])
@pytest.mark.parametrize("kind", OWN)
def test_its_own_ops_have_shapes(kind: str, bodies: bool) -> None:
    own, expected = OWN[kind]
    made = BODIES if bodies else "u = Tanh(x)"
    text = f"""<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
        g (float[8,4] x, float[4] z, bool c) => (float y) {{ {made} {own} y = ReduceSum<keepdims = 0>(m) }}"""
    model = onnx.parser.parse_model(text)
    if bodies:
        assert not runtime.infer_shapes(model, ["m"])
    assert shapes.infer(graph.build(model), askers=SHAPE_ASKERS)["m"].shape == expected


def test_a_value_of_the_optimised_graph_is_distinguished_from_one_of_the_file() -> None:
    """Nobody can state the shape of a value that is not in the file, or install what is there."""
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (int64 n) { i = NonZero(x)  n = Size(i) }'
    ir = graph.build(onnx.parser.parse_model(text))
    with pytest.raises(ShapeError, match=r"cannot be inferred: add value_info for it$") as of_file:
        shapes.infer(ir, askers=SHAPE_ASKERS)
    assert "onnxruntime" not in str(of_file.value) and "dims" not in str(of_file.value)
    with pytest.raises(ShapeError, match="cannot be inferred in the graph that ONNX Runtime makes of the file"):
        shapes.infer(ir, derived=True, askers=SHAPE_ASKERS)
