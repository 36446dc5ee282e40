"""Forward models into training steps: numbers, names, refusals, the command line."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_remat.converters.autodiff import CrossEntropy, MeanSquaredError, add_backward, initial_inputs
from onnx_remat.converters.autodiff.__main__ import main
from onnx_remat.converters.autodiff.registry import RULES, Grads, RuleInput

from onnx_remat.converters import optimizers
from onnx_remat.errors import ConversionError, UsageError
from onnx_remat.ort import runtime
from onnx_remat.rewrite.pipeline import rewrite_model

LIGHT = Path(onnx.__file__).parent / "backend/test/data/light"


def model(
    text: str,
    weights: dict[str, np.ndarray] | None = None,
    inputs: dict[str, list[object]] | None = None,
    outputs: tuple[str, ...] = ("y",),
    opset: int = 20,
    output_type: int = TensorProto.FLOAT,
) -> onnx.ModelProto:
    """A model of one line per node: ``y, z = Op(a, b) key=value``."""
    nodes = []
    for line in text.strip().splitlines():
        made, _, call = line.partition(" = ")
        op, _, rest = call.strip().partition("(")
        given, _, settings = rest.partition(")")
        attributes = {k: eval(v) for k, v in (s.split("=", 1) for s in settings.split())}
        names = [name.strip() for name in given.split(",")]
        nodes.append(helper.make_node(op, names, [n.strip() for n in made.split(",")], **attributes))
    inputs = inputs or {"x": [4, 3]}
    graph = helper.make_graph(
        nodes, "forward",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, output_type, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def weights(*shapes: tuple[int, ...], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"w{i}": rng.standard_normal(s).astype(np.float32) * np.float32(0.3) for i, s in enumerate(shapes)}


MLP = model("h = MatMul(x, w0)\nr = Relu(h)\ny = Gemm(r, w1, w2)", weights((3, 5), (5, 4), (4,)))
CONV = model(
    """h = Conv(x, w0) pads=[1,1,1,1]
