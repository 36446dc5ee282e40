"""Sessions whose elementwise nodes are fused: the same bits, no larger a slab, and unfused where that cannot be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_remat.errors import ModelError
from onnx_remat.fuse import shim
from onnx_remat.ir.shapes import Tensor
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.session import fusing, kernel_file, offsets, plan_session
from onnx_remat.session import session as session_module
from onnx_remat.session.bookkeeping import bookkeeping_bytes, values_of
from onnx_remat.session.lean_graph import LeanNode
from onnx_remat.session.session import Session
from onnx_remat.session.training import Loop
from sample_models.chain import chain
from tests.support import poisoned
from tests.support.fusing import bits, why_not
from tests.support.graphs import mlp

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")


def adam(rows: int = 48) -> onnx.ModelProto:
    """A step of Adam on a matrix and a bias, with a normalisation in the forward pass: broadcasts, state, masks."""
    node = helper.make_node
    nodes = [
        node("MatMul", ["input.0", "w"], ["h0"]), node("Add", ["h0", "b"], ["h1"]),
        node("ReduceMean", ["h1"], ["mean"], axes=[0]), node("Sub", ["h1", "mean"], ["h2"]),
        node("Mul", ["h2", "h2"], ["h3"]), node("ReduceMean", ["h3"], ["var"], axes=[0]),
        node("Add", ["var", "eps"], ["var1"]), node("Sqrt", ["var1"], ["sd"]), node("Div", ["h2", "sd"], ["h4"]),
        node("Relu", ["h4"], ["h5"]), node("Greater", ["h4", "zero"], ["on"]), node("Cast", ["on"], ["mask"], to=1),
        node("ReduceMean", ["h5"], ["loss"], keepdims=0), node("Mul", ["mask", "rate"], ["g1"]),
        node("Transpose", ["input.0"], ["xt"], perm=[1, 0]), node("MatMul", ["xt", "g1"], ["gw"]),
        node("ReduceSum", ["g1", "first"], ["gb"], keepdims=0),
    ]  # fmt: skip
    for name, gradient in (("w", "gw"), ("b", "gb")):
        n = lambda part, name=name: f"{name}.{part}"  # noqa: E731
        nodes += [
            node("Mul", [f"state.{name}.m", "beta"], [n("a")]), node("Mul", [gradient, "rest"], [n("b")]),
            node("Add", [n("a"), n("b")], [f"new.state.{name}.m"]),
            node("Mul", [gradient, gradient], [n("c")]), node("Mul", [n("c"), "rest"], [n("d")]),
            node("Mul", [f"state.{name}.v", "beta"], [n("e")]), node("Add", [n("e"), n("d")], [f"new.state.{name}.v"]),
            node("Sqrt", [f"new.state.{name}.v"], [n("f")]), node("Add", [n("f"), "eps"], [n("g")]),
            node("Div", [f"new.state.{name}.m", n("g")], [n("h")]), node("Mul", [n("h"), "rate"], [n("i")]),
            node("Sub", [name, n("i")], [f"new.{name}"]),
        ]  # fmt: skip
    shapes = {"w": [64, 96], "b": [96], "input.0": [rows, 64]}
    shapes |= {f"state.{name}.{part}": shapes[name] for name in "wb" for part in "mv"}
    made = {f"new.{name}": shape for name, shape in shapes.items() if name != "input.0"} | {"loss": []}
    weights = [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in
               {"eps": 1e-5, "zero": 0.0, "rate": 0.05, "beta": 0.9, "rest": 0.1}.items()]  # fmt: skip
    weights.append(numpy_helper.from_array(np.array([0]), "first"))
    values = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in each.items()]
        for each in (shapes, made)
    ]
    graph = helper.make_graph(nodes, "adam", *values, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def feeds_of(opened: Session) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    kinds = {np.dtype(np.float32): rng.standard_normal, np.dtype(np.float64): rng.standard_normal}
    return {
        each.name: np.abs(kinds[np.dtype(each.dtype_name)](each.shape)).astype(each.dtype_name)
        if each.dtype_name.startswith("float")
        else rng.integers(0, 2, each.shape).astype(each.dtype_name)
        for each in opened.inputs
    }


@pytest.mark.parametrize("level", ["all", pytest.param("basic", marks=pytest.mark.slow)])
def test_a_fused_step_gives_the_same_bits_in_no_larger_a_slab(level, tmp_path):
    path = tmp_path / "adam.onnx"
    onnx.save(adam(), path)
    before = path.read_bytes()
    with (
        Session(path, donate=True, level=level) as one,
        Session(path, donate=True, level=level, fuse=False) as other,
    ):
        assert one.kernel_count > 2 and not one.not_fused
        assert one.node_count < one.unfused_node_count == other.node_count and not other.kernel_count
        assert one.slab_bytes <= other.slab_bytes and one.donated == other.donated
        first, second = feeds_of(one), feeds_of(other)
        for _ in range(3):
            got, wanted = one.run(first), other.run(second)
            assert got.keys() == wanted.keys()
            for name, array in wanted.items():
                np.testing.assert_array_equal(bits(got[name]), bits(array), name)
    assert path.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: mlp(layers=3, batch=96, width=64), lambda: chain(5, 64, 32)])
def test_samples_give_the_same_results(make):
    with Session(make()) as one, Session(make(), fuse=False) as other:
        got, wanted = one.run(feeds_of(one)), other.run(feeds_of(other))
        for name, array in wanted.items():
            np.testing.assert_allclose(got[name], array, rtol=2e-5, atol=2e-6, err_msg=name)
        assert one.slab_bytes <= other.slab_bytes


def test_without_optimisations_nothing_is_fused():
    with Session(adam(), level="disable") as opened:
        assert not opened.kernel_count and not opened.not_fused
        assert opened.node_count == opened.unfused_node_count


def test_a_fused_step_reads_nothing_that_is_dead(tmp_path):
    """Node by node in a slab whose dead bytes are filled with NaNs: fused kernels too find what they read."""
    path = tmp_path / "adam.onnx"
    onnx.save(adam(), path)
    with Session(path, fuse=False) as opened:
        feeds = feeds_of(opened)
        wanted = opened.run({name: array.copy() for name, array in feeds.items()})
    secret = shim.new_secret()
    found = poisoned.outputs(path, plan_session.SessionRequest(donate=True, secret=secret), feeds)
    for name, array in wanted.items():
        np.testing.assert_array_equal(bits(found[name]), bits(array), name)


@pytest.mark.slow
def test_a_loop_trains_the_same():
    with Session(adam(), fuse=False) as opened:
        start = feeds_of(opened)
    loops = [Loop(adam(), start, fuse=fuse) for fuse in (True, False)]
    losses = [[loop.step() for _ in range(3)] for loop in loops]
    assert losses[0] == losses[1]
    for name, array in loops[1].state().items():
        np.testing.assert_array_equal(bits(loops[0].state()[name]), bits(array), name)


def test_a_pickled_session_is_fused_or_not_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "adam.onnx"
    onnx.save(adam(), path)
    with Session(path, fuse=False) as opened:
        again, given = opened.__reduce__()
    monkeypatch.setattr(session_module, "Session", lambda *_, **options: options["fuse"])
    assert again(*given) is False


def test_without_the_library_a_step_runs_unfused_and_one_line_says_so(monkeypatch):
    monkeypatch.setattr(session_module.shim, "why_not", lambda: "there is no C compiler")
    with pytest.warns(UserWarning, match="steps run unfused, which takes longer: there is no C compiler"):
        opened = Session(adam())
    with opened:
        assert not opened.kernel_count and opened.not_fused == "there is no C compiler"
        assert np.isfinite(opened.run(feeds_of(opened))["loss"])


def test_with_an_old_runtime_a_step_runs_unfused(monkeypatch):
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "__version__", "1.19.2")
    assert session_module._why_not_fused() == "kernels have the bits of onnxruntime 1.22 and newer, not of 1.19.2"


def test_a_file_with_a_fused_node_is_refused():
    model = chain(3, 16, 8)
    model.graph.node[0].op_type, model.graph.node[0].domain = "Fused", "onnx_remat"
    for name, number in (("secret", 1), ("handle", 0)):
        model.graph.node[0].attribute.append(helper.make_attribute(name, number))
    model.opset_import.append(helper.make_opsetid("onnx_remat", 1))
    with pytest.raises(ModelError):
        Session(model, level="disable")


def test_the_same_step_has_the_same_kernels_and_never_takes_more(tmp_path, monkeypatch):
    path = tmp_path / "adam.onnx"
    onnx.save(adam(), path)
    made = plan_session.arrange(path, tmp_path / "copy.onnx", plan_session.SessionRequest(donate=True))

    def fused():
        return fusing.fuse_step(made, offsets.LEAST, 1)

    first, second = fused(), fused()
    assert first.kernels == second.kernels and len(first.kernels) > 2
    nodes = [[step.node.SerializeToString() for step in each.program.steps] for each in (first, second)]
    assert nodes[0] == nodes[1]
    assert first.offsets.height <= made.offsets.height and first.offsets.donated == made.offsets.donated
    books = bookkeeping_bytes(values_of(first.program.steps), len(first.kernels))
    assign, saved = offsets.assign, bookkeeping_bytes(values_of(made.program.steps)) - books
    monkeypatch.setattr(offsets, "assign", lambda *a: replace(assign(*a), height=made.offsets.height + 64))
    assert fused().kernels == first.kernels  # fewer nodes save more than a layout that is a little higher
    monkeypatch.setattr(offsets, "assign", lambda *a: replace(assign(*a), height=made.offsets.height + saved))
    assert "slab would take" in fused().why_not
    monkeypatch.setattr(offsets, "assign", lambda *a: replace(assign(*a), donated={}))
    assert fused().why_not == "less of its state could be renewed in place"


def test_where_the_runtime_changes_the_fused_step_it_runs_unfused(tmp_path, monkeypatch):
    from onnx_remat.session import lean_graph

    right = lean_graph.difference
    monkeypatch.setattr(
        lean_graph, "difference",
        lambda planned, loaded: "changed" if any(n.op_type == "Fused" for n in planned.graph.node)
        else right(planned, loaded),
    )  # fmt: skip
    path = tmp_path / "adam.onnx"
    onnx.save(adam(), path)
    made = plan_session.arrange(path, tmp_path / "copy.onnx", plan_session.SessionRequest(secret=5))
    assert not made.kernels and made.fused.why_not == "onnxruntime changes it when it loads it"
    assert not kernel_file.path_of(tmp_path / "copy.onnx").exists()


def test_a_kernel_that_reads_a_view_is_not_written_over_its_owner():
    """Kernels of groups name the owner, those of libraries the view."""
    node = helper.make_node("Fused", ["view", "x"], ["y"])
    tensors = dict.fromkeys(("owner", "view", "x", "y"), Tensor(TensorProto.FLOAT, (4, 4), 64, (4, 4)))
    for plain in (frozenset[int](), frozenset({0}), frozenset({0, 1})):
        step = LeanNode(node, plain=plain)
        program = offsets.Program((step,), tensors, ("owner", "x"), ("y",), {"view": "owner"}, kernels_of("cpu"))
        assert offsets.overwrites_safely(program, 0, "y", "owner") is (0 in plain)
        assert offsets.overwrites_safely(program, 0, "y", "x") is (1 in plain)
