"""`Session`: the same results as onnxruntime's own, out of one slab; to the bit where nothing is fused."""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import onnx_remat
from onnx_remat import ModelError, Session, UsageError, rewrite_model
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Preparation, prepare
from onnx_remat.session import loading, plan_session
from onnx_remat.session.arrays import Array
from onnx_remat.session.training import Loop
from tests.support.graphs import feeds_for, mlp, model_of, run_model, same_at, same_bits, same_numbers
from tests.support.slow import few

pytest.importorskip("onnxruntime")

SAMPLE = Path(__file__).parents[2] / "sample_models" / "residual_cnn.onnx"
N = [64, 64]


def make(op, inputs, outputs, **attributes):
    return helper.make_node(op, inputs, outputs, name=outputs[0], **attributes)


def outputs_of(model, feeds, level="all"):
    return dict(zip([v.name for v in model.graph.output], run_model(model, feeds, level, threads=0), strict=True))


def assert_same(found, wanted, same=same_numbers):
    assert list(found) == list(wanted)
    assert same(found.values(), wanted.values())


class OnDevice:
    """What PyTorch, for example, shows of a tensor on a GPU."""

    def __init__(self, shape):
        shown = {"shape": tuple(shape), "typestr": "<f4", "data": (4096, False), "version": 3}
        self.__cuda_array_interface__ = shown


def test_an_array_of_a_device_is_refused_on_the_cpu():
    model = mlp(layers=2)
    feeds = feeds_for(model)
    there = feeds | {"x": OnDevice(feeds["x"].shape)}
    error = r"input 'x' lies on a device, where only an onnx_remat\.Session .* reads it: pass an array of the host"
    with Session(model, donate=True) as session:
        with pytest.raises(UsageError, match=error):
            session.run(there)
        for copy in (True, False):
            with pytest.raises(UsageError, match=error):
                Loop(session, there, copy=copy)


@pytest.mark.parametrize(
    ("level", "fuse"), few([("all", True), ("all", False), ("disable", True)], [("all", True)], several=True)
)
def test_a_step_as_exported_gives_the_same_results(level, fuse):
    """To the bit where no convolution of the step is one of oneDNN's."""
    model = onnx.load(SAMPLE)
    feeds = feeds_for(model)
    wanted = outputs_of(model, feeds, level)
    with Session(SAMPLE, level=level, fuse=fuse) as session:
        for _ in range(2):
            found = session.run(feeds)
            if fuse and level == "all":
                for name, value in wanted.items():
                    np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
            else:
                assert_same(found, wanted, same_bits)
        assert session.live_bytes <= session.slab_bytes


def test_a_rewritten_step_is_opened_from_its_result():
    model = mlp(layers=6, batch=512, width=64)
    result = rewrite_model(model, "75%", effort=0.5, run_by="session")
    feeds = feeds_for(model)
    with Session(result) as session:
        assert_same(session.run(feeds), outputs_of(result.model, feeds))
        rewritten = session.slab_bytes
    with Session(model) as session:
        assert rewritten < session.slab_bytes


def test_results_are_copies_unless_asked_for():
    model = mlp(layers=2, batch=64, width=64)
    first, second = feeds_for(model, 0), feeds_for(model, 1)
    with Session(model.SerializeToString()) as session:
        copies, views = session.run(first), session.run(first, copy=False)
        wanted = outputs_of(model, first)
        assert_same(copies, wanted)
        assert_same(views, wanted)
        session.run(second)
        assert_same(copies, wanted)
        assert_same(views, outputs_of(model, second))


def test_renewed_state_is_written_over_what_is_fed():
    model = mlp(layers=2, batch=64, width=64)
    feeds = feeds_for(model)
    wanted = outputs_of(model, feeds)
    with Session(model, donate=True) as session:
        assert (dict(session.donated), dict(session.not_donated)) == ({"new.w0": "w0", "new.w1": "w1"}, {})
        found = session.run(feeds)
    assert_same(found, wanted)
    assert found["new.w0"] is feeds["w0"]
    with Session(model, donate={"new.w1": "w1"}) as session:
        assert dict(session.donated) == {"new.w1": "w1"}


