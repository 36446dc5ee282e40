"""BatchNormalization in training mode as its parts: the same numbers, on every opset, for CUDA's plans alone."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

from onnx_remat.errors import ModelError
from onnx_remat.ir.batch_norm import OP
from onnx_remat.ir.expand import expand

SHAPES = {"x": (4, 3, 5, 6), **dict.fromkeys("sbmv", (3,))}


def norm(opset: int, kind: str = "float", settings: str = "momentum = 0.7, epsilon = 0.001") -> onnx.ModelProto:
    return parser.parse_model(f"""<ir_version: 8, opset_import: ["" : {opset}]>
        g ({kind}[4, 3, 5, 6] x, float[3] s, float[3] b, float[3] m, float[3] v)
        => ({kind}[4, 3, 5, 6] z, float[3] mean, float[3] var) {{
            [norm] y, mean, var = BatchNormalization <training_mode = 1, {settings}> (x, s, b, m, v)
            z = Relu (y)
        }}""")


@pytest.mark.parametrize("opset", [14, 15, 17, 18, 20])
def test_the_parts_give_what_the_whole_gives(opset):
    runtime = pytest.importorskip("onnxruntime")
    whole = norm(opset)
    parts, _ = expand(whole, {OP})
    onnx.checker.check_model(parts, full_check=True)
    assert not any(a.name == "training_mode" for node in parts.graph.node for a in node.attribute)
    random = np.random.default_rng(0)
    feeds = {name: random.random(shape).astype(np.float32) * 3 for name, shape in SHAPES.items()}
    ran = [runtime.InferenceSession(m.SerializeToString()).run(None, feeds) for m in (whole, parts)]
    for expected, found in zip(*ran, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_statistics_keep_their_own_type():
    """Of opset 15 on, images may be half precision and statistics not."""
    onnx.checker.check_model(expand(norm(15, "float16"), {OP})[0], full_check=True)


def test_for_inference_it_stays_as_it_is():
    given = norm(15, settings="momentum = 0.9")
    given.graph.node[0].attribute[0].i = 0
    assert expand(given, {OP}) == (given, frozenset())


def test_an_unknown_rank_is_refused_by_name():
    given = norm(15)
    given.graph.node.insert(0, onnx.helper.make_node("Secret", ["x"], ["h"], domain="com.example"))
    given.opset_import.add(domain="com.example", version=1)
    given.graph.value_info.append(onnx.helper.make_tensor_value_info("h", onnx.TensorProto.FLOAT, None))
    given.graph.node[1].input[0] = "h"
    with pytest.raises(ModelError, match=r"'norm'.*unknown rank"):
        expand(given, {OP})


def test_squares_of_half_precision_do_not_overflow():
    """As ONNX defines it: statistics are computed in float32. On a CPU, ONNX Runtime does so by itself."""
    parts, _ = expand(norm(15, "float16"), {OP})
    inferred = onnx.shape_inference.infer_shapes(parts, strict_mode=True).graph
    kinds = {value.name: value.type.tensor_type.elem_type for value in inferred.value_info}
    (square,) = (node for node in parts.graph.node if node.op_type == "Mul" and node.input[0] == node.input[1])
    assert kinds[square.output[0]] == onnx.TensorProto.FLOAT
