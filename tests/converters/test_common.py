"""The converters' common ground: optimizers against torch.optim, the check, simplification, widening."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_remat.converters.checks import agreement as check
from onnx_remat.converters.emit import Emitter
from onnx_remat.converters.halves import widened
from onnx_remat.converters.passes.add_in_order import add_in_order
from onnx_remat.converters.passes.exact_sigmoids import exact_sigmoids
from onnx_remat.converters.passes.simplify import simplify
from onnx_remat.converters.tape import Tape

from onnx_remat.converters import optimizers, shares
from onnx_remat.errors import BudgetInfeasibleError, ConversionError, ModelError, UsageError
from onnx_remat.messages import Message, Setting
from onnx_remat.ort import runtime

torch = pytest.importorskip("torch")


def value(name, shape, dtype=ir.DataType.FLOAT):
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def product_step(kind=ir.DataType.FLOAT):
    """loss = sum(w * x), and its gradient of w."""
    w, x = value("w", [3], kind), value("input.0", [3], kind)
    graph = ir.Graph([w, x], [], nodes=[], opset_imports={"": 20}, name="step")
    emit = Emitter(graph, "forward")
    loss = emit("ReduceSum", emit("Mul", w, x, like=w), keepdims=0)
    loss.name, loss.shape, loss.type = "loss", ir.Shape([]), w.type
    with emit.labelled("backward"):
        gradient = emit("Identity", x, like=x)
    gradient.name = "grad.w"
    graph.outputs.extend([loss, gradient])
    return graph


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (optimizers.SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
        (
            optimizers.SGD(0.1, 0.9, weight_decay=0.01, nesterov=True),
            lambda p: torch.optim.SGD(p, 0.1, 0.9, weight_decay=0.01, nesterov=True),
        ),
        (optimizers.SGD(0.1, 0.9, maximize=True), lambda p: torch.optim.SGD(p, 0.1, 0.9, maximize=True)),
        (
            optimizers.Adam(0.1, weight_decay=0.1, amsgrad=True),
            lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1, amsgrad=True),
        ),
        (optimizers.AdamW(0.1, betas=(0.8, 0.95)), lambda p: torch.optim.AdamW(p, 0.1, betas=(0.8, 0.95))),
    ],
)
def test_optimizer_follows_torch_for_ten_steps(ours, theirs, kind):
    graph = product_step(ir.DataType.from_numpy(np.dtype(kind)))
    optimizers.append(graph, {"w": ours}, 1)
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    onnx.checker.check_model(model, full_check=True)
    generator = np.random.default_rng(0)
    start = generator.standard_normal(3).astype(kind)
    twin = torch.nn.Parameter(torch.tensor(start))
    optimizer = theirs([twin])
    feeds = {"w": start, **optimizers.initial_state({"w": ours}, {"w": start})}
    for _ in range(10):
        x = generator.standard_normal(3).astype(kind)
        optimizer.zero_grad()
        (twin * torch.tensor(x)).sum().backward()
        optimizer.step()
        made = runtime.outputs(model, {**feeds, "input.0": x})
        feeds = {name.removeprefix("new."): made[name] for name in made if name.startswith("new.")}
    exact = 1e-5 if kind == np.float32 else 1e-13  # torch corrects Adam's bias in float64
    assert check.relative_error(feeds["w"], twin.detach().numpy()) < exact


def test_a_learning_rate_by_name_is_an_input():
    graph = product_step()
    optimizers.append(graph, {"w": optimizers.AdamW("rate", weight_decay=0.5)}, 1)
    assert [v.name for v in graph.inputs][-2:] == ["rate", "input.0"]
    model = ir.to_proto(ir.Model(graph, ir_version=10))
    state = {"w": np.ones(3, np.float32), **optimizers.initial_state({"w": optimizers.AdamW()}, {"w": np.ones(3, "f")})}
    batch = {"input.0": np.ones(3, np.float32)}
    moved = [1 - runtime.outputs(model, {**state, **batch, "rate": np.array(r, "f")})["new.w"] for r in (0, 0.01, 0.02)]
    np.testing.assert_allclose(moved, np.outer([0, 0.01, 0.02], np.full(3, 1.5)), atol=1e-6)
    with pytest.raises(UsageError, match=r"the graph already has a value 'input\.0'"):
        optimizers.append(product_step(), {"w": optimizers.SGD("input.0")}, 1)


def test_the_check_names_the_worst_output():
    good = {"loss": np.float32(1.0), "grad.w": np.ones(3, np.float32)}
    assert check.compare(good, good).error == 0.0
    with pytest.raises(ConversionError, match=r"grad\.w differs from the framework's by 0\.5"):
        check.compare(good | {"grad.w": np.array([1, 1, 1.5], np.float32)}, good)
    with pytest.raises(ConversionError, match="one side only"):
        check.compare({"loss": good["loss"]}, good)


def test_noise_excuses_only_what_rounding_decides():
    expected = {"loss": np.float32(1.0), "grad.b": np.array([1e-9], np.float32)}
    found = expected | {"grad.b": np.array([-3e-9], np.float32)}
    with pytest.raises(ConversionError):
        check.compare(found, expected)
    assert check.compare(found, expected, noise={"grad.b": 1e-9}).undetermined == ("grad.b",)
    with pytest.raises(ConversionError):  # far above its noise
        check.compare(expected | {"grad.b": np.array([1e-7], np.float32)}, expected, noise={"grad.b": 1e-9})
    near = expected | {"grad.b": np.array([1.0003e-9], np.float32)}
    with pytest.raises(ConversionError):
        check.compare(near, expected, noise={"grad.b": 1e-14})
    assert check.compare(near, expected, noise={"grad.b": 5e-14}).undetermined == ("grad.b",)  # below the tolerance
    with pytest.raises(ConversionError, match="is rounding noise on this batch"):  # noise alone proves nothing
        check.compare({"grad.b": found["grad.b"]}, {"grad.b": expected["grad.b"]}, noise={"grad.b": 1e-9})


def test_changes_that_rounding_decides_must_still_be_within_it():
    expected = {"new.w": np.array([3e-7, -2e-7], np.float32)}
    near = {"new.w": np.array([3.5e-7, -2e-7], np.float32)}
    with pytest.raises(ConversionError, match="is rounding noise on this batch"):
        check.compare(near, expected, noise={"new.w": 1e-8})
    assert check.agreed(near, expected, noise={"new.w": 1e-8}).undetermined == ["new.w"]
    with pytest.raises(ConversionError, match=r"new\.w differs"):
        check.agreed({"new.w": -expected["new.w"]}, expected, noise={"new.w": 1e-8})


def test_simplify_keeps_results_labels_and_names():
    a, b = value("a", [4, 5]), value("b", [4, 6])
    graph = ir.Graph([a, b], [], nodes=[], opset_imports={"": 20}, name="g")
    emit = Emitter(graph, "backward")
    turned = emit("Transpose", a, perm=[1, 0])
    turned.shape, turned.type = ir.Shape([5, 4]), a.type
    product = emit("MatMul", turned, b)
    product.shape, product.type = ir.Shape([5, 6]), a.type
    one = emit("Mul", product, emit.constant(np.float32(1)), like=product)
    wide = emit("Expand", emit.constant(np.float32(3)), emit.constant(np.array([5, 6])), like=product)
    total = emit("Add", one, wide, like=product)
    back = emit("Transpose", emit("Transpose", total, perm=[1, 0]), perm=[1, 0])
    back.producer().inputs[0].shape, back.producer().inputs[0].type = ir.Shape([6, 5]), a.type
    back.shape, back.type, back.name = ir.Shape([5, 6]), a.type, "out"
    graph.outputs.append(back)
    model = ir.Model(graph, ir_version=10)
    rng = np.random.default_rng(0)
    feeds = {"a": rng.standard_normal((4, 5), np.float32), "b": rng.standard_normal((4, 6), np.float32)}
    before = runtime.outputs(ir.to_proto(model), feeds)
    simplify(model)
    after = runtime.outputs(ir.to_proto(model), feeds)
    assert [node.op_type for node in model.graph] == ["Gemm", "Add"]
    assert {node.metadata_props["phase"] for node in model.graph} == {"backward"}
    assert check.relative_error(after["out"], before["out"]) < 1e-6


@pytest.mark.parametrize(("lead", "left"), [([], ["Expand", "MatMul"]), ([2, 5], ["MatMul"])])
def test_only_a_batch_of_matrices_replaces_the_repetition_of_another_matrix(lead, left):
    """A vector has no batch to broadcast to."""
    a, b = value("a", [*lead, 3]), value("b", [3, 4])
    graph = ir.Graph([a, b], [], nodes=[], opset_imports={"": 20}, name="g")
    emit = Emitter(graph, "forward")
    wide = emit("Expand", b, emit.constant(np.array([2, 3, 4])))
    wide.shape, wide.type = ir.Shape([2, 3, 4]), b.type
    product = emit("MatMul", a, wide)
    product.shape, product.type, product.name = ir.Shape([*(lead or [2]), 4]), b.type, "out"
    graph.outputs.append(product)
    model = ir.Model(graph, ir_version=10)
    simplify(model)
    assert [node.op_type for node in model.graph] == left
    feeds = {v.name: np.ones(v.shape.numpy(), np.float32) for v in (a, b)}
    assert runtime.outputs(ir.to_proto(model), feeds)["out"].shape == product.shape.numpy()


@pytest.mark.parametrize(
    ("kind", "divisor", "op_type"),
    [(ir.DataType.FLOAT16, 1e-5, "Div"), (ir.DataType.FLOAT16, 60000.0, "Div"), (ir.DataType.FLOAT16, 8.0, "Mul"),
     (ir.DataType.BFLOAT16, 60000.0, "Mul"), (ir.DataType.FLOAT, 1e-39, "Div"), (ir.DataType.DOUBLE, 1e-39, "Mul")],
)  # fmt: skip
def test_a_quotient_is_a_product_where_the_type_holds_the_reciprocal(kind, divisor, op_type):
    """1e5 is infinite in float16, and 1 / 60000 has half of its digits."""
    x = value("x", [3], kind)
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 20}, name="g")
    tape = Tape(graph)
    for by in (divisor, tape.scalar(divisor, x)):
        assert tape.div(x, by).producer().op_type == op_type


def test_a_reshape_to_no_element_keeps_its_zeros():
    """Without `allowzero`, a zero stands for the size of the source."""
    x = value("x", [1, 4, 0, 4])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 20}, name="g")
    tape = Tape(graph)
    flat = tape.op("Squeeze", x, tape.ints(0), shape=(4, 0, 4))
    for name, made in {"once": tape.reshape(flat, (0, 4)), "chain": tape.reshape(tape.neg(flat), (0, 2, 8))}.items():
        made.name = name
        graph.outputs.append(made)
    model = ir.Model(graph, ir_version=10)
    simplify(model)
    assert "Squeeze" in {node.op_type for node in model.graph}  # before Neg; the other is one Reshape
    made = runtime.outputs(ir.to_proto(model), {"x": np.zeros((1, 4, 0, 4), np.float32)})
    assert {name: array.shape for name, array in made.items()} == {"once": (0, 4), "chain": (0, 2, 8)}


@pytest.mark.parametrize("op_type", ["RandomUniformLike", "Bernoulli", "Dropout"])
def test_simplify_keeps_random_nodes_apart(op_type):
    x = value("x", [1000])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 20}, name="g")
    emit = Emitter(graph, "forward")
    draws = [emit(op_type, x, like=x) for _ in range(2)]
    graph.outputs.extend(draws)
    model = ir.Model(graph, ir_version=10)
    simplify(model)
    assert len(model.graph) == 2
    onnx.checker.check_model(ir.to_proto(model))


@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd"])
@pytest.mark.parametrize(
    ("axes", "keepdims", "out", "left"),
    [([0], 1, [1, 6, 4], ["Neg"]), ([0], 0, [6, 4], ["Neg", "Reshape"]), ([1], 1, [1, 1, 4], ["Neg", "any"])],
)
def test_a_reduction_of_single_entries_is_none(op_type, axes, keepdims, out, left):
    x = value("x", [1, 6, 4])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 20}, name="g")
    emit = Emitter(graph, "backward")
    reduced = emit(op_type, emit("Neg", x, like=x), emit.constant(np.array(axes)), keepdims=keepdims)
    reduced.shape, reduced.type = ir.Shape(out), x.type
    graph.outputs.append(reduced)
    model = ir.Model(graph, ir_version=10)
    feeds = {"x": np.random.default_rng(0).standard_normal((1, 6, 4), np.float32)}
    before = runtime.outputs(ir.to_proto(model), feeds)
    simplify(model)
    after = runtime.outputs(ir.to_proto(model), feeds)
    assert [node.op_type for node in model.graph] == [op_type if kind == "any" else kind for kind in left]
    assert [a.tobytes() for a in before.values()] == [a.tobytes() for a in after.values()]


@pytest.mark.parametrize(("depth", "reduction"), [(1, "add"), (2, "add"), (1, "max")])
def test_no_sum_is_lost_where_rows_repeat(depth, reduction):
    """ONNX Runtime's ScatterND loses some of these on two threads and more."""
    shape = (5, 3, 64)
    data, where = value("data", shape), value("where", [2, 500, depth], ir.DataType.INT64)
    updates = value("updates", [2, 500, *shape[depth:]])
    graph = ir.Graph([data, where, updates], [], nodes=[], opset_imports={"": 20}, name="g")
    made = Emitter(graph, "backward")("ScatterND", data, where, updates, like=data, reduction=reduction, name="made")
    graph.outputs.append(made)
    model = ir.Model(graph, ir_version=10)
    rng = np.random.default_rng(0)
    feeds = {
        "data": rng.standard_normal(shape, np.float32),
        "where": rng.integers([-d for d in shape[:depth]], shape[:depth], (2, 500, depth)),
        "updates": rng.standard_normal((2, 500, *shape[depth:]), np.float32),
    }
    expected = feeds["data"].astype(np.float64)
    places = tuple(feeds["where"].reshape(-1, depth).T)
    {"add": np.add, "max": np.maximum}[reduction].at(expected, places, feeds["updates"].reshape(1000, *shape[depth:]))
    add_in_order(model)
    assert "ScatterND" not in {node.op_type for node in model.graph}
    assert {node.metadata_props["phase"] for node in model.graph} == {"backward"}
    for _ in range(5):
        assert check.relative_error(runtime.outputs(ir.to_proto(model), feeds)["made"], expected.astype("f4")) < 1e-6


