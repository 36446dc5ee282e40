"""What the checks of a measured run look at."""

from __future__ import annotations

import itertools
import mmap
import sys
from functools import partial

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_remat import Session
from onnx_remat.errors import VerificationError
from onnx_remat.measure import processes, training_memory, verify
from onnx_remat.measure.comparison import compare, same_bits
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Preparation
from onnx_remat.process import child
from tests.support.graphs import mlp, model_of
from tests.support.slow import few

pytest.importorskip("onnxruntime")


def saved(path, op_type):
    nodes = [
        helper.make_node(op_type, ["x"], ["y"], name="one"),
        helper.make_node("ReduceMean", ["x"], ["loss"], name="mean", keepdims=0),
    ]
    onnx.save(model_of(nodes, {"x": [64, 64]}, {"loss": [], "y": [64, 64]}), path)
    return path


@pytest.mark.slow
def test_hostile_feeds_show_what_plain_ones_hide(tmp_path):
    """On numbers between -0.2 and 0.2 a Clip at 3e4 is the identity."""
    first = saved(tmp_path / "a.onnx", "Identity")
    model = onnx.load(first)
    model.graph.node[0].op_type = "Clip"
    model.graph.node[0].input.extend(["low", "high"])
    for name, bound in (("low", -3e4), ("high", 3e4)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(bound), name))
    onnx.save(model, tmp_path / "b.onnx")
    assert verify.bitwise(first, first) == "bitwise equal"
    with pytest.raises(VerificationError, match="'y' is not bitwise equal"):
        verify.bitwise(first, tmp_path / "b.onnx")


@pytest.mark.slow
def test_strings_are_fed_and_compared(tmp_path):
    text = (onnx.TensorProto.STRING, [4])
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("StringConcat", ["y", "x"], ["z"])]
    onnx.save(model_of(nodes, {"x": text}, {"y": text, "z": text}), tmp_path / "a.onnx")
    assert verify.bitwise(tmp_path / "a.onnx", tmp_path / "a.onnx") == "bitwise equal"


def test_an_input_that_cannot_be_random_is_named(tmp_path):
    model = model_of(
        [helper.make_node("Cast", ["x"], ["y"], to=1)], {"x": (onnx.TensorProto.BFLOAT16, [4])}, {"y": [4]}
    )
    onnx.save(model, tmp_path / "a.onnx")
    with pytest.raises(VerificationError, match="input 'x' of type bfloat16 cannot be random: leave the run out"):
        processes.measure(tmp_path / "a.onnx")


def test_training_is_measured_without_the_runtimes_telemetry(tmp_path, monkeypatch):
    given = {}

    def called(*_, variables=child.QUIET):
        given.update(variables)
        raise child.Failed("died")

    monkeypatch.setattr(training_memory.child, "call", called)
    with pytest.raises(VerificationError, match="training in a fresh process failed"):
        training_memory.measure(tmp_path / "a.onnx")
    assert given.items() >= child.QUIET.items()


def test_what_optimisations_move_by_themselves_may_differ_by_as_much_again(tmp_path):
    """A gradient that cancels to zero is rounding alone: any order of its sums makes another one."""
    values = {"plain": 1e-13, "before": -2e-13, "near": 3e-13, "far": 1e-12}
    paths = {name: tmp_path / f"{name}.npz" for name in values}
    for name, value in values.items():
        np.savez(paths[name], **{"0:gradient": np.float32([value, 0]), "1:loss": np.float32(1)})
    compare(paths["before"], paths["near"], False, paths["plain"])
    for after, plain in [("near", None), ("far", paths["plain"])]:
        with pytest.raises(VerificationError, match="'gradient' differs"):
            compare(paths["before"], paths[after], False, plain)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_many_wrong_entries_are_not_hidden_by_a_large_one(kind, tmp_path):
    """A few may be sums that cancel; rounding of the large one is in all of them."""
    generator = np.random.default_rng(0)
    before = generator.standard_normal(1000).astype(kind)
    before[0] = 1e6 if kind == np.float32 else 1e12
    wrong, few, rounded = before.copy(), before.copy(), before.copy()
    wrong[1:] *= 100
    few[1:10] *= 100
    rounded[1:] += (before[0] * 16 * np.finfo(kind).eps * generator.uniform(-1, 1, 999)).astype(kind)
    for name, values in (("before", before), ("wrong", wrong), ("few", few), ("rounded", rounded)):
        np.savez(tmp_path / f"{name}.npz", **{"0:gradient": values})
    for name in ("few", "rounded"):
        compare(tmp_path / "before.npz", tmp_path / f"{name}.npz", False)
    with pytest.raises(VerificationError, match="'gradient' differs"):
        compare(tmp_path / "before.npz", tmp_path / "wrong.npz", False)
    compare(tmp_path / "before.npz", tmp_path / "wrong.npz", False, plain=tmp_path / "wrong.npz")


def test_half_precision_is_compared_without_warnings(tmp_path, recwarn):
    for name, value in (("before", 65504), ("after", -65504)):
        np.savez(tmp_path / f"{name}.npz", **{"0:y": np.float16([value, 1])})
    compare(tmp_path / "before.npz", tmp_path / "before.npz", False)
    with pytest.raises(VerificationError, match="'y' differs"):
        compare(tmp_path / "before.npz", tmp_path / "after.npz", False, tmp_path / "after.npz")
    assert not recwarn.list