def odd_step():
    """Every kind of output: views, copies, scalars, empty ones, twice-read, unread, inputs and weights as they are."""
    nodes = [
        make("Exp", ["x"], ["a"]),
        make("Reshape", ["a", "flat"], ["view"]),
        make("Identity", ["view"], ["view of view"]),
        make("Sqrt", ["a"], ["unread"]),
        make("ReduceMean", ["a"], ["scalar"], keepdims=0),
        make("Slice", ["x", "start", "start"], ["empty"]),
        make("TopK", ["a", "k"], ["top", "where"]),
        make("Cast", ["top"], ["half"], to=TensorProto.FLOAT16),
        make("Greater", ["a", "x"], ["mask"]),
        make("Add", ["view of view", "view"], ["b"]),
    ]
    outputs = {
        "view": [4096], "scalar": [], "empty": [0, 64], "half": (TensorProto.FLOAT16, [64, 32]),
        "where": (TensorProto.INT64, [64, 32]), "mask": (TensorProto.BOOL, N), "b": [4096], "x": N,
        "weight": [64], "view of view": [4096],
    }  # fmt: skip
    constants = {
        "flat": np.array([-1]), "start": np.array([0]), "k": np.array([32]), "weight": np.arange(64, dtype=np.float32),
    }  # fmt: skip
    return model_of(nodes, {"x": N}, outputs, constants)


@pytest.mark.parametrize("level", few(["all", "disable"], ["all"]))
def test_odd_outputs(level):
    model = odd_step()
    feeds = feeds_for(model)
    with Session(model, level=level) as session:
        for _ in range(2):
            assert_same(session.run(feeds), outputs_of(model, feeds, level), same_at(level))


def body(nodes, inputs, outputs):
    def typed(named):
        return [helper.make_tensor_value_info(name, *kind) for name, kind in named.items()]

    return helper.make_graph(nodes, "body", typed(inputs), typed(outputs))


def control_flow_step():
    """An If that captures, a Loop and a Scan, between large values."""
    tensor, count, flag = (TensorProto.FLOAT, N), (TensorProto.INT64, []), (TensorProto.BOOL, [])
    then = body([make("Mul", ["a", "x"], ["t"])], {}, {"t": tensor})
    other = body([make("Identity", ["a"], ["o"])], {}, {"o": tensor})
    turn = body(
        [make("Identity", ["go"], ["go_on"]), make("Add", ["carried", "a"], ["next"])],
        {"i": count, "go": flag, "carried": tensor}, {"go_on": flag, "next": tensor},
    )  # fmt: skip
    row = (TensorProto.FLOAT, [64])
    scan = body(
        [make("Add", ["state", "slice"], ["state2"]), make("Identity", ["state2"], ["sum"])],
        {"state": row, "slice": row}, {"state2": row, "sum": row},
    )  # fmt: skip
    nodes = [
        make("Exp", ["x"], ["a"]),
        make("If", ["which"], ["b"], then_branch=then, else_branch=other),
        make("Loop", ["n", "", "b"], ["c"], body=turn),
        make("Scan", ["zero", "c"], ["last", "sums"], body=scan, num_scan_inputs=1),
        make("Sub", ["sums", "a"], ["y"]),
    ]
    constants = {"n": np.array(3), "zero": np.zeros(64, np.float32)}
    return model_of(nodes, {"x": N, "which": (TensorProto.BOOL, [])}, {"y": N, "b": N, "last": [64]}, constants)


@pytest.mark.parametrize("which", [True, False])
def test_bodies_stay_with_onnxruntime(which):
    model = control_flow_step()
    feeds = feeds_for(model) | {"which": np.array(which)}
    with Session(model) as session:
        assert_same(session.run(feeds), outputs_of(model, feeds))
        flipped = feeds | {"which": np.array(not which)}
        assert_same(session.run(flipped), outputs_of(model, flipped))


def test_weights_of_bodies_are_counted_once_and_as_long_as_the_session_lives():
    def branch(name, stated):
        weight = onnx.numpy_helper.from_array(np.ones(N, np.float32), f"{name}.w")
        made = body([make("Mul", ["a", f"{name}.w"], [name])], {}, {name: (TensorProto.FLOAT, N)})
        if stated == "node":
            made.node.insert(0, make("Constant", [], [f"{name}.w"], value=weight))
        else:
            made.initializer.append(weight)
        return made

    nodes = [
        make("Exp", ["x"], ["a"]),
        make("If", ["which"], ["b"], then_branch=branch("t", "node"), else_branch=branch("e", "weight")),
        make("Concat", ["b", "a", "x"], ["c"], axis=0), make("Exp", ["c"], ["y"]),
    ]  # fmt: skip
    model = model_of(nodes, {"x": N, "which": (TensorProto.BOOL, [])}, {"y": [192, 64]})
    each = 64 * 64 * 4
    with Session(model) as session:
        assert session.weight_bytes == 2 * each
        assert session.workspace_bytes < each
    alone = prepare(model, Preparation(CPU))
    assert alone.problem.base_bytes == 3 * each + 1  # with both inputs
    assert alone.problem.workspace.max() < each


