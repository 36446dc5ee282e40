"""Kernels of a CUDA device: run, as the PTX that a device gets, by threads that the tests simulate.

An access outside a kernel's inputs and outputs fails. NVIDIA's assembler translates the text for three generations of
devices.
"""

from __future__ import annotations

import re
import subprocess

import numpy as np
import pytest

from onnx_remat.fuse import cuda, rows
from onnx_remat.fuse.cuda import WARP
from onnx_remat.fuse.rows import LEAST_WARPS
from tests.fuse import test_groups, test_moved, test_ops, test_rows
from tests.fuse.test_groups import build, node
from tests.support import fusing, warps

pytestmark = pytest.mark.skipif(bool(warps.why_not()), reason=warps.why_not() or "none")


def on_cpu(model, feeds):
    plain = fusing.ort.InferenceSession(model.SerializeToString(), fusing.options(), ["CPUExecutionProvider"])
    return fusing.run(plain, feeds)


def assert_same(model, feeds, *, exact, kernels=None, over=False):
    """The simulated device's results are ONNX Runtime's: to the bit, or within rounding."""
    got, made = warps.run(model, feeds, over)
    assert kernels is None or len(made.kernels) == kernels
    for name, wanted in on_cpu(model, feeds).items():
        assert got[name].shape == wanted.shape, name
        if exact:
            np.testing.assert_array_equal(fusing.bits(got[name]), fusing.bits(wanted), name)
        else:
            scale = max(1.0, float(np.abs(wanted).max(initial=0)))
            np.testing.assert_allclose(got[name], wanted, rtol=1e-3, atol=1e-4 * scale, err_msg=name)
    return made


def named(value):
    return test_ops.NAMES.get(value, value) if isinstance(value, int) else value


@pytest.fixture
def device_instead(monkeypatch):
    """Cases of `test_ops`, for the simulated device."""
    monkeypatch.setattr(test_ops, "assert_same_bits", lambda model, feeds, **_: assert_same(model, feeds, exact=True))


@pytest.mark.usefixtures("device_instead")
@pytest.mark.parametrize(("op", "dtype"), test_ops.CASES, ids=named)
def test_an_operator_gives_onnx_runtimes_bits(op, dtype):
    test_ops.test_an_operator_gives_onnx_runtimes_bits(op, dtype)


@pytest.mark.parametrize("to", test_ops.KINDS, ids=test_ops.NAMES.get)
@pytest.mark.parametrize("dtype", test_ops.KINDS, ids=test_ops.NAMES.get)
def test_casts(dtype, to):
    built, values = test_ops.casts(dtype, to)
    got, made = warps.run(built, {"x0": values})
    assert made.kernels
    test_ops.assert_casts(built, values, to, got)


@pytest.mark.parametrize("over", [False, True])
def test_random_groups(request, over):
    """20,000 of them: ``pytest tests/fuse/test_cuda.py -k random --fuzz 20000``."""
    count, fused = request.config.getoption("--fuzz") or 100, 0
    for seed in range(count):
        rng = np.random.default_rng([seed, 36])
        model = test_groups.random_model(rng)
        if model is not None:
            made = assert_same(model, test_groups.random_feeds(model, rng), exact=True, over=over)
            fused += len(made.kernels)
    assert fused > count


