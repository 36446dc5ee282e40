"""Steps under ONNX Runtime's default optimisations: written so that these are right, and refused where they are not."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx_remat.converters.autodiff import add_backward
from onnx_remat.converters.checks import default_level
from onnx_remat.converters.passes import order

from onnx_remat.errors import ConversionError
from onnx_remat.ort import known_bugs, runtime


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 20]> g {text}')


PRODUCT = "(float[5, 5] w, float[5] v) => (float[5] y) { t = Transpose (w)  y = MatMul (t, v) }"
SCALED = (
    "(float[5, 5] w, float[5] v) => (float[5] y) <float two = {2.0}> "
    "{ t = Transpose (w)  s = Mul (t, two)  y = MatMul (s, v) }"
)
BATCHES = (
    "(float[2, 5, 5] w, float[5] v) => (float[2, 5] y) { t = Transpose <perm = [0, 2, 1]> (w)  y = MatMul (t, v) }"
)
SYMBOLIC = '(float["n", 5] w, float["n"] v) => (float[5] y) { t = Transpose (w)  y = MatMul (t, v) }'
INSIDE = (
    "(bool c, float[5, 5] w, float[5] v) => (float[5] y) { y = If (c) <"
    "then_branch = t () => (float[5] a) { s = Transpose (w)  a = MatMul (s, v) },"
    "else_branch = e () => (float[5] b) { b = Neg (v) }> }"
)
POOL = (
    "(float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y) <int64[8] p = {0, 0, 1, 1, 0, 0, 1, 1}> "
    "{ q = Pad (x, p)  y = MaxPool <kernel_shape = [3, 3]> (q) }"
)


def feeds_of(made: onnx.ModelProto) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {v.name: [d.dim_value or 5 for d in v.type.tensor_type.shape.dim] for v in made.graph.input}
    return {n: np.array(True) if n == "c" else -rng.uniform(1, 2, s).astype(np.float32) for n, s in shapes.items()}


MENDED = {POOL: (1, 32)}  # the first version of ONNX Runtime that computes it rightly


def refused(text: str, why: str) -> AbstractContextManager[object]:
    """What this version of ONNX Runtime breaks is refused, what it has mended is not."""
    version = tuple(int(part) for part in onnxruntime.__version__.split(".")[:2])
    return nullcontext() if version >= MENDED.get(text, (99,)) else pytest.raises(ConversionError, match=why)


@pytest.mark.parametrize("text", [PRODUCT, SCALED, BATCHES, SYMBOLIC, INSIDE, POOL])
def test_what_optimisations_break_is_refused_as_it_is_and_right_once_simplified(text):
    source = model(text)
    feeds = feeds_of(source)
    expected = runtime.outputs(source, feeds)
    assert known_bugs.find(source)
    with refused(text, r"computes this step wrongly .*: y differs by .* node '[ay]' "):
        default_level.compare(source, feeds, expected)
    simple = ir.from_proto(source)
    order.FORWARD.run(simple)
    made = ir.to_proto(simple)
    onnx.checker.check_model(made, full_check=True)
    assert known_bugs.find(made) == ()
    np.testing.assert_allclose(runtime.outputs(made, feeds)["y"], expected["y"], rtol=1e-6)
    default_level.compare(made, feeds, runtime.outputs(made, feeds))


UPDATE = """(float[4] w, float[4, 2, 4, 4] x) => (float loss, float[4] "new.w")
    <int64[8] p = {0, 0, 1, 1, 0, 0, 1, 1}, float lr = {1e-4}> {
        q = Pad (x, p)
        m = MaxPool <kernel_shape = [3, 3]> (q)
        loss = ReduceSum <keepdims = 0> (w)
        a = Constant <value_ints = [1, 2, 3]> ()
        g = ReduceSum <keepdims = 0> (m, a)
        s = Mul (g, lr)
        "new.w" = Sub (w, s)
    }"""


def test_a_change_counts_however_small_it_is_next_to_the_parameter(monkeypatch):
    made = model(UPDATE.replace('"new.w"', "new_w").replace("float[4] w", "float[4] w", 1))
    made.graph.output[1].name = made.graph.node[-1].output[0] = "new.w"
    feeds = feeds_of(made) | {"w": np.full(4, 100, np.float32)}
    plain, truly = runtime.outputs(made, feeds), runtime.outputs
    if np.array_equal(plain["new.w"], truly(made, feeds, "all")["new.w"]):  # 1.32 has mended that fusion: put it back
        wrong = {"all": np.float32(2e-5)}
        monkeypatch.setattr(
            default_level.runtime, "outputs",
            lambda model, feeds, level="disable": {
                name: value * (1 + wrong.get(level, 0)) if name == "new.w" else value
                for name, value in truly(model, feeds, level).items()
            },
        )  # fmt: skip
    default = runtime.outputs(made, feeds, "all")
    assert 0 < np.abs(plain["new.w"] / default["new.w"] - 1).max() < 1e-4  # within tolerance by itself
    with pytest.raises(ConversionError, match=r"new\.w differs"):
        default_level.compare(made, feeds, plain)


def difference(product: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A product less its own value: nothing is left of it but rounding."""
    made = model(
        "(float[64, 64] a, float[64] b, float[64] r) => (float[64] y) "
        f"{{ t = Transpose (a)  s = MatMul ({product})  y = Sub (s, r) }}"
    )
    feeds = feeds_of(made)
    return made, feeds | {"r": runtime.outputs(made, feeds | {"r": np.zeros(64, np.float32)})["y"]}