def test_strings_and_sequences_stay_with_onnxruntime():
    nodes = [
        make("Exp", ["x"], ["a"]),
        make("SequenceConstruct", ["a", "x"], ["pair"]),
        make("ConcatFromSequence", ["pair"], ["both"], axis=0),
        make("Cast", ["i"], ["text"], to=TensorProto.STRING),
        make("Cast", ["text"], ["back"], to=TensorProto.INT64),
    ]
    model = model_of(nodes, {"x": N, "i": (TensorProto.INT64, N)}, {"both": [128, 64], "back": (TensorProto.INT64, N)})
    feeds = feeds_for(model)
    with Session(model) as session:
        assert_same(session.run(feeds), outputs_of(model, feeds))


def test_strings_cannot_be_fed():
    words = (TensorProto.STRING, [2])
    with pytest.raises(ModelError, match="'words' is not a tensor of numbers"):
        Session(model_of([make("Identity", ["words"], ["same"])], {"words": words}, {"same": words}))


@pytest.mark.parametrize(("kind", "name"), [(TensorProto.INT4, "INT4"), (TensorProto.UINT4, "UINT4")])
def test_types_that_numpy_lacks_are_refused_before_anything_runs(kind, name):
    nodes = [make("DequantizeLinear", ["q", "scale"], ["w"]), make("Mul", ["w", "w"], ["y"])]
    inputs = {"q": (kind, [8, 8]), "scale": (TensorProto.FLOAT, [])}
    model = model_of(nodes, inputs, {"y": (TensorProto.FLOAT, [8, 8])})
    model.opset_import[0].version, model.ir_version = 21, 10
    with pytest.raises(ModelError, match=f"'q' is of {name}, which numpy lacks"):
        Session(model)


def test_the_written_out_name_of_the_standard_domain():
    """Where the model imports it by its short name."""
    nodes = [make("Exp", ["x"], ["a"]), make("Tanh", ["a"], ["y"])]
    for node in nodes:
        node.domain = "ai.onnx"
    model = model_of(nodes, {"x": N}, {"y": N})
    feeds = feeds_for(model)
    with Session(model) as session:
        assert_same(session.run(feeds), outputs_of(model, feeds))


def test_symbolic_dimensions_are_bound_at_opening():
    model = mlp(layers=2, width=64, dims="batch")
    with pytest.raises(UsageError, match=r"not bound: pass dims=\{'batch': SIZE\}"):
        Session(model)
    with pytest.raises(UsageError, match="no symbolic dimension 'bach': it has batch; did you mean 'batch'"):
        Session(model, dims={"bach": 128})
    feeds = feeds_for(model, batch=128)
    with Session(model, dims={"batch": 128}) as session:
        assert_same(session.run(feeds), outputs_of(model, feeds))
        with pytest.raises(UsageError, match=r"input 'x' is of shape \[128, 64\], not \[64, 64\]"):
            session.run(feeds_for(model, batch=64))


def test_the_step_of_a_smaller_batch_has_the_slab_of_the_larger():
    model = mlp(layers=2, width=64, dims="batch")
    sizes = (128, 48)
    feeds = {size: feeds_for(model, batch=size) for size in sizes}
    with Session(model, dims={"batch": 128}) as large, Session(model, dims={"batch": 48}, slab_of=large) as small:
        views = [session.run(feeds[size], copy=False) for session, size in zip((large, small), sizes, strict=True)]
        assert any(np.shares_memory(a, b) for a in views[0].values() for b in views[1].values())
        for session, size in ((large, 128), (small, 48), (large, 128)):
            assert_same(session.run(feeds[size]), outputs_of(model, feeds[size]))
        with Session(model, dims={"batch": 128}, slab_of=small) as again:
            assert_same(again.run(feeds[128]), outputs_of(model, feeds[128]))
        large.close()
        assert_same(small.run(feeds[48]), outputs_of(model, feeds[48]))


