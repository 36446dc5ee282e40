"""Arrays that a session is given: which are refused, and that none changes which should not."""

from __future__ import annotations

import threading
from types import MappingProxyType

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_remat import ModelError, Session, UsageError
from onnx_remat.session import heap
from onnx_remat.session.training import Loop
from tests.support.graphs import model_of

pytest.importorskip("onnxruntime")

N = [64, 64]
node = helper.make_node


def two_states():
    """A step that renews two inputs, and reads a third."""
    nodes = [
        node("Mul", ["m", "x"], ["new.m"]), node("Add", ["v", "new.m"], ["new.v"]),
        node("ReduceMean", ["new.v"], ["loss"], keepdims=0),
    ]  # fmt: skip
    return model_of(nodes, dict.fromkeys("mvx", N), {"new.m": N, "new.v": N, "loss": []})


def numbers(seed=0):
    return np.random.default_rng(seed).standard_normal(N).astype(np.float32)


@pytest.mark.parametrize("among", [["m", "v"], ["m", "x"], ["x", "v"]], ids=str)
def test_a_renewed_array_that_shares_memory_is_refused(among):
    with Session(two_states(), donate=True) as session:
        shared = numbers()
        with pytest.raises(UsageError, match=r"share memory: pass a copy of one"):
            session.run({name: numbers() for name in "mvx"} | dict.fromkeys(among, shared))
        session.run({name: numbers() for name in "mvx"})


def test_an_array_that_changes_its_shape_is_checked_again():
    with Session(two_states(), donate=True) as session:
        feeds = {name: numbers() for name in "mvx"}
        session.run(feeds)
        feeds["x"].resize(32, 128, refcheck=False)
        with pytest.raises(UsageError, match=r"input 'x' is of shape \[64, 64\], not \[32, 128\]"):
            session.run(feeds)


def test_arrays_that_are_only_read_may_share_memory():
    nodes = [node("Add", ["a", "b"], ["c"]), node("ReduceMean", ["c"], ["loss"], keepdims=0)]
    with Session(model_of(nodes, {"a": N, "b": N}, {"c": N, "loss": []}), donate=True) as session:
        shared = numbers()
        np.testing.assert_array_equal(session.run({"a": shared, "b": shared})["c"], shared * 2)


def test_a_result_is_not_read_where_the_next_run_writes():
    with Session(two_states()) as session:
        feeds = {name: numbers() for name in "mvx"}
        made = session.run(feeds, copy=False)
        with pytest.raises(UsageError, match="input 'x' is a view of a result, which the step overwrites: pass a copy"):
            session.run(feeds | {"x": made["new.m"]})
        session.run(feeds | {"x": made["new.m"].copy()})


class Interrupted:
    """A binding during which the user presses Ctrl-C once, when an output is to be bound."""

    def __init__(self, binding, at):
        self.binding, self.at = binding, at

    def __getattr__(self, name):
        return getattr(self.binding, name)

    def bind_output(self, name, *more):
        if name == self.at:
            self.at = None
            raise KeyboardInterrupt
        self.binding.bind_output(name, *more)


def test_a_session_goes_on_after_an_interrupt():
    with Session(two_states(), donate=True) as session:
        session._memory._binding = Interrupted(session._memory._binding, "new.v")
        feeds = {name: numbers(seed) for seed, name in enumerate("mvx")}
        wanted = feeds["v"] + feeds["m"] * feeds["x"]
        with pytest.raises(KeyboardInterrupt):
            session.run(feeds)
        assert session.run(feeds)["loss"] == pytest.approx(wanted.mean(), rel=1e-3)
        np.testing.assert_array_equal(feeds["v"], wanted)


def cast_step(kind):
    nodes = [node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)]
    return model_of(nodes, {"x": (kind, [4])}, {"y": [4]})


def test_numbers_are_converted_and_arrays_are_not():
    with Session(cast_step(TensorProto.INT64)) as session:
        np.testing.assert_array_equal(session.run({"x": [1, 2, 3, 4]})["y"], [1, 2, 3, 4])
        for wrong in ([0.5] * 4, np.ones(4, np.float32), np.ones(4, np.int32)):
            with pytest.raises(UsageError, match="input 'x' is of type int64, not"):
                session.run({"x": wrong})