n = BatchNormalization(h, scale, bias, mean, var)
r = Relu(n)
d = Dropout(r, ratio)
p = GlobalAveragePool(d)
f = Flatten(p)
y = Gemm(f, w1)""",
    weights((6, 3, 3, 3), (6, 5))
    | {"scale": np.ones(6, np.float32), "bias": np.zeros(6, np.float32), "mean": np.zeros(6, np.float32),
       "var": np.ones(6, np.float32), "ratio": np.asarray(0.25, np.float32)},
    {"x": ["batch", 3, 8, 8]},
)  # fmt: skip


def names_of(values: object) -> list[str]:
    return [value.name for value in values]  # type: ignore[attr-defined]


def test_interface_and_phases() -> None:
    step = add_backward(CONV, "cross_entropy", training=True)
    assert names_of(step.graph.input) == ["w0", "w1", "scale", "bias", "mean", "var", "x", "target"]
    assert names_of(step.graph.output) == [
        "loss", "grad.w0", "grad.w1", "grad.scale", "grad.bias", "new.mean", "new.var",
    ]  # fmt: skip
    phases = [{p.key: p.value for p in node.metadata_props}["phase"] for node in step.graph.node]
    assert set(phases) == {"forward", "backward"}
    assert set(names_of(step.graph.initializer)).isdisjoint({"w0", "w1", "mean"})
    assert "ratio" in names_of(step.graph.initializer)


def test_parameters_may_share_a_gradient_and_an_initializer_without_influence_stays() -> None:
    forward = model("a = Add(w0, w1)\nb = Add(a, x)\nu = Mul(w2, w2)\ny = Mul(b, b)", weights((4, 3), (4, 3), (4, 3)))
    step = add_backward(forward, "mse")
    assert names_of(step.graph.output) == ["loss", "grad.w0", "grad.w1"]
    batch = {"x": np.ones((4, 3), np.float32), "target": np.zeros((4, 3), np.float32)}
    made = runtime.outputs(step, weights((4, 3), (4, 3)) | batch)
    np.testing.assert_array_equal(made["grad.w0"], made["grad.w1"])


@pytest.mark.parametrize("loss", [CrossEntropy(), CrossEntropy(ignore_index=-1), MeanSquaredError()], ids=str)
def test_added_losses_against_torch(loss: CrossEntropy | MeanSquaredError) -> None:
    torch = pytest.importorskip("torch")
    held = {n: torch.tensor(w, requires_grad=True) for n, w in weights((3, 5), (5, 4), (4,)).items()}
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    y = torch.relu(x @ held["w0"]) @ held["w1"] + held["w2"]
    if isinstance(loss, CrossEntropy):
        target = torch.tensor([0, 3, -1 if loss.ignore_index else 2, 1, 1, 2])
        expected = torch.nn.functional.cross_entropy(y, target, ignore_index=-1)
    else:
        target = torch.ones(6, 4)
        expected = torch.nn.functional.mse_loss(y, target)
    expected.backward()
    forward = onnx.ModelProto.FromString(MLP.SerializeToString())
    forward.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "batch"
    step = add_backward(forward, loss)
    made = runtime.outputs(step, initial_inputs(forward, step) | {"x": x.numpy(), "target": target.numpy()})
    assert made["loss"] == pytest.approx(expected.item(), rel=1e-6)
    for name, value in held.items():
        np.testing.assert_allclose(made[f"grad.{name}"], value.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_training_batch_normalization_against_torch() -> None:
    torch = pytest.importorskip("torch")
    step = add_backward(CONV, "cross_entropy", training=True, dims={"batch": 4})
    for node in step.graph.node:
        if node.op_type == "Dropout":  # torch draws another mask
            node.input[1] = "none"
    step.graph.initializer.append(numpy_helper.from_array(np.asarray(1e-9, np.float32), "none"))
    first = initial_inputs(CONV, step)
    held = {n: torch.tensor(first[n], requires_grad=True) for n in ("w0", "w1", "scale", "bias")}
    x, target = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    mean, variance = torch.zeros(6), torch.ones(6)
    h = torch.nn.functional.conv2d(x, held["w0"], padding=1)
    n = torch.nn.functional.batch_norm(h, mean, variance, held["scale"], held["bias"], training=True, momentum=0.1)
    loss = torch.nn.functional.cross_entropy(torch.relu(n).mean((2, 3)) @ held["w1"], target)
    loss.backward()
    made = runtime.outputs(step, first | {"x": x.numpy(), "target": target.numpy()})
    assert made["loss"] == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(made["new.mean"], mean.numpy(), rtol=1e-5, atol=1e-7)
    # ONNX keeps the variance of the population, torch that of the sample.
    unbiased = 4 * 64 / (4 * 64 - 1)
    np.testing.assert_allclose((made["new.var"] - 0.9) * unbiased, variance.numpy() - 0.9, rtol=1e-4)
    # The scale of kept entries was that of the file's ratio.
    for name in ("w0", "scale", "bias"):
        expected = held[name].grad.numpy() / 0.75
        np.testing.assert_allclose(made[f"grad.{name}"], expected, rtol=1e-3, atol=1e-5)


def test_dropout_that_does_not_drop_passes_the_gradient_as_it_is() -> None:
    """Even where it outputs its mask."""
    text = "h = MatMul(x, w0)\nd, mask = Dropout(h, ratio)\ny = Mul(d, d)"
    step = add_backward(model(text, weights((3, 4)) | {"ratio": np.asarray(0.5, np.float32)}), "mse")
    assert float({p.key: p.value for p in step.metadata_props}["check.differences"]) < 1e-6


def test_sizes_have_the_names_of_the_inputs() -> None:
    text = "c = Conv(x, w0) pads=[1,1,1,1]\nf = Reshape(c, s)\ny = MatMul(f, w1)"
    made = weights((6, 3, 3, 3), (96, 5)) | {"s": np.asarray([-1, 96])}
    forward = model(text, made, {"x": ["batch", 3, 4, 4]})
    step = add_backward(forward, "cross_entropy")
    target = next(v for v in step.graph.input if v.name == "target")
    assert [d.dim_param for d in target.type.tensor_type.shape.dim] == ["batch"]


def test_logits_are_found_below_a_softmax_of_rows() -> None:
    text = "p = GlobalAveragePool(x)\nh = Conv(p, w0)\nf = Flatten(h)\ns = Softmax(f)\ny = Reshape(s, shape)"
    forward = model(text, weights((5, 3, 1, 1)) | {"shape": np.asarray([4, 5, 1, 1])}, {"x": [4, 3, 2, 2]})
    step = add_backward(forward, "cross_entropy")
    x, w = np.random.default_rng(0).standard_normal((4, 3, 2, 2)).astype(np.float32), weights((5, 3, 1, 1))["w0"]
    made = runtime.outputs(step, {"w0": w, "x": x, "target": np.zeros((4, 1, 1), np.int64)})
    scores = x.mean((2, 3)) @ w[:, :, 0, 0].T
    expected = np.mean(np.log(np.exp(scores).sum(1)) - scores[:, 0])
    assert made["loss"] == pytest.approx(expected, rel=1e-5)


def test_graphs_are_lean() -> None:
    """A layer of attention as exporters write it: one Gemm forward, two back, the three parts' adjoints joined."""
    forward = model(
        """t = Transpose(w0) perm=[1,0]
m = MatMul(x, t)
b = Add(m, w1)
parts = Reshape(b, apart)
q = Gather(parts, zero) axis=2
k = Gather(parts, one) axis=2
v = Gather(parts, two) axis=2
a = Mul(q, k)
y = Mul(a, v)""",
        weights((15, 3), (15,))
        | {"apart": np.asarray([2, 4, 3, 5]), "zero": np.asarray(0), "one": np.asarray(1), "two": np.asarray(2)},
        {"x": [2, 4, 3]},
    )
    step = add_backward(forward, "mse", wrt=["w0", "w1", "x"])
    ops = [node.op_type for node in step.graph.node]
    assert (ops.count("Gemm"), ops.count("Concat"), ops.count("Pad"), ops.count("Transpose")) == (3, 1, 0, 0), ops