def test_a_slab_that_is_too_small_is_not_shared():
    model = mlp(layers=2, width=64, dims="batch")
    feeds = feeds_for(model, batch=128)
    with Session(model, dims={"batch": 8}) as small, Session(model, dims={"batch": 128}, slab_of=small) as large:
        assert small.slab_bytes < large.slab_bytes
        assert_same(large.run(feeds), outputs_of(model, feeds))


@pytest.fixture(scope="module")
def opened():
    model = mlp(layers=2, batch=64, width=64)
    return Session(model, donate=True), feeds_for(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros(3)}, "the model has no input 'q': it has x, t, w0, w1"),
        ({"x": None}, "no value for input 'x'"),
        ({"x": np.zeros([64, 64])}, "input 'x' is of type float32, not float64"),
        ({"x": np.zeros([64, 63], np.float32)}, r"input 'x' is of shape \[64, 64\], not \[64, 63\]"),
        (
            {"w0": np.zeros([64, 128], np.float32)[:, ::2]},
            "'w0' is renewed in place: pass a contiguous, writeable array",
        ),
        (
            {"w0": np.broadcast_to(np.float32(0), [64, 64])},
            "'w0' is renewed in place: pass a contiguous, writeable array",
        ),
    ],
)
def test_feeds_are_checked_before_anything_runs(opened, change, message):
    session, feeds = opened
    wrong = {name: value for name, value in (feeds | change).items() if value is not None}
    before = {name: array.copy() for name, array in feeds.items()}
    with pytest.raises(UsageError, match=message):
        session.run(wrong)
    assert same_bits(before.values(), feeds.values())


def test_an_input_with_a_default_may_be_left_out_again():
    model = model_of([make("Mul", ["x", "s"], ["y"])], {"x": N, "s": [64]}, {"y": N}, {"s": np.full(64, 2, np.float32)})
    x, s = np.ones(N, np.float32), np.full(64, 3, np.float32)
    with Session(model) as session:
        found = [session.run(feeds)["y"][0, 0] for feeds in ({"x": x}, {"x": x, "s": s}, {"x": x})]
    assert found == [2, 3, 2]


@pytest.mark.slow
@pytest.mark.parametrize("fuse", [True, False])
def test_a_default_that_decides_shapes_is_fixed(fuse):
    """The plan counts on it; another value of a default that decides none is fine."""
    nodes = [
        make("Reshape", ["x", "to"], ["r"]), make("Tanh", ["r"], ["t"]),
        make("ReduceSum", ["t", "at"], ["s"], keepdims=0), make("Gather", ["s", "row"], ["y"]),
    ]  # fmt: skip
    given = {"to": np.array([4, 6]), "row": np.array([0])}
    x = np.arange(24, dtype=np.float32)
    sums = np.tanh(x.reshape(4, 6)).sum(0)
    fed = {"x": [24], "to": (TensorProto.INT64, [2]), "row": (TensorProto.INT64, [1])}
    with Session(model_of(nodes, fed, {"y": [1]}, given | {"at": np.array([0])}), fuse=fuse) as session:
        for feeds in ({"x": x}, {"x": x, "to": np.array([4, 6])}):
            np.testing.assert_allclose(session.run(feeds)["y"], sums[:1], rtol=1e-6)
        with pytest.raises(UsageError, match=r"input 'to' decides shapes, .* its default \[4, 6\]: leave it out"):
            session.run({"x": x, "to": np.array([2, 12])})
    del nodes[0]
    nodes[0].input[0] = "x"
    del fed["to"], given["to"]
    with Session(model_of(nodes, fed | {"x": [4, 6]}, {"y": [1]}, given | {"at": np.array([0])}), fuse=fuse) as session:
        found = session.run({"x": x.reshape(4, 6), "row": np.array([5])})["y"]
    np.testing.assert_allclose(found, sums[5:], rtol=1e-6)