def test_the_sign_of_zero_counts_and_what_a_nan_carries_does_not():
    assert not same_bits(np.float32([0.0]), np.float32([-0.0]))
    assert same_bits(np.float32([np.nan, 1]), np.float32([-np.nan, 1]))
    assert not same_bits(np.float32([np.nan]), np.float32([1]))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peaks are measured on Linux only")
def test_whole_pages_are_no_tensors(tmp_path):
    """Values of whole pages take a page more each: of 400 such, more than any two measurements differ by."""
    count, rows = 400, 8 * mmap.PAGESIZE // 256
    names = ["x", *(f"y{i}" for i in range(count))]
    nodes = [helper.make_node("Tanh", [a], [b], name=b) for a, b in itertools.pairwise(names)]
    model = model_of(nodes, {"x": [rows, 64]}, {name: [rows, 64] for name in names[1:]})
    path = tmp_path / "many.onnx"
    onnx.save(model, path)
    executed = as_executed(model, None, "all", Preparation(CPU))
    beyond, peak = processes.beyond_tensors(executed), executed.timeline.peak
    assert count * mmap.PAGESIZE <= beyond <= count * (mmap.PAGESIZE + 200)
    resident = processes.peak_under(peak + beyond, partial(processes.measure, path))
    assert resident - peak > processes.RESOLUTION
    assert abs(resident - beyond - peak) < 2 * processes.RESOLUTION


def endless(path):
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Neg", ["a"], ["b"])], "body",
        [helper.make_tensor_value_info("i", 7, []), helper.make_tensor_value_info("go", 9, []),
         helper.make_tensor_value_info("a", 1, [4])],
        [helper.make_tensor_value_info("on", 9, []), helper.make_tensor_value_info("b", 1, [4])],
    )  # fmt: skip
    node = helper.make_node("Loop", ["", "yes", "x"], ["y"], name="turns", body=body)
    onnx.save(model_of([node], {"x": [4]}, {"y": [4]}, {"yes": np.bool_(True)}), path)


def more_than_there_is(path):
    node = helper.make_node("ConstantOfShape", ["size"], ["y"], name="huge")
    onnx.save(model_of([node], {"x": [4]}, {"y": [2**44]}, {"size": np.array([2**44])}), path)


@pytest.mark.parametrize(
    ("make", "limit", "words"),
    [pytest.param(endless, 2, "within 2 s", marks=pytest.mark.slow), (more_than_there_is, 5, "failed: ")],
)
def test_what_a_measured_model_may_take_is_limited(make, limit, words, tmp_path, monkeypatch):
    """A run that does not end is ended, and one that asks for more memory than the machine has fails by itself."""
    monkeypatch.setattr(processes, "SECONDS", float(limit))
    make(tmp_path / "hostile.onnx")
    with pytest.raises(VerificationError, match=words):
        processes.measure(tmp_path / "hostile.onnx")


def random_step(path):
    """A parameter that is renewed, behind a Dropout that draws."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[64,64] x, float[64,64] w) => (float loss, float[64,64] n) <float half = {0.5}, bool yes = {1}> {
        d, m = Dropout(x, half, yes)  t = MatMul(d, w)  loss = ReduceMean<keepdims = 0>(t)  n = Sub(w, t) }"""
    model = onnx.parser.parse_model(text)
    model.graph.node[-1].output[0] = model.graph.output[1].name = "new.w"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("level", few(["disable", "all"], ["all"]))
def test_a_session_is_compared_with_the_runtimes_own(level, tmp_path):
    verify.session(random_step(tmp_path / "random.onnx"), level=level)
    with Session(mlp(layers=2, batch=64, width=32), level=level, donate=True, check=True) as session:
        assert session.donated


@pytest.mark.slow
def test_a_session_that_is_wrong_is_reported(tmp_path, monkeypatch):
    path = tmp_path / "mlp.onnx"
    onnx.save(mlp(layers=2, batch=64, width=32), path)
    real = processes.by_session

    def tampered(which, key, by):
        def run(path, outputs, *args, **kwargs):
            changed = real(path, outputs, *args, **kwargs)
            with np.load(outputs[which]) as made:
                arrays = dict(made)
            name = next(name for name in arrays if name.endswith(key))
            arrays[name] = arrays[name] * np.float32(by)
            np.savez(outputs[which], **arrays)
            return changed

        return run

    for which, level, by in ((0, "disable", 1 + 1e-6), (1, "all", 1.01)):
        monkeypatch.setattr(processes, "by_session", tampered(which, ":loss", by))
        with pytest.raises(VerificationError, match=r"onnx-remat's session is wrong here, .*: output 'loss'"):
            verify.session(path, level=level)
    monkeypatch.setattr(processes, "by_session", lambda *args, **kwargs: (*real(*args, **kwargs), "x"))
    with pytest.raises(VerificationError, match="input 'x' was overwritten"):
        verify.session(path)