def test_gradients_of_rows_that_are_read_often_are_whole() -> None:
    forward = model("y = Gather(w0, ids)", weights((5, 64)))
    forward.graph.input[0].CopyFrom(helper.make_tensor_value_info("ids", TensorProto.INT64, [1000]))
    step = add_backward(forward, "mse", check=False)
    feeds = initial_inputs(forward, step) | {
        "ids": np.random.default_rng(0).integers(-5, 5, 1000), "target": np.zeros((1000, 64), np.float32),
    }  # fmt: skip
    expected = np.zeros((5, 64))
    np.add.at(expected, feeds["ids"], feeds["w0"][feeds["ids"]] * 2 / 64000)
    for _ in range(5):
        np.testing.assert_allclose(runtime.outputs(step, feeds)["grad.w0"], expected, rtol=1e-4)


def test_shapes_that_constants_tell_are_found() -> None:
    forward = model(
        """shape = CastLike(numbers, int)
r = Reshape(x, shape)
l = Shape(r)
o = ConstantOfShape(l)
p = Add(o, r)
y = MatMul(p, w0)""",
        weights((6, 4)) | {"numbers": np.asarray([2.0, 6.0], np.float32)},
        {"x": [4, 3]},
    )
    forward.graph.input.append(helper.make_tensor_value_info("int", TensorProto.INT64, [1]))
    step = add_backward(forward, "cross_entropy", frozen=["numbers"])
    assert {"Reshape", "Add"} >= {n.op_type for n in step.graph.node} & {"Reshape", "Add", "Shape", "ConstantOfShape"}


def test_sequences_that_are_only_split_become_splits() -> None:
    places = {"two": np.asarray(2), "first": np.asarray(0), "last": np.asarray(-1)}
    text = "h = MatMul(x, w0)\ns = SplitToSequence(h, two) axis=1\na = SequenceAt(s, first)\nb = SequenceAt(s, last)"
    forward = model(text + "\ny = Mul(a, b)", weights((3, 4)) | places)
    step = add_backward(forward, "mse")
    assert not {"SplitToSequence", "SequenceAt"} & {node.op_type for node in step.graph.node}
    w, x = weights((3, 4))["w0"], np.ones((4, 3), np.float32)
    made = runtime.outputs(step, {"w0": w, "x": x, "target": np.zeros((4, 2), np.float32)})
    h = x @ w
    assert made["loss"] == pytest.approx(np.mean((h[:, :2] * h[:, 2:]) ** 2), rel=1e-5)


def test_parts_of_a_sequence_that_are_outputs_keep_their_names() -> None:
    places = {"two": np.asarray(2), "first": np.asarray(0), "last": np.asarray(-1)}
    text = "h = MatMul(x, w0)\ns = SplitToSequence(h, two) axis=1\na = SequenceAt(s, first)\nb = SequenceAt(s, last)"
    forward = model(text + "\nc = SequenceAt(s, last)\ny = Mul(a, b)", weights((3, 4)) | places, outputs=tuple("yabc"))
    step = add_backward(forward, MeanSquaredError("a"), keep=["b", "c"])
    assert [value.name for value in step.graph.output] == ["loss", "grad.w0", "b", "c"]
    w, x = weights((3, 4))["w0"], np.ones((4, 3), np.float32)
    made = runtime.outputs(step, {"w0": w, "x": x, "target": np.zeros((4, 2), np.float32)})
    assert made["loss"] == pytest.approx(np.mean((x @ w)[:, :2] ** 2), rel=1e-5)
    for name in ("b", "c"):
        np.testing.assert_allclose(made[name], (x @ w)[:, 2:], rtol=1e-5)


RATES = [optimizers.SGD(lr=0.1), optimizers.SGD(lr=0.1, momentum=0.9), optimizers.AdamW(lr=0.01)]


@pytest.mark.parametrize("rate", RATES)
def test_twenty_steps_follow_torch(rate: optimizers.Optimizer) -> None:
    torch = pytest.importorskip("torch")
    step = add_backward(MLP, "cross_entropy", optimizer=rate)
    feeds = initial_inputs(MLP, step, rate)
    held = [torch.tensor(w, requires_grad=True) for w in weights((3, 5), (5, 4), (4,)).values()]
    if isinstance(rate, optimizers.SGD):
        theirs = torch.optim.SGD(held, lr=rate.lr, momentum=rate.momentum)
    else:
        theirs = torch.optim.AdamW(held, lr=0.01)
    x, target = torch.randn(4, 3), torch.tensor([0, 1, 2, 3])
    for _ in range(20):
        theirs.zero_grad()
        loss = torch.nn.functional.cross_entropy(torch.relu(x @ held[0]) @ held[1] + held[2], target)
        loss.backward()
        theirs.step()
        made = runtime.outputs(step, feeds | {"x": x.numpy(), "target": target.numpy()})
        assert made["loss"] == pytest.approx(loss.item(), rel=1e-4)
        feeds |= {name: made[f"new.{name}"] for name in feeds}


