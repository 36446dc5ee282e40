"""Transposes that ONNX Runtime folds into MatMul take no memory in a plan for a loop."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnx_remat import rewrite_model
from onnx_remat.ir.state import rename
from onnx_remat.memory import buffers
from onnx_remat.options import Options
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.folded import with_folded_transposes
from onnx_remat.ort.prepare import prepare
from onnx_remat.ort.renewed import with_donations

pytest.importorskip("onnxruntime")

LAYERS, ROWS, COLUMNS = 12, 1024, 12


def columns() -> onnx.ModelProto:
    """A chain whose gradients multiply columns: each layer gathers many of its input, and transposes them."""
    size, many = f"float[{ROWS},256]", 256 * COLUMNS
    lines, weights, h = [], [], "x"
    for i in range(LAYERS):
        weights.append(f"w{i}")
        lines += [f"a{i} = MatMul ({h}, w{i})", f"h{i} = Tanh (a{i})"]
        h = f"h{i}"
    lines += [f"s = Mul ({h}, {h})", "loss = ReduceMean <keepdims = 0> (s)", f"g{LAYERS} = Neg ({h})"]
    for i in reversed(range(LAYERS)):
        read = f"h{i - 1}" if i else "x"
        lines += [
            f"q{i} = Mul (h{i}, h{i})", f"r{i} = Sub (one, q{i})", f"d{i} = Mul (g{i + 1}, r{i})",
            f"c{i} = Gather <axis = 1> ({read}, index)", f"t{i} = Transpose <perm = [1, 0]> (c{i})",
            f"p{i} = MatMul (t{i}, d{i})", f"e{i} = MatMul (fold, p{i})", f"u{i} = Mul (e{i}, rate)",
            f"n{i} = Sub (w{i}, u{i})", f"v{i} = Transpose <perm = [1, 0]> (w{i})", f"g{i} = MatMul (d{i}, v{i})",
        ]  # fmt: skip
    inputs = ", ".join([f"{size} x", *(f"float[256,256] {name}" for name in weights)])
    outputs = ", ".join(["float loss", *(f"float[256,256] n{i}" for i in range(LAYERS))])
    model = onnx.parser.parse_model(
        f'<ir_version: 9, opset_import: ["": 17]> g ({inputs}) => ({outputs}) '
        f"<float one = {{1.0}}, float rate = {{0.001}}> {{ {chr(10).join(lines)} }}"
    )
    fold = np.tile(np.eye(256, dtype="f"), (1, COLUMNS))
    index = np.arange(many, dtype="q") % 256
    model.graph.initializer.extend([
        onnx.numpy_helper.from_array(fold, "fold"), onnx.numpy_helper.from_array(index, "index"),
    ])  # fmt: skip
    return model


def test_only_transposes_that_products_alone_read_are_folded():
    model = columns()
    model.graph.node.append(onnx.helper.make_node("Neg", ["t3"], ["more"]))
    model.graph.output.append(onnx.helper.make_tensor_value_info("more", onnx.TensorProto.FLOAT, [256 * COLUMNS, ROWS]))
    stated = Options(run_by="loop").preparation()
    compiled = prepare(model, stated)
    executed = as_executed(compiled.graph.model, None, "all", stated, compiled).compiled
    problem = with_folded_transposes(compiled.problem, compiled, executed)
    viewed = {
        op.outputs[0] for at, op in enumerate(compiled.graph.ops)
        if problem.alias_slot[problem.out_ptr[at]] != compiled.problem.alias_slot[problem.out_ptr[at]]
    }  # fmt: skip
    assert viewed >= {f"t{i}" for i in range(LAYERS) if i != 3} and "t3" not in viewed
    assert all(name[0] in "tv" for name in viewed)
    order = compiled.default_order()
    assert buffers.simulate(problem, order).peak <= buffers.simulate(compiled.problem, order).peak
    problem = with_folded_transposes(compiled.problem, compiled, compiled)
    assert problem is compiled.problem  # nothing is folded: every value is there


def test_state_that_the_step_overwrites_has_no_views():
    """Its update may run before a product that reads a copy."""
    model = columns()
    rename(model.graph, {f"n{i}": f"new.w{i}" for i in range(LAYERS)})
    stated = Options(run_by="loop").preparation()
    compiled = prepare(model, stated)
    executed = as_executed(compiled.graph.model, None, "all", stated, compiled).compiled
    plain = with_donations(compiled).problem
    problem = with_folded_transposes(plain, compiled, executed)
    viewed = {
        op.outputs[0] for at, op in enumerate(compiled.graph.ops)
        if problem.alias_slot[problem.out_ptr[at]] != plain.alias_slot[problem.out_ptr[at]]
    }  # fmt: skip
    assert viewed == {f"t{i}" for i in range(LAYERS)}


def test_a_plan_for_a_loop_does_not_pay_for_them():
    """With them in memory, no plan is within this budget, and the file of a first look recomputes 3.2 %."""
    result = rewrite_model(columns(), "70%", state_outputs={f"w{i}": f"n{i}" for i in range(LAYERS)}, effort=0.3)
    assert result.report.loop_after.total <= result.report.budget
    assert result.report.extra_compute < 0.025


@pytest.mark.parametrize(("ir_version", "may_be_fed"), [(9, True), (3, False)])
def test_what_is_made_of_an_input_with_a_default_is_not_folded(ir_version, may_be_fed):
    """From IR version 4 on a caller may feed it: ONNX Runtime computes the value in each run."""
    model = onnx.parser.parse_model(f"""<ir_version: {ir_version}, opset_import: ["": 17]>
        g (float[4] x, float[4] w) => (float[4] y) <float[4] w = {{1.0, 2.0, 3.0, 4.0}}> {{
            e = Exp (w)  y = Mul (x, e)
        }}""")
    assert prepare(model, Options().preparation()).table.foldable == (not may_be_fed, False)


@pytest.mark.parametrize("given", ["", ", float[4] w"])
def test_only_inputs_are_updated_in_place(given):
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 17]>
        g (float[4] x{given}) => (float loss, float[4] next) <float[4] w = {{1.0, 2.0, 3.0, 4.0}}> {{
            loss = ReduceSum <keepdims = 0> (x)  next = Sub (w, x)
        }}""")
    rename(model.graph, {"next": "new.w"})
    donates = with_donations(prepare(model, Options().preparation())).problem.donates
    assert (donates >= 0).any() == bool(given)