@pytest.mark.parametrize("fuse", few([True, False], [True]))
@pytest.mark.parametrize("level", few(["disable", "all"], ["all"]))
def test_sizes_are_those_of_onnx_runtime_where_onnx_computes_others(level, fuse):
    """Its evaluator counts negative axes from the axes so far, and slices backwards as Python does."""
    axes, turned = helper.make_tensor("v", TensorProto.FLOAT, [4], [1, 2, 3, 4]), np.array([2, 3, 4])
    nodes = [make("Unsqueeze", ["v"], ["c"], axes=[-2, -1]), make("Mul", ["x", "c"], ["y"])]
    model = model_of(nodes, {"x": [4, 4, 8]}, {"y": [4, 4, 8]}, opset=12)
    model.graph.initializer.append(axes)
    x = np.random.default_rng(0).standard_normal((4, 4, 8), np.float32)
    with Session(model, level=level, fuse=fuse) as session:
        assert same_bits([session.run({"x": x})["y"]], [x * np.array([1, 2, 3, 4], np.float32)[:, None, None]])
    nodes = [
        make("Slice", ["v", "start", "end", "at", "step"], ["s"]), make("ReduceProd", ["s"], ["p"], keepdims=0),
        make("Cast", ["p"], ["f"], to=TensorProto.FLOAT), make("Mul", ["x", "f"], ["y"]),
    ]  # fmt: skip
    ends = {"start": np.array([-5]), "end": np.array([-10]), "at": np.array([0]), "step": np.array([-1])}
    with Session(model_of(nodes, {"x": [16]}, {"y": [16]}, {"v": turned, **ends}), level=level, fuse=fuse) as session:
        assert same_bits([session.run({"x": x[0, 0:2].reshape(16)})["y"]], [2 * x[0, 0:2].reshape(16)])


def test_arguments_are_checked(tmp_path):
    with pytest.raises(UsageError, match="provider 'tpu'"):
        Session(SAMPLE, provider="tpu")
    for threads in (-1, 2.5, True):
        with pytest.raises(UsageError, match=r"threads=.* is not a number of threads: use 1 or more"):
            Session(SAMPLE, threads=threads)
    with pytest.raises(UsageError, match="level must be one of"):
        Session(SAMPLE, level="most")
    with pytest.raises(UsageError, match="not int"):
        Session(3)
    with pytest.raises(ModelError, match="cannot read"):
        Session(tmp_path / "missing.onnx")
    with pytest.raises(UsageError, match="donate: the model has no output 'new'"):
        Session(SAMPLE, donate={"new": "old"})


@pytest.mark.parametrize("given", few(["a path", "a result"], ["a path"]))
def test_data_files_may_have_any_name_and_are_left_alone(tmp_path, given):
    names = ["lean.onnx", "lean.kernels", "lean", "model", "model.onnx"]
    weights = {name: np.full(512, i, np.float32) for i, name in enumerate(names)}
    step = model_of([make("Sum", ["x", *names], ["y"])], {"x": [512]}, {"y": [512]}, weights)
    for tensor in step.graph.initializer:
        (tmp_path / tensor.name).write_bytes(tensor.raw_data)
        onnx.external_data_helper.set_external_data(tensor, tensor.name)
        tensor.ClearField("raw_data")
    onnx.save(step, tmp_path / "step.onnx")
    result = SimpleNamespace(model=step, report=None, folder=tmp_path)
    with Session(tmp_path / "step.onnx" if given == "a path" else result) as session:
        np.testing.assert_array_equal(session.run({"x": weights["lean"]})["y"], np.full(512, 12, np.float32))
    assert all((tmp_path / name).read_bytes() == weight.tobytes() for name, weight in weights.items())


def test_a_lean_graph_is_not_written_into_a_data_file(tmp_path):
    """Whatever name it has to have: what is there may be a link to the user's file."""
    weight = {"w": np.ones(512, np.float32)}
    onnx.save(
        model_of([make("Mul", ["x", "w"], ["y"])], {"x": [512]}, {"y": [512]}, weight),
        tmp_path / "step.onnx", save_as_external_data=True, location="w.bin",
    )  # fmt: skip
    (tmp_path / "lean").mkdir()
    with suppress(ModelError):
        plan_session.arrange(tmp_path / "step.onnx", tmp_path / "lean" / "w.bin", plan_session.SessionRequest())
    assert (tmp_path / "w.bin").read_bytes() == weight["w"].tobytes()


def test_a_session_opened_by_path_is_picklable(tmp_path):
    model = mlp(layers=2, batch=64, width=64)
    onnx.save(model, tmp_path / "m.onnx")
    feeds = feeds_for(model)
    with Session(tmp_path / "m.onnx", level="basic") as session:
        again = pickle.loads(pickle.dumps(session))
        assert_same(again.run(feeds), session.run(feeds), same_bits)
        again.close()
    with Session(model) as session, pytest.raises(UsageError, match="opened from a path"):
        pickle.dumps(session)