def test_default_parameters_are_weights_not_constants() -> None:
    constants = {
        "mask": np.asarray([[0, -np.inf, 0]], np.float32), "half": np.asarray([0.5], np.float32),
        "low": np.asarray(-9, np.float32),
    }  # fmt: skip
    forward = model("a = Add(x, mask)\ns = Softmax(a)\nm = Mul(s, half)\nc = Clip(m, low)\ny = MatMul(c, w0)",
                    weights((3, 5)) | constants)  # fmt: skip
    assert names_of(add_backward(forward, "mse").graph.input) == ["w0", "x", "target"]


def test_old_models_are_brought_up() -> None:
    forward = model("h = MatMul(x, w0)\nq = Squeeze(h) axes=[1]\ny = ReduceMean(q) axes=[0,1] keepdims=0",
                    weights((3, 2)), {"x": [4, 1, 3]}, opset=9)  # fmt: skip
    step = add_backward(forward, "y", wrt=["w*"])
    assert {o.version for o in step.opset_import if not o.domain} == {20}


def test_the_check_finds_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES["Relu"]
    monkeypatch.setitem(RULES, "Relu", lambda s: {0: lambda: s.t.mul(right(s)[0](), 1.5)})
    with pytest.raises(ConversionError, match=r"gradient by 'w0' is wrong.*example_inputs= gives .* distinct indices"):
        add_backward(MLP, "cross_entropy")
    assert add_backward(MLP, "cross_entropy", check=False)


@pytest.mark.parametrize("left", [0.0, 1e-18])
@pytest.mark.parametrize("op", ["Tanh", "Exp", "Relu"])
def test_the_check_finds_gradients_that_are_all_next_to_zero(
    op: str, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = model(f"h = MatMul(x, w0)\ne = {op}(h)\ny = ReduceMean(e) keepdims=0", weights((3, 5)))
    right = RULES[op]
    monkeypatch.setitem(RULES, op, lambda s: {0: lambda: s.t.mul(right(s)[0](), left)})
    with pytest.raises(ConversionError, match=r"gradient by 'w0' is wrong: .*although all .* almost zero"):
        add_backward(forward, "y")


@pytest.mark.parametrize(
    "body",
    [
        "h = MatMul(x, w0)\nz = Mul(h, nil)\ne = Relu(z)",  # a kink, of no height
        "h = MatMul(x, w0)\nz = Mul(h, nil)\ne = Cos(z)",
        "h = MatMul(x, w0)\nz = Sub(h, far)\ne = Relu(z)",
        "h = MatMul(x, w0)\nz = Sub(h, h)\ne = Mul(z, z)",
        "h = MatMul(x, w0)\nz = Sub(h, far)\ne = Sigmoid(z)",
    ],
)
def test_gradients_that_are_rightly_next_to_zero_are_not_called_wrong(body: str) -> None:
    held = weights((3, 5)) | {"nil": np.zeros((), np.float32), "far": np.asarray(60, np.float32)}
    with pytest.raises(ConversionError, match=r"on the check's inputs.*: give example_inputs= or check=False"):
        add_backward(model(f"{body}\ny = ReduceMean(e) keepdims=0", held), "y", wrt=["w0"])


def test_a_weight_that_stands_in_a_kink_is_not_called_wrong() -> None:
    forward = model("a = Abs(w0)\ny = ReduceSum(a) keepdims=0", {"w0": np.zeros((3,), np.float32)})
    with pytest.raises(ConversionError, match="every gradient is zero on the check's inputs: give"):
        add_backward(forward, "y", wrt=["w0"])


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (2, 3, 3, 5), (2, 3, 3)])
@pytest.mark.parametrize("slopes", [3, 1])
def test_slopes_of_an_old_prelu_are_its_channels(shape: tuple[int, ...], slopes: int) -> None:
    held = {"slope": np.asarray([0.5, 0.25, 2.0], np.float32)[:slopes]}
    forward = model("p = PRelu(x, slope)\ny = ReduceSum(p) axes=[0] keepdims=0", held, {"x": list(shape)}, opset=6)
    step = add_backward(forward, "mse", wrt=["x", "slope"])
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    along = (-1, *[1] * (len(shape) - 2))
    expected = np.where(x < 0, x * held["slope"].reshape(along), x).sum(axis=0)
    made = runtime.outputs(step, {"x": x, "slope": held["slope"], "target": np.zeros_like(expected)})
    np.testing.assert_allclose(made["loss"], np.square(expected).mean(), rtol=1e-5)
    assert made["grad.slope"].shape == (slopes,)
    assert forward == model(
        "p = PRelu(x, slope)\ny = ReduceSum(p) axes=[0] keepdims=0", held, {"x": list(shape)}, opset=6
    )