def test_what_rounding_decides_is_no_fault_and_what_it_does_not_is_one():
    made, feeds = difference("b, t")  # fused, it adds in another order
    plain = runtime.outputs(made, feeds)
    assert not plain["y"].any() and runtime.outputs(made, feeds, "all")["y"].any()
    default_level.compare(made, feeds, plain)
    made, feeds = difference("t, b")
    with pytest.raises(ConversionError):
        default_level.compare(made, feeds, runtime.outputs(made, feeds))


def test_a_last_digit_of_float16_is_rounding_though_the_arrays_are_float32(monkeypatch):
    """As in a step whose float16 values are checked in float32, rounded: 1 is 2048 such digits."""
    made = model("(float[8] w, float[8] d) => (float[8] new_w) { new_w = Add (w, d) }")
    made.graph.output[0].name = made.graph.node[0].output[0] = "new.w"
    feeds = {"w": np.ones(8, np.float32), "d": np.full(8, 2**-9, np.float32)}
    truly, plain = default_level.runtime.outputs, runtime.outputs(made, feeds)
    monkeypatch.setattr(
        default_level.runtime, "outputs",
        lambda given, fed, level="disable": {
            name: array + np.float32(2**-10 * (level == "all")) for name, array in truly(given, fed, level).items()
        },
    )  # fmt: skip
    default_level.compare(made, feeds, plain, narrow={name: np.dtype(np.float16) for name in ("w", "new.w")})
    with pytest.raises(ConversionError, match=r"new\.w differs"):
        default_level.compare(made, feeds, plain)


def test_seeds_make_random_nodes_draw_alike_at_every_level():
    made = model("(float[8, 8] x) => (float[8, 8] y) { r = RandomNormalLike (x)  d = Add (r, x)  y = Relu (d) }")
    feeds = feeds_of(made)
    settled = default_level.seeded(made)
    assert default_level.is_random(made) and not made.graph.node[0].attribute[:]
    default_level.compare(settled, feeds, runtime.outputs(settled, feeds))


def test_the_backward_pass_of_such_a_product_is_right_by_default():
    forward = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]> g (float[5] v) => (float loss) <float[5, 3] w = {'
        + ", ".join(str(0.1 * k) for k in range(15))
        + "}> { t = Transpose (w)  y = MatMul (t, v)  loss = ReduceSumSquare <keepdims = 0> (y) }"
    )
    step = add_backward(forward, wrt=["w"])
    assert known_bugs.find(step) == ()
    w = onnx.numpy_helper.to_array(forward.graph.initializer[0])
    v = np.arange(5, dtype=np.float32)
    made = runtime.outputs(step, {"w": w, "v": v}, "all")
    np.testing.assert_allclose(made["grad.w"], 2 * np.outer(v, w.T @ v), rtol=1e-5)