@pytest.mark.parametrize("place", [[3, 0], [-4, 0], [0, 4], [0, -5]])
def test_a_sum_outside_the_array_stops_the_run(place):
    """As by ScatterND: it is not added to another row."""
    data, where, updates = value("data", [3, 4]), value("where", [2, 2], ir.DataType.INT64), value("updates", [2])
    graph = ir.Graph([data, where, updates], [], nodes=[], opset_imports={"": 20}, name="g")
    made = Emitter(graph, "backward")("ScatterND", data, where, updates, like=data, reduction="add", name="made")
    graph.outputs.append(made)
    model = ir.Model(graph, ir_version=10)
    add_in_order(model)
    feeds = {"data": np.zeros((3, 4), "f4"), "where": np.array([[1, 1], place]), "updates": np.ones(2, "f4")}
    with pytest.raises(ModelError, match="out of data bounds"):
        runtime.outputs(ir.to_proto(model), feeds)


@pytest.mark.parametrize("reader", ["Log", "Reciprocal", "Div", "Mul"])
def test_a_sigmoid_is_exact_where_its_logarithm_or_inverse_is_read(reader):
    """ONNX Runtime's is half of it at -16, and 0 from -18 on; as a factor that is near enough."""
    x = value("x", [9])
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 20}, name="g")
    emit = Emitter(graph, "forward")
    gate = emit("Sigmoid", x, like=x)
    emit(reader, *([x, gate] if reader in ("Div", "Mul") else [gate]), like=x)
    made = emit("Identity", gate, like=x, name="made")
    graph.outputs.append(made)
    model = ir.Model(graph, ir_version=10)
    exact_sigmoids(model)
    assert ("Sigmoid" in {node.op_type for node in graph}) == (reader == "Mul")
    points = np.array([-100, -80, -30, -18, -16, -5, 0, 5, 100], np.float32)
    found = runtime.outputs(ir.to_proto(model), {"x": points})["made"]
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-points.astype(float))), 1e-5 if reader != "Mul" else 1, 1e-38)


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16])
def test_widened_half_precision_rounds_as_it_does(kind):
    """Also where ONNX Runtime would compute without rounding in between: 250 squared is infinite in float16."""
    x = value("x", [100], ir.DataType.from_numpy(np.dtype(kind)))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 20}, name="g")
    emit = Emitter(graph, "forward")
    y = emit("Mul", emit("Mul", emit("Add", x, x, like=x), x, like=x), emit.scalar(0.3, x), like=x)
    y.name = "y"
    graph.outputs.append(y)
    data = (np.random.default_rng(0).standard_normal(100) * 100).astype(kind)
    model = ir.to_proto(widened(ir.Model(graph, ir_version=10)))
    with np.errstate(over="ignore"):
        expected = ((data + data) * data * kind(0.3)).astype(np.float32)
    for level in ("disable", "all"):
        found = runtime.outputs(model, {"x": data.astype(np.float32)}, level)["y"]
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "planning", [{"provider": "cuda"}, {"run_by": "session"}, {"arena": True}, {"fuse": False}, {"dims": {"batch": 4}}]
)
def test_what_runs_the_step_of_budgeted_is_no_option(planning):
    (name,) = planning
    shares.check_planning("JAX", {"provider": "cpu", "run_by": "loop", "effort": 1}, "cpu")
    with pytest.raises(UsageError, match=f"^planning={planning!r}: budgeted states it itself: leave '{name}' out$"):
        shares.check_planning("JAX", planning, "cpu")


def test_a_refusal_of_state_on_the_host_names_the_framework_that_keeps_it():
    with pytest.raises(UsageError, match=r"^planning={'offload_state': True}: JAX keeps the optimizer's state where"):
        shares.check_planning("JAX", {"offload_state": True}, "cpu")


def test_a_refusal_names_arguments_of_budgeted_and_when_a_budget_does_not_pay():
    advice = Message("no plan; {}", Message("try {}, or {}", Setting("budget", 20_000_000), Setting("effort", 60)))
    for own, said in ((30_000_000, ""), (18_000_000, "; that is more than PyTorch's own")):
        with pytest.raises(BudgetInfeasibleError) as refused, shares.of("PyTorch", own):
            raise BudgetInfeasibleError(advice, 1, 2)
        text = (
            f"PyTorch's own step takes {own // 10**6}.0 MB: no plan; try budget=20000000, or planning={{'effort': 60}}"
        )
        assert str(refused.value) == text + said
        assert refused.value.settings["budget"] == 20_000_000
