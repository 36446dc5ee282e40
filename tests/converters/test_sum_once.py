"""Sums over the steps of a sequence: one product, the same numbers, and only where operands are small."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx_remat.converters.passes.sum_once import sum_once

ort = pytest.importorskip("onnxruntime")

STEPS, BATCH, LEFT, RIGHT = 6, 2, 12, 8
STACKS = {
    "none": "",
    "of matrices": "stack = Concat<axis = 0>({parts}) again = Mul(stack, stack)",
    "of steps, from the last": ("{views} stack = Concat<axis = 0>({backwards}) again = Mul(stack, stack)"),
}


def step(stack: str = "none", batch: int = BATCH, last: str = "e", scale: str = "") -> onnx.ModelProto:
    """The gradients of a weight and of a bias, summed over steps that begin with the last, and one more term."""
    a, b = [f"a{i}" for i in range(STEPS)], [f"b{i}" for i in range(STEPS)]
    products = " ".join(f"p{i} = Gemm<transA = 1{scale}>({a[i]}, {b[i]})" for i in range(STEPS))
    rows = " ".join(f"s{i} = ReduceSum<keepdims = 1>({a[i]}, axes) r{i} = Reshape(s{i}, flat)" for i in range(STEPS))
    sums = "w0 = Add(p5, e) v0 = Add(r5, f)"
    for i in range(1, STEPS):
        at = STEPS - 1 - i
        sums += f" w{i} = Add(w{i - 1}, p{at}) v{i} = Add(v{i - 1}, r{at})"
    views = " ".join(f"u{i} = Unsqueeze({a[i]}, axes)" for i in range(STEPS))
    stacked = STACKS[stack].format(
        parts=", ".join(a), views=views, backwards=", ".join(f"u{i}" for i in reversed(range(STEPS)))
    )
    grown = " ".join(f"{name} = Neg(in_{name})" for name in a)
    given = ", ".join(
        [f"float[{batch},{LEFT}] in_{name}" for name in a] + [f"float[{batch},{RIGHT}] {name}" for name in b]
    )
    shape = f"[{STEPS},{batch},{LEFT}]" if "steps" in stack else f"[{STEPS * batch},{LEFT}]"
    more = f", float{shape} again" if stacked else ""
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 20]> g ({given}, float[{LEFT},{RIGHT}] e, float[{LEFT}] f) => '
        f"(float[{LEFT},{RIGHT}] w{STEPS - 1}, float[{LEFT}] v{STEPS - 1}{more}) "
        f"<int64[1] axes = {{0}}, int64[1] flat = {{{LEFT}}}> {{ {grown} {products} {rows} {sums} {stacked} }}"
    )
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto:
    inside = ir.from_proto(model)
    sum_once(inside)
    made = ir.to_proto(inside)
    onnx.checker.check_model(made, full_check=True)
    return made


def outputs(model: onnx.ModelProto) -> list[np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    return session.run(
        None, {each.name: rng.normal(size=each.shape).astype(np.float32) for each in session.get_inputs()}
    )


def ops(model: onnx.ModelProto) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.node)


@pytest.mark.parametrize("stack", [stack for stack in STACKS if stack != "none"])
def test_a_sum_of_products_is_one_product_where_the_step_stacks_operands(stack):
    model = step(stack)
    made = rewritten(model)
    found = ops(made)
    assert (found["Gemm"], found["Concat"], found["ReduceSum"], found["Add"]) == (1, 2, 1, 2)
    for ours, theirs in zip(outputs(made), outputs(model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("batch", "products"), [(1, 3), (2, 6)])
def test_what_is_stacked_for_a_product_is_no_larger_than_the_product(batch, products):
    """Four steps of one row are stacked, and two are left; of two rows, four would not fit."""
    assert ops(rewritten(step(batch=batch)))["Gemm"] == products


def test_a_stack_in_a_branch_is_not_used():
    """It exists in that branch alone."""
    model = step()
    shape = [STEPS * BATCH, LEFT]
    inside = onnx.helper.make_node("Concat", [f"a{i}" for i in range(STEPS)], ["inner"], axis=0)
    other = onnx.helper.make_node("ConstantOfShape", ["shape"], ["other"])
    branches = {
        name: onnx.helper.make_graph([node], name, [], [onnx.helper.make_tensor_value_info(node.output[0], 1, shape)])
        for name, node in (("then_branch", inside), ("else_branch", other))
    }
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(shape), "shape"))
    model.graph.node.append(onnx.helper.make_node("If", ["which"], ["stacked"], **branches))
    model.graph.input.append(onnx.helper.make_tensor_value_info("which", onnx.TensorProto.BOOL, []))
    model.graph.output.append(onnx.helper.make_tensor_value_info("stacked", 1, shape))
    assert ops(rewritten(model)) == ops(model)


def test_the_gradient_stays_a_value_where_an_optimizer_adds_to_it():
    model = step("of matrices")
    for node in model.graph.node:
        phase = node.metadata_props.add()
        phase.key, phase.value = "phase", "optimizer" if node.output[0] == f"w{STEPS - 1}" else "backward"
    made = rewritten(model)
    (last,) = (node for node in made.graph.node if node.output[0] == f"w{STEPS - 1}")
    phases = {node.op_type: node.metadata_props[0].value for node in made.graph.node}
    assert last.op_type == "Add" and phases["Gemm"] == "backward"


def test_long_sums_are_products_of_a_few_terms_each(monkeypatch):
    monkeypatch.setattr(import_module(sum_once.run.__module__), "_FEWEST", 2)
    model = step(batch=2)
    made = rewritten(model)
    assert ops(made)["Gemm"] == 3
    for ours, theirs in zip(outputs(made), outputs(model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_scaled_products_and_those_that_others_read_stay():
    assert ops(rewritten(step("of matrices", scale=", alpha = 0.5")))["Gemm"] == STEPS
    model = step(batch=1)
    shown = model.graph.output.add()
    shown.CopyFrom(next(value for value in model.graph.value_info if value.name == "p0"))
    made = rewritten(model)
    assert ops(made)["Gemm"] == 3
    for ours, theirs in zip(outputs(made), outputs(model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_sum_of_thousands_of_terms_is_read():
    """Its Adds are a chain as deep as it has terms."""
    text = " ".join(f"y{i + 1} = Add(y{i}, x)" for i in range(3000))
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["" : 20]> g (float[4] x) => (float[4] y3000) {{ y0 = Neg(x) {text} }}'
    )
    assert len(rewritten(onnx.shape_inference.infer_shapes(model)).graph.node) == 3001


@pytest.mark.slow
def test_a_recurrent_layer_has_one_product_for_each_weight():
    torch = pytest.importorskip("torch")
    from onnx_remat.converters.pytorch import export_training_step

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = torch.nn.LSTM(16, 16, num_layers=2), torch.nn.Linear(16, 4)

        def forward(self, x):
            return self.head(self.layers(x)[0][-1])

    torch.manual_seed(0)
    batch = (torch.randn(4, 4, 16), torch.randint(0, 4, (4,)))
    model = export_training_step(Model(), batch, torch.nn.functional.cross_entropy)
    turned = [
        n for n in model.graph.node if n.op_type == "Gemm" and any(a.name == "transA" and a.i for a in n.attribute)
    ]
    assert len(turned) == 5