def test_an_old_prelu_of_unknown_rank_is_named() -> None:
    forward = onnx.parser.parse_model(
        '<ir_version: 3, opset_import: ["" : 6]> g (float x, float[3] slope, int64[n] s) => (float loss) '
        "{ r = Reshape(x, s) p = PRelu(r, slope) loss = ReduceSum <keepdims = 0> (p) }"
    )
    with pytest.raises(ConversionError, match=r"node 'p' \(PRelu\): the rank of 'r' is unknown"):
        add_backward(forward, "loss", wrt=["slope"])


def test_gradients_that_are_rounding_alone_are_not_called_wrong() -> None:
    """Equal logits, whatever the bias: the gradient is what a sum that vanishes is rounded by, times 1e15."""
    held = {
        "w0": np.full((3, 40), 0.02, np.float32),
        "b": np.ones(3, np.float32),
        "large": np.asarray(1e15, np.float32),
    }
    forward = model("h = Add(x, b)\ns = MatMul(h, w0)\nz = Mul(s, large)\ny = Softmax(z) axis=1", held)
    with pytest.raises(ConversionError, match=r"rounding decides about the gradients on the check's inputs: give"):
        add_backward(forward, "mse", wrt=["b"])


def deep() -> onnx.ModelProto:
    """Five convolutions with BatchNormalization."""
    lines, made = [], {"w": weights((6, 4), seed=9)["w0"]}
    for i in range(5):
        lines += [f"c{i} = Conv(r{i}, w{i}) pads=[1,1,1,1]", f"n{i} = BatchNormalization(c{i}, s{i}, b{i}, m{i}, v{i})",
                  f"r{i + 1} = Relu(n{i})"]  # fmt: skip
        shape = (6, 6 if i else 3, 3, 3)
        made |= {f"w{i}": weights(shape, seed=i)["w0"], f"s{i}": np.ones(6, np.float32)}
        made |= {f"b{i}": np.zeros(6, np.float32), f"m{i}": np.zeros(6, np.float32), f"v{i}": np.ones(6, np.float32)}
    lines += ["p = GlobalAveragePool(r5)", "f = Flatten(p)", "y = MatMul(f, w)"]
    return model("\n".join(lines), made, {"r0": [4, 3, 8, 8]})