def test_bits_are_given_as_bits():
    one = np.full(4, 0x3F80, np.uint16)  # 1 as bfloat16
    with Session(cast_step(TensorProto.BFLOAT16)) as session:
        np.testing.assert_array_equal(session.run({"x": one})["y"], np.ones(4))
        for wrong in ([1.0] * 4, np.ones(4, np.float16), np.ones(4, np.int16)):
            with pytest.raises(UsageError, match="input 'x' is of type uint16, not"):
                session.run({"x": wrong})


def test_bits_that_are_an_output_as_well_are_returned():
    nodes = [node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)]
    half = TensorProto.BFLOAT16, [4]
    one = np.full(4, 0x3F80, np.uint16)
    with Session(model_of(nodes, {"x": half}, {"y": [4], "x": half})) as session:
        made = session.run({"x": one})["x"]
        assert made.dtype == np.uint16 and np.array_equal(made, one) and not np.shares_memory(made, one)


@pytest.mark.parametrize("copy", [True, False])
def test_a_loop_takes_what_a_session_takes(copy):
    """Arrays of a type that numpy lacks, and numbers."""
    nodes = [
        node("Cast", ["w"], ["wide"], to=TensorProto.FLOAT), node("Mul", ["wide", "x"], ["more"]),
        node("ReduceMean", ["more"], ["loss"], keepdims=0), node("Cast", ["more"], ["new.w"], to=TensorProto.BFLOAT16),
    ]  # fmt: skip
    half = TensorProto.BFLOAT16, [4]
    model = model_of(nodes, {"w": half, "x": []}, {"loss": [], "new.w": half})
    start = np.ones(4, ml_dtypes.bfloat16)
    loop = Loop(model, {"w": start.copy(), "x": np.array(2, np.float32)}, copy=copy)
    assert [loop.step(), loop.step({"x": 3})] == [2, 6]
    loop.restore({"w": start, "x": 0.5})
    assert loop.step() == 0.5
    np.testing.assert_array_equal(loop.view("w").view(ml_dtypes.bfloat16), start / 2)


def test_a_gradient_of_bits_is_not_applied():
    nodes = [
        node("Cast", ["w"], ["wide"], to=TensorProto.FLOAT), node("ReduceMean", ["wide"], ["loss"], keepdims=0),
        node("Cast", ["wide"], ["grad.w"], to=TensorProto.BFLOAT16),
    ]  # fmt: skip
    half = TensorProto.BFLOAT16, N
    model = model_of(nodes, {"w": half}, {"loss": [], "grad.w": half})
    with pytest.raises(UsageError, match=r"gradient 'grad.w' is of a type that numpy cannot compute with"):
        Loop(model, {"w": np.zeros(N, np.uint16)})


def test_a_pair_that_cannot_be_written_in_place_is_copied():
    """`Sum` reads what it would overwrite; the pair's names do not tell that it is one."""
    nodes = [node("Sum", ["w", "x"], ["after"]), node("ReduceMean", ["after"], ["loss"], keepdims=0)]
    model = model_of(nodes, {"w": N, "x": N}, {"after": N, "loss": []})
    with Session(model, donate={"after": "w"}) as session:
        assert list(session.not_donated) == ["after"]
        loop = Loop(session, {"w": np.zeros(N, np.float32), "x": np.ones(N, np.float32)})
        assert [loop.step() for _ in range(3)] == [1, 2, 3]
        np.testing.assert_array_equal(loop.view("w"), np.full(N, 3))


def test_a_pair_that_is_stated_has_precedence_over_one_by_name():
    nodes = [
        node("Mul", ["w", "two"], ["better"]), node("Mul", ["w", "three"], ["new.w"]),
        node("ReduceMean", ["w"], ["loss"], keepdims=0),
    ]  # fmt: skip
    outputs = {"better": N, "new.w": N, "loss": []}
    model = model_of(nodes, {"w": N}, outputs, {"two": np.float32([2]), "three": np.float32([3])})
    with Session(model, donate={"better": "w"}) as session:
        loop = Loop(session, {"w": np.ones(N, np.float32)})
        assert [loop.step() for _ in range(3)] == [1, 2, 4]


def with_default():
    nodes = [
        node("Mul", ["w", "rate"], ["new.w"]), node("ReduceMean", ["new.w"], ["loss"], keepdims=0),
    ]  # fmt: skip
    model = model_of(nodes, {"w": N}, {"new.w": N, "loss": []}, {"rate": np.float32([2])})
    model.graph.input.append(helper.make_tensor_value_info("rate", TensorProto.FLOAT, [1]))
    return model


