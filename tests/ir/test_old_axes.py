"""Axes of opsets before 11: counted from the end by ONNX Runtime, left out by ONNX's inference."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser
from onnx_remat.converters.autodiff import add_backward

from onnx_remat import ModelError, Session, rewrite_model
from onnx_remat.ir.model_io import load

FORMS = {
    "unsqueeze": ("q = Relu(x) y = Unsqueeze<axes=[-2]>(q) m = Mul(y, w)", (3, 5), (3, 1, 5)),
    "squeeze": ("q = Relu(x) y = Squeeze<axes=[-1]>(q) m = Mul(y, w)", (3, 3, 1), (3, 3)),
    "both, one after the other": (
        "q = Relu(x) a = Unsqueeze<axes=[-1, 0]>(q) b = Exp(a) y = Squeeze<axes=[-4, -1]>(b) m = Mul(y, w)",
        (3, 4), (4,),
    ),
    "in a body": (
        "yes = Constant<value=bool[1] {1}>() q = Relu(x) y = If(yes)<then_branch = t () => (float[3,1,5] r)"
        "{ k = Exp(q) r = Unsqueeze<axes=[-2]>(k) }, else_branch = e () => (float[3,1,5] r2)"
        "{ l = Neg(q) r2 = Unsqueeze<axes=[-2]>(l) }> m = Mul(y, w)", (3, 5), (3, 1, 5),
    ),
}  # fmt: skip


def _model(form: str, opset: int, states: str = "") -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    body, x, w = FORMS[form]
    shapes = [",".join(map(str, shape)) for shape in (x, w)]
    model = parser.parse_model(
        f'<ir_version: 6, opset_import: ["" : {opset}]> g (float[{shapes[0]}] x, float[{shapes[1]}] w) => (float loss) '
        f"{states} {{ {body} s = Mul(m, m) loss = ReduceSum<keepdims=0>(s) }}"
    )
    draws = np.random.default_rng(0)
    return model, {"x": draws.standard_normal(x).astype("f"), "w": draws.standard_normal(w).astype("f")}


def _stock(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    return ort.InferenceSession(model.SerializeToString()).run(["loss"], feeds)[0]


@pytest.mark.parametrize("opset", [7, 9, 10])
@pytest.mark.parametrize("form", FORMS)
def test_fused_sessions_and_rewritten_files_compute_what_stock_onnx_runtime_does(form: str, opset: int) -> None:
    model, feeds = _model(form, opset)
    expected = _stock(model, feeds)
    np.testing.assert_allclose(Session(model).run(feeds)["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(_stock(rewrite_model(model, "100%").model, feeds), expected, rtol=1e-5)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "in a body"])
def test_the_backward_part_is_that_of_the_forward_graph(form: str) -> None:
    model, feeds = _model(form, 9)
    np.testing.assert_allclose(_stock(add_backward(model, wrt=["x"]), feeds), _stock(model, feeds), rtol=1e-5)


def test_types_that_onnx_itself_stated_wrongly_are_not_believed() -> None:
    model, feeds = _model("unsqueeze", 9, "<float[3,5] y, float[3,3,5] m>")
    np.testing.assert_allclose(Session(model).run(feeds)["loss"], _stock(model, feeds), rtol=1e-5)
    assert [value.name for value in load(model).model.graph.value_info] == []


def test_a_model_without_such_axes_is_not_copied() -> None:
    model, _ = _model("unsqueeze", 11)
    assert load(model).model is model


def test_a_node_whose_rank_nobody_knows_is_named() -> None:
    model = parser.parse_model(
        '<ir_version: 6, opset_import: ["" : 9]> g (float[2,3] x, int64[N] shape) => (float[M] y) '
        "{ r = Reshape(x, shape) y = Squeeze<axes=[-1]>(r) }"
    )
    with pytest.raises(ModelError, match=r"node 'y' \(Squeeze\) counts axes from the end.*'r'.*add value_info"):
        load(model)