@pytest.mark.parametrize(("at", "training"), [("b0", True), ("b3", False), ("s4", True)])
def test_the_check_finds_one_wrong_gradient_by_a_thousandth(
    at: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = RULES["BatchNormalization"]

    def wrong(s: RuleInput) -> Grads:
        grads, slot = right(s), 2 if at[0] == "b" else 1
        if s.x(slot).name == at:
            grads[slot] = (lambda honest: lambda: s.t.mul(honest(), 1.001))(grads[slot])
        return grads

    monkeypatch.setitem(RULES, "BatchNormalization", wrong)
    with pytest.raises(ConversionError, match=rf"gradient by '{at}' is wrong"):
        add_backward(deep(), "cross_entropy", training=training)


def test_the_check_finds_a_gradient_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES["BatchNormalization"]

    def wrong(s: RuleInput) -> Grads:
        grads = right(s)
        if s.x(2).name == "b3":
            grads[2] = lambda: s.t.zeros(s.shape(2), s.dtype())
        return grads

    monkeypatch.setitem(RULES, "BatchNormalization", wrong)
    with pytest.raises(ConversionError, match="gradient by 'b3' is wrong"):
        add_backward(deep(), "cross_entropy")


def weighed(op: str, seed: int, scale: float, offset: bool) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A sum of both signs, with `offset` of next to nothing; and an input."""
    text = f"e = {op}(x)\np = Mul(e, r)\ns = ReduceSum(p) keepdims=0\ny = Add(s, c)"
    x, r = (np.random.default_rng(i).standard_normal((16, 256)).astype(np.float32) for i in (5, seed))
    made = model(text, {"r": r * np.float32(scale), "c": np.zeros((), np.float32)}, {"x": [16, 256]})
    if offset:
        total = runtime.outputs(made, {"x": x})["y"]
        made.graph.initializer[1].CopyFrom(numpy_helper.from_array(-total, "c"))
    return made, {"x": x}


@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("scale", [1, 1e4])
@pytest.mark.parametrize("op", ["Erf", "Softplus", "Tanh"])
def test_the_check_knows_rounding_from_faults(
    op: str, scale: float, offset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large terms that cancel, and constants from the generators that anybody uses, are no faults; 1 % is one."""
    for seed in range(3):
        forward, example = weighed(op, seed, scale, offset)
        assert add_backward(forward, "y", wrt=["x"], example_inputs=example)
    right = RULES[op]
    monkeypatch.setitem(RULES, op, lambda s: {0: lambda: s.t.mul(right(s)[0](), 1.01)})
    with pytest.raises(ConversionError, match=r"gradient by .* is wrong"):
        add_backward(forward, "y", wrt=["x"], example_inputs=example)


def test_a_weight_drawn_as_the_checks_inputs_are_is_no_kink() -> None:
    """Were the input drawn as this weight is, each Relu would be looked at in its corner."""
    w = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    assert add_backward(model("d = Sub(x, w0)\nr = Relu(d)\ny = ReduceSum(r) keepdims=0", {"w0": w}, {"x": [4, 8]}))


INVALID = {
    "defined twice": ("loss = Neg(x)  t = Neg(x)  loss = ReduceSum <keepdims = 0> (t)", "'loss' is defined twice"),
    "of an input's name": ("x = Neg(x)  loss = ReduceSum <keepdims = 0> (x)", "'x' is defined twice"),
    "one node's outputs": ("t, t = Split <num_outputs = 2> (x)  loss = ReduceSum <keepdims = 0> (t)", "'t' is defined"),
    "undefined": ("t = Neg(u)  loss = ReduceSum <keepdims = 0> (t)", "reads 'u', which nothing defines"),
    "out of order": ("loss = ReduceSum <keepdims = 0> (t)  t = Neg(x)", "reads 't', which is made only later"),
    "in a body": (
        "t = If(c) <then_branch = a () => (float[4, 5] q) { q = Neg(x)  q = Neg(x) }, else_branch = b () => "
        "(float[4, 5] r) { r = Neg(x) }> loss = ReduceSum <keepdims = 0> (t)", "'q' has been used",
    ),
    "of a body, outside": (
        "t = If(c) <then_branch = a () => (float[4, 5] q) { q = Neg(x) }, else_branch = b () => (float[4, 5] r) "
        "{ r = Neg(x) }> s = Add(t, q)  loss = ReduceSum <keepdims = 0> (s)", "reads 'q', which nothing defines",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", INVALID)
def test_invalid_models_are_refused_in_one_line(case: str, caplog: pytest.LogCaptureFixture) -> None:
    nodes, message = INVALID[case]
    forward = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 20]> g (float[4, 5] x, bool c) => (float loss) {{ {nodes} }}'
    )
    with pytest.raises(ConversionError, match=message) as caught:
        add_backward(forward, "loss", wrt=["x"])
    assert "\n" not in str(caught.value)
    assert not caplog.records


def test_the_check_says_what_it_found_and_what_it_cannot_tell() -> None:
    known = {p.key: p.value for p in add_backward(deep(), "cross_entropy").metadata_props}
    assert float(known["check.differences"]) < 1e-6
    assert float(known["check.precision"]) < 1e-4
    assert known["check.untold"] == "0"
    nil = weights((3, 5)) | {"nil": np.zeros((), np.float32)}
    with pytest.raises(ConversionError, match="every gradient is zero on the check's inputs"):
        add_backward(model("h = MatMul(x, w0)\ny = Mul(h, nil)", nil), "mse")


IDLE = model("y = ReduceMean(x) keepdims=0", weights((3, 5)))
BAD = {
    "no rule": (model("h = MatMul(x, w0)\ny = Det(h)", weights((3, 4))), {"loss": "y"}, "no gradient rule for op Det"),
    "custom op": (model("h = MatMul(x, w0)\ny = Erfc(h)", weights((3, 4))), {"loss": "mse"}, "op Erfc"),
    "not a scalar": (MLP, {}, r"output 'y' has shape \[4, 4\], and a loss is a scalar"),
    "no loss": (
        model("a = Relu(x)\nb = MatMul(a, w0)", weights((3, 4)), outputs=("a", "b")),
        {},
        "no output is called loss: name",
    ),
    "unknown loss": (MLP, {"loss": "hinge"}, "neither a known loss nor an output"),
    "integer parameter": (
        model("h = Gather(x, i)\ny = ReduceMean(h) keepdims=0", {"i": np.asarray([0, 1])}), {"wrt": ["i"]},
        "'i' is .*only floating point",
    ),
    "unknown parameter": (MLP, {"loss": "mse", "wrt": ["w00"]}, "no input or initializer is called 'w00'.*mean 'w0'"),
    "no influence": (IDLE, {"loss": "y", "wrt": ["w0"]}, "depends on no parameter"),
    "nothing to train": (model("y = ReduceMean(x) keepdims=0"), {"loss": "y"}, "so there is no parameter: name"),
    "unknown size": (MLP, {"loss": "mse", "dims": {"n": 3}}, "no input has a size called 'n'"),
    "a Softmax below a Cast": (
        model("h = MatMul(x, w0)\ns = Softmax(h)\ny = Cast(s) to=11", weights((3, 4)), output_type=11),
        {"loss": "cross_entropy"},
        "'y' is made of a Softmax over axis -1, and cross-entropy needs its input",
    ),
    "a Softmax over another axis": (
        model("h = MatMul(x, w0)\ny = Softmax(h) axis=1", weights((3, 4)), {"x": [2, 5, 3]}), {"loss": "cross_entropy"},
        "over axis 1, .* the axis of the classes, which is taken to be 2",
    ),
    "an example of no input": (MLP, {"loss": "mse", "example_inputs": {"z": np.ones(3)}}, "the model has no input 'z'"),
    "an example of another rank": (
        MLP, {"loss": "mse", "example_inputs": {"x": np.ones(3)}}, "the example of 'x' has 1 axes, and the input has 2"
    ),
    "integer loss": (
        model("h = MatMul(x, w0)\ny = ArgMax(h) keepdims=0", weights((3, 1)), {"x": [1, 3]}, output_type=7),
        {"loss": "y"}, "not floating point",
    ),
}  # fmt: skip


WRONG_ARGUMENTS = (
    "unknown loss", "integer parameter", "unknown parameter", "unknown size", "an example of no input",
    "an example of another rank",
)  # fmt: skip
"""Of these, cases in which an argument is wrong: another one would convert the same model."""


@pytest.mark.parametrize("case", BAD)
def test_refusals(case: str) -> None:
    forward, options, message = BAD[case]
    with pytest.raises(UsageError if case in WRONG_ARGUMENTS else ConversionError, match=message):
        add_backward(forward, **options)


@pytest.mark.parametrize(
    ("case", "arguments"),
    [("no rule", ["--loss", "y"]), ("not a scalar", []), ("no loss", []), ("integer parameter", ["--wrt", "i"]),
     ("unknown loss", ["--loss", "hinge"]), ("no influence", ["--loss", "y", "--wrt", "w0"])],
)  # fmt: skip
def test_refusals_write_nothing(
    case: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(BAD[case][0], tmp_path / "forward.onnx")
    assert main([str(tmp_path / "forward.onnx"), str(tmp_path / "train.onnx"), *arguments]) == (
        2 if case in WRONG_ARGUMENTS else 6
    )
    assert re.search(BAD[case][2], capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["forward.onnx"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [([], "the following arguments are required: forward, out"), (["a", "b", "--frobnicate"], "--frobnicate"),
     (["a", "b", "--loss"], "expected one argument"), (["a", "b", "--optimizer", "lion"], "invalid choice"),
     (["a", "b", "--dim", "n"], "--dim 'n' is not a size"), (["a", "b", "--dim", "n=²"], "--dim 'n=²' is not a size"),
     (["a", "b", "--optimizer", "sgd", "--lr", "-1"], "a learning rate is a finite number")],
)  # fmt: skip
def test_wrong_options_are_one_line_and_exit_code_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and text in err
    assert err.startswith("python -m onnx_remat.converters.autodiff: error: ")


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "forward.onnx", tmp_path / "train.onnx"
    onnx.save(MLP, source)
    values = tmp_path / "first.npz"
    arguments = [str(source), str(target), "--loss", "cross_entropy", "--optimizer", "adamw", "--values", str(values)]
    assert main(arguments) == 0
    step, first = onnx.load(target), dict(np.load(values))
    made = runtime.outputs(step, first | {"x": np.ones((4, 3), np.float32), "target": np.zeros(4, np.int64)})
    assert made["new.state.w0.step"] == 1
    out = capsys.readouterr().out
    assert "gradients agree with differences of the loss" in out and out.endswith(f"\nwrote {target}, {values}\n")
    assert main(arguments) == 2  # exists
    target.unlink()
    assert main(arguments) == 2 and not target.exists()  # the values exist
    assert main([*arguments[:-1], str(values.with_suffix(""))]) == 2 and not target.exists()
    assert main([*arguments[:-1], str(values), "--force", "--example", str(values)]) == 0  # state among the examples
    assert main([*arguments[:-1], str(values.with_name("second")), "--force", "--example", str(values)]) == 0
    assert capsys.readouterr().out.endswith(f"\nwrote {target}, {values.with_name('second.npz')}\n")
    target.unlink()
    assert main([*arguments[:-1], str(tmp_path / "no" / "first.npz"), "--force"]) == 2 and not target.exists()
    bad = tmp_path / "bad.onnx"
    assert main([str(source), str(bad)]) == 6
    assert not bad.exists()
    assert "a loss is a scalar" in capsys.readouterr().err


def test_light_model_trains_within_a_budget() -> None:
    forward = onnx.load(LIGHT / "light_squeezenet.onnx")
    filled = [n.output[0] for n in forward.graph.node if n.op_type == "ConstantOfShape"]
    step = add_backward(forward, "cross_entropy", wrt=filled, check=False)
    result = rewrite_model(step, "70%", effort=0.5, run_by="session")
    assert result.report.after.total <= result.report.budget


def test_the_command_line_names_its_own_options(tmp_path, capsys):
    """Messages of `add_backward` advise its arguments; typed, they are options."""
    idle = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]> g (float[2, 3] x) => (float loss) <float[3, 3] w = {'
        + ", ".join(["0.5"] * 9)
        + "}> { y = MatMul (x, w)  z = Mul (y, y)  e = Exp (z)  loss = ReduceSum <keepdims = 0> (e) }"
    )
    onnx.save(idle, tmp_path / "forward.onnx")
    np.savez(tmp_path / "example.npz", x=np.full((2, 3), 1e6, np.float32))
    target = str(tmp_path / "train.onnx")
    common = [str(tmp_path / "forward.onnx"), target, "--example", str(tmp_path / "example.npz")]
    assert main([*common, "--wrt", "w"]) == 6
    err = capsys.readouterr().err
    assert err.startswith("python -m onnx_remat.converters.autodiff: error: ") and "give --example or --no-check" in err
    assert main([*common, "--wrt", "w", "--no-check"]) == 0
    (tmp_path / "example.npz").write_bytes(b"no archive")
    assert main([*common, "--force"]) == 2
    assert "--example" in capsys.readouterr().err


@pytest.mark.parametrize(("forward", "silent"), [(MLP, False), (CONV, True)])
def test_the_command_line_says_where_training_mode_changes_nothing(forward, silent, tmp_path, capsys):
    onnx.save(forward, tmp_path / "forward.onnx")
    paths = [str(tmp_path / "forward.onnx"), str(tmp_path / "train.onnx")]
    assert main([*paths, "--loss", "cross_entropy", "--training", "--no-check"]) == 0
    assert ("--training changed nothing" in capsys.readouterr().out) is not silent


def test_a_model_in_float64_is_checked_in_it() -> None:
    forward = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]> g (double[3, 4] x) => (double[3, 4] y) { y = Tanh(x) }'
    )
    step = add_backward(forward, "mse", wrt=["x"])
    assert next(v for v in step.graph.output if v.name == "grad.x").type.tensor_type.elem_type == TensorProto.DOUBLE