def test_a_default_that_is_to_be_overwritten_is_named():
    model = with_default()
    model.graph.initializer.append(numpy_helper.from_array(np.ones(N, np.float32), "w"))
    with pytest.raises(UsageError, match="donate: input 'w' has a default value: remove its initializer"):
        Session(model, donate={"new.w": "w"})


def test_a_default_value_may_be_replaced_in_a_later_step(tmp_path):
    loop = Loop(with_default(), {"w": np.ones(N, np.float32)})
    assert loop.step() == 2
    loop.save(tmp_path / "state.safetensors")
    assert loop.step({"rate": np.float32([0.5])}) == 1
    assert loop.step() == 0.5
    loop.restore({"w": np.ones(N, np.float32), "rate": np.float32([4])})
    assert loop.step() == 4


def test_a_loop_of_onnxruntimes_own_session_trains_copies():
    import onnxruntime

    model = two_states()
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    state = {name: numbers() for name in "mvx"}
    loop = Loop(session, state)
    before = loop.state()
    for array in state.values():
        array[:] = np.nan
    for name, array in loop.state().items():
        np.testing.assert_array_equal(array, before[name])


@pytest.mark.parametrize("donate", [False, True])
def test_running_statistics_are_not_written_over_what_is_read_later(donate):
    """ONNX Runtime writes those that are no outputs over its inputs, whatever their size."""
    nodes = [
        node("BatchNormalization", ["x", "scale", "bias", "mean", "var"], ["y", "m1", "v1"], training_mode=1),
        node("Mul", ["m1", "keep"], ["new.mean"]), node("MatMul", ["m1", "new.mean"], ["dot"]),
        node("ReduceMean", ["y"], ["loss"], keepdims=0),
    ]  # fmt: skip
    few = ("scale", "bias", "mean", "var", "keep")
    shapes = {"x": [32, 8, 16]} | {key: [8] for key in few}
    model = model_of(nodes, shapes, {"new.mean": [8], "dot": [], "loss": []})
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal(shape).astype(np.float32) ** 2 for name, shape in shapes.items()}
    old = feeds["mean"].copy()
    m1 = 0.9 * old + 0.1 * feeds["x"].mean((0, 2))
    with Session(model, donate=donate) as session:
        made = session.run(feeds)
    np.testing.assert_allclose(made["new.mean"], m1 * feeds["keep"], rtol=1e-5)
    np.testing.assert_allclose(made["dot"], m1 @ (m1 * feeds["keep"]), rtol=1e-5)
    np.testing.assert_array_equal(feeds["mean"], made["new.mean"] if donate else old)


def test_each_of_several_threads_gets_its_own_results():
    with Session(two_states()) as session:
        wrong = []

        def work(seed):
            feeds = {name: numbers(seed) for name in "mvx"}
            wanted = numbers(seed) * numbers(seed)
            wrong.extend(seed for _ in range(200) if not np.array_equal(session.run(feeds)["new.m"], wanted))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_bits_in_the_other_order_of_bytes_are_refused():
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)
    model = model_of([node], {"x": (TensorProto.BFLOAT16, [1])}, {"y": [1]})
    with Session(model) as session:
        assert session.run({"x": np.array([0x3F80], np.uint16)})["y"] == 1
        with pytest.raises(UsageError, match="input 'x' is of type uint16, not >u2"):
            session.run({"x": np.array([0x3F80], ">u2")})


@pytest.mark.parametrize("nbytes", [1 << 60, 1 << 70])
def test_memory_that_the_system_does_not_have_is_named(nbytes):
    with pytest.raises(ModelError, match=f"the system cannot map {nbytes} bytes for a step"):
        heap.reserve(nbytes)


def test_numbers_beyond_their_type_and_mappings_of_any_kind():
    small = (TensorProto.INT8, ["n"])
    model = model_of([helper.make_node("Identity", ["x"], ["y"])], {"x": small}, {"y": small})
    with Session(model, dims=MappingProxyType({"n": 1}), donate=MappingProxyType({})) as session:
        for number in (300, -129):
            with pytest.raises(UsageError, match=f"input 'x' is of type int8: {number} does not fit"):
                session.run({"x": [number]})
        assert session.run({"x": [3]})["y"] == 3