def test_a_closed_session_says_so():
    model = mlp(layers=2, batch=64, width=64)
    session = Session(model)
    session.close()
    with pytest.raises(UsageError, match="closed"):
        session.run(feeds_for(model))
    session.close()


def test_a_long_error_keeps_its_end():
    long = RuntimeError("\n[ONNXRuntimeError] : 1 : FAIL : " + "x" * 400 + " out of data bounds\nmore")
    line = loading.first_line(long)
    assert len(line) < 310 and line.startswith("[ONNX") and line.endswith("out of data bounds")


def test_a_node_that_fails_is_named():
    model = model_of(
        [make("Exp", ["x"], ["a"]), make("Gather", ["a", "i"], ["y"])],
        {"x": N, "i": (TensorProto.INT64, [2])}, {"y": [2, 64]},
    )  # fmt: skip
    with Session(model) as session:
        with pytest.raises(ModelError, match="failed during the step"):
            session.run({"x": np.ones(N, np.float32), "i": np.array([0, 64])})
        assert session.run({"x": np.ones(N, np.float32), "i": np.array([0, 63])})["y"].shape == (2, 64)


def test_a_value_whose_stated_shape_is_wrong_is_named_with_the_right_one():
    """ONNX Runtime's own session warns, and goes on with the shape that it computes."""
    bounds = {"start": np.int64([0]), "end": np.int64([48])}
    model = model_of([make("Slice", ["x", *bounds], ["y"])], {"x": [64, 64]}, {"y": [32, 64]}, bounds)
    with Session(model, level="disable") as session, pytest.raises(ModelError) as refused:
        session.run({"x": np.ones([64, 64], np.float32)})
    assert str(refused.value).endswith("; 'y' states shape {32,64}, but is of shape {48,64}: correct it in the model")


def test_another_order_is_refused(monkeypatch, tmp_path):
    from onnx_remat.ort import runtime

    onnx.save(mlp(layers=2, batch=64, width=64), tmp_path / "m.onnx")
    right = runtime.order_by_priority
    monkeypatch.setattr(runtime, "order_by_priority", lambda *edges: right(*edges)[::-1])
    with pytest.raises(ModelError, match="would run 'mean' at position 0"):
        plan_session.plan(tmp_path / "m.onnx", tmp_path / "out.onnx", plan_session.SessionRequest(level="disable"))


def test_the_package_offers_it():
    assert onnx_remat.Session is Session


def open_step():
    """A sum divided by the number of entries, whatever the batch, and the shape of a value that is computed."""
    nodes = [
        make("Mul", ["x", "w"], ["y"]),
        make("Shape", ["y"], ["shape"]),
        make("Size", ["y"], ["count"]),
        make("Gather", ["shape", "zero"], ["rows"]),
        make("Cast", ["count"], ["number"], to=onnx.TensorProto.FLOAT),
        make("Unsqueeze", ["rows", "axis"], ["row"]),
        make("Concat", ["row", "rest"], ["wanted"], axis=0),
        make("Reshape", ["y", "wanted"], ["flat"]),
        make("ReduceSum", ["flat"], ["sum"], keepdims=0),
        make("Div", ["sum", "number"], ["loss"]),
    ]
    given = {"zero": np.array(0), "axis": np.array([0]), "rest": np.array([-1])}
    return model_of(nodes, {"x": ["batch", 3, 4], "w": [3, 4]}, {"loss": []}, given)


@pytest.mark.parametrize("level", few(["disable", "all"], ["all"]))
def test_nothing_is_computed_from_sizes_that_are_known(level):
    model = open_step()
    feeds = {"x": np.arange(60, dtype=np.float32).reshape(5, 3, 4), "w": np.ones((3, 4), np.float32)}
    with Session(model, dims={"batch": 5}, level=level) as session:
        assert session.node_count <= 4  # Mul, Reshape, ReduceSum, Div
        assert_same(session.run(feeds), outputs_of(model, feeds, level), same_at(level))