@pytest.mark.parametrize("over", [False, True])
def test_random_rows(request, monkeypatch, over):
    monkeypatch.setattr("onnx_remat.fuse.members.LEAST_WARPS", 8)
    count, fused = max((request.config.getoption("--fuzz") or 0) // 20, 40), 0
    for seed in range(count):
        model = test_rows.random_model(np.random.default_rng([seed, 61]), test_rows.ALONG_WHAT[seed % 5 // 3])
        made = assert_same(model, test_rows.feeds_of(model, seed), exact=False, over=over)
        fused += sum(kernel.grain == WARP for kernel in made.kernels)
    assert fused > count // 2


def test_random_moves(request):
    count, fused = request.config.getoption("--fuzz") or 60, 0
    for seed in range(count):
        model = test_moved.random_model(np.random.default_rng([seed, 63]))
        feeds = {name: array / 4 for name, array in test_rows.feeds_of(model, seed).items()}
        fused += len(assert_same(model, feeds, exact=False).kernels)
    assert fused > count


@pytest.mark.parametrize("columns", [8, 31, 32, 33, 100, rows.CHUNK + 1])
def test_rows_of_any_length(columns):
    nodes = [node("Mul", ["x", "x"], "a"), node("Softmax", ["a"], "y", axis=-1)]
    model = build(nodes, {"x": (LEAST_WARPS, columns)}, ["y"])
    made = assert_same(model, test_rows.feeds_of(model), exact=False, kernels=1, over=True)
    assert made.kernels[0].grain == WARP and made.kernels[0].size == LEAST_WARPS


def test_few_rows_are_left_to_onnx_runtime():
    nodes = [node("Mul", ["x", "x"], "a"), node("Softmax", ["a"], "y", axis=-1)]
    model = build(nodes, {"x": (LEAST_WARPS - 1, 64)}, ["y"])
    assert not warps.fused(model).kernels


def test_a_layer_norm_and_its_gradient_are_a_launch_each():
    nodes = [
        node("ReduceMean", ["x"], "mean", axes=[1]), node("Sub", ["x", "mean"], "below"),
        node("Mul", ["below", "below"], "square"), node("ReduceMean", ["square"], "variance", axes=[1]),
        node("Add", ["variance", "small"], "more"), node("Sqrt", ["more"], "deviation"),
        node("Div", ["below", "deviation"], "normal"), node("Mul", ["normal", "weight"], "scaled"),
        node("Add", ["scaled", "bias"], "y"),
    ]  # fmt: skip
    shapes = {"x": (LEAST_WARPS, 64), "weight": (64,), "bias": (64,)}
    model = build(nodes, shapes, ["y", "deviation"], {"small": np.array(1e-5, np.float32)})
    assert_same(model, test_rows.feeds_of(model), exact=False, kernels=1)


def test_a_transpose_that_reads_far_apart_is_left_to_onnx_runtime():
    far = build([node("Transpose", ["x"], "t", perm=[1, 0]), node("Neg", ["t"], "y")], {"x": (64, 64)}, ["y"])
    assert not warps.fused(far).kernels
    near = [node("Transpose", ["x"], "t", perm=[1, 0, 2]), node("Neg", ["t"], "y")]
    model = build(near, {"x": (16, 8, 64)}, ["y"])
    assert_same(model, test_rows.feeds_of(model), exact=True, kernels=1)


def test_an_access_outside_is_found():
    model = build([node("Neg", ["x"], "a"), node("Abs", ["a"], "y")], {"x": (300,)}, ["y"])
    (kernel,) = warps.fused(model).kernels
    x, y = np.ones(300, np.float32), np.empty(300, np.float32)
    warps.launch(kernel, [x], [y])
    with pytest.raises(AssertionError, match="1 accesses outside"):
        warps.launch(kernel, [x[:-1]], [y])


@pytest.mark.parametrize("capability", ["75", "80", "90"])
def test_an_assembler_takes_the_text_and_spills_no_register(capability, tmp_path):
    assembler = warps.assembler()
    if assembler is None:
        pytest.skip("ptxas is not installed: pip install nvidia-cuda-nvcc")
    texts = {}
    for seed in range(12):
        for module, salt in ((test_groups, 36), (test_moved, 63)):
            model = module.random_model(np.random.default_rng([seed, salt]))
            if model is not None:
                texts |= dict.fromkeys(kernel.text for kernel in warps.fused(model).kernels)
    rowed = build(
        [node("Mul", ["x", "x"], "a"), node("LogSoftmax", ["a"], "y", axis=-1)], {"x": (LEAST_WARPS, 64)}, ["y"]
    )
    texts |= dict.fromkeys(kernel.text for kernel in warps.fused(rowed).kernels)
    path = tmp_path / "module.ptx"
    path.write_bytes(cuda.module(list(texts))[:-1])
    command = [assembler, "-v", f"-arch=sm_{capability}", str(path), "-o", str(tmp_path / "made")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\d+) bytes spill stores", done.stderr) == ["0"] * len(texts), done.stderr