def test_a_sequence_of_nothing_is_refused_by_its_reader() -> None:
    forward = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 20]> g (float[3, 4] x) => (float[3, 4] y) {
            s = SequenceEmpty()  t = SequenceInsert(s, x)  y = ConcatFromSequence <axis = 0> (t)
        }"""
    )
    with pytest.raises(ConversionError, match="no gradient rule for op ConcatFromSequence"):
        add_backward(forward, "mse", wrt=["x"])


def test_the_node_is_named_whose_shape_is_unknown() -> None:
    forward = model("y = Mul(s, s)", weights((4, 3)))
    body = onnx.parser.parse_graph("turn (int64 i, bool on, float[4, 3] a) => (bool more, float[4, 3] b)"
                                   "{ more = Identity(on) b = Tanh(a) }")  # fmt: skip
    loop = onnx.helper.make_node("Loop", ["n", "", "h"], ["s"], "turns", body=body)
    start = onnx.helper.make_node("Mul", ["x", "w0"], ["h"])
    forward.graph.node.insert(0, loop)
    forward.graph.node.insert(0, start)
    forward.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(3), "n"))
    with pytest.raises(
        ConversionError, match=r"shape of 's' \(made by Loop node 'turns'\) is unknown: .* add value_info"
    ):
        add_backward(forward, "mse")


def test_dropouts_behind_frozen_layers_drop():
    forward = model("h = MatMul(x, w0)\nr = Tanh(h)\nd = Dropout(r, ratio)\ny = MatMul(d, w1)",
                    weights((3, 64), (64, 4)) | {"ratio": np.float32(0.5)})  # fmt: skip
    step = add_backward(forward, "mse", training=True, frozen=["w0"], check=False)
    feeds = initial_inputs(forward, step) | {"x": np.ones((4, 3), np.float32), "target": np.ones((4, 4), np.float32)}
    assert len({float(runtime.outputs(step, feeds, "all")["loss"]) for _ in range(4)}) == 4


def test_names_that_match_nothing_or_are_taken_are_refused():
    with pytest.raises(UsageError, match=r"frozen: no input or initializer is called 'w\*x'"):
        add_backward(MLP, "mse", frozen=["w*x"], check=False)
    with pytest.raises(UsageError, match="all parameters are frozen: leave one out of frozen="):
        add_backward(MLP, "mse", frozen=["*"], check=False)
    named = model("y = MatMul(x, loss)", {"loss": np.ones((3, 2), np.float32)})
    with pytest.raises(ConversionError, match="an input or a weight is called 'loss', as an output of the step is"):
        add_backward(named, "mse", check=False)


def test_the_command_names_the_inputs_of_a_batch(tmp_path, capsys):
    """An input of the model may be called `target`, too."""
    path = tmp_path / "in.onnx"
    onnx.save(model("y = MatMul(target, w0)", weights((3, 2)), {"target": [4, 3]}), path)
    assert main([str(path), str(tmp_path / "out.onnx"), "--loss", "mse", "--no-check"]) == 0
    assert "a batch is target, target.1\n" in capsys.readouterr().out


def test_values_of_any_name_are_written_with_the_step_or_neither(tmp_path, monkeypatch):
    source, target, values = (tmp_path / name for name in ("forward.onnx", "train.onnx", "first.npz"))
    onnx.save(model("y = MatMul(x, file)", {"file": np.ones((3, 5), np.float32)}), source)
    arguments = [str(source), str(target), "--loss", "mse", "--no-check", "--values", str(values)]
    assert main(arguments) == 0
    assert list(np.load(values)) == ["file"]
    before = target.read_bytes(), values.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise UsageError("the disk is full")

    monkeypatch.setattr("onnx_remat.converters.autodiff.__main__.initial_inputs", full)
    assert main([*arguments, "--optimizer", "sgd", "--force"]) == 2
    assert before == (target.read_bytes(), values.read_bytes())