def test_a_size_that_is_an_output_is_still_made():
    nodes = [
        make("Shape", ["x"], ["shape"]), make("Gather", ["shape", "zero"], ["rows"]),
        make("ReduceSum", ["x"], ["loss"], keepdims=0),
    ]  # fmt: skip
    model = model_of(nodes, {"x": ["batch", 4]}, {"rows": [], "loss": []}, {"zero": np.array(0)})
    model.graph.output[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
    with Session(model, dims={"batch": 3}) as session:
        assert session.run({"x": np.ones((3, 4), np.float32)})["rows"] == 3


def test_a_file_is_opened_with_the_sizes_it_was_planned_for():
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]> g (float[batch, 4] x) => (float[batch, 4] y) { y = Tanh(x) }'
    )
    planned = onnx.ModelProto()
    planned.CopyFrom(model)
    onnx.helper.set_model_props(planned, {"onnx_remat.dims": '{"batch": 8, "gone": 2}'})
    for dims, batch in ((None, 8), ({"batch": 3}, 3)):
        with Session(planned, dims=dims) as session:
            assert session.run({"x": np.ones((batch, 4), np.float32)})["y"].shape == (batch, 4)
    with pytest.raises(UsageError, match="pass dims="):
        Session(model)
    planned.metadata_props[0].value = "{"
    with pytest.raises(UsageError, match="pass dims="):
        Session(planned)


@pytest.mark.parametrize("level", few(["all", "disable"], ["all"]))
def test_initializers_before_ir_version_4_are_no_inputs(level):
    """Although they are listed as such: onnxruntime takes them as constants."""
    model = model_of([make("Mul", ["x", "w"], ["y"])], {"x": [512], "w": [512]}, {"y": [512]})
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(512, 2, np.float32), "w"))
    model.opset_import[0].version, model.ir_version = 9, 3
    ones = np.ones(512, np.float32)
    with Session(model, level=level) as session:
        assert [array.name for array in session.inputs] == ["x"] and session.defaults == ()
        np.testing.assert_array_equal(session.run({"x": ones})["y"], ones * 2)
        with pytest.raises(UsageError, match="the model has no input 'w': it has x"):
            session.run({"x": ones, "w": ones})


@pytest.mark.slow
def test_sizes_that_follow_from_a_batch_are_not_those_that_a_file_was_planned_for():
    """ONNX's own inference cannot compute `rows`, behind a Max; the plan was for 32,768 of them."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        g (float[batch, 64] x) => (float[batch, 64] y)
        <int64[1] last = {-1}, int64[1] one = {1}, int64[2] as_x = {-1, 64}, float[rows, 1] zeros> {
            flat = Reshape(x, last)
            sizes = Shape(flat)
            pair = Concat<axis = 0>(sizes, one)
            both = Max(pair, one)
            zeros = ConstantOfShape(both)
            column = Unsqueeze(flat, one)
            less = Sub(zeros, column)
            again = Reshape(less, as_x)
            y = Tanh(again)
        }""")
    onnx.helper.set_model_props(model, {"onnx_remat.dims": '{"batch": 512, "rows": 32768}'})
    for dims, batch in ((None, 512), ({"batch": 40}, 40), ({"batch": 40, "rows": 2560}, 40)):
        feeds = {"x": np.linspace(-1, 1, 64 * batch, dtype=np.float32).reshape(batch, 64)}
        for level in ("disable", "all"):
            with Session(model, dims=dims, level=level) as session:
                assert_same(session.run(feeds), outputs_of(model, feeds, level))


@pytest.mark.parametrize("value", [1.5, -0.0078125, np.inf])
def test_the_number_of_an_array_of_bits(value):
    """numpy has no bfloat16."""
    bits = (np.array([value], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert Array("loss", onnx.TensorProto.BFLOAT16, ()).number(bits) == value
    assert Array("loss", onnx.TensorProto.FLOAT, ()).number(np.float32([value])) == value


@pytest.mark.parametrize("op", few(["Max", "Min"], ["Max"]))
@pytest.mark.parametrize("opset", few([7, 17], [7]))
def test_the_second_operand_of_an_old_maximum_is_read_late(op, opset):
    nodes = [make("Exp", ["z"], ["u"]), make(op, ["x", "u"], ["y"])]
    model = model_of(nodes, {"x": N, "z": N}, {"y": N})
    model.opset_import[0].version = opset
    feeds = feeds_for(model)
    with Session(model, fuse=False) as session:
        assert_same(session.run(feeds), outputs_of(model, feeds, "disable"), same_bits)
