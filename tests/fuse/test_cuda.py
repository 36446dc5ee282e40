"""Kernels of a CUDA device: run, as the PTX that a device gets, by threads that the tests simulate.

An access outside a kernel's inputs and outputs fails. NVIDIA's assembler translates the text for three generations of
devices.
"""

from __future__ import annotations

import re
import subprocess

import numpy as np
import pytest

from onnx_remat.fuse import cuda, rows, segments
from onnx_remat.fuse.cuda import BLOCK, THREADS, WARP
from onnx_remat.fuse.members import MOST_REDUCTIONS
from onnx_remat.fuse.rows import LEAST_WARPS
from tests.fuse import test_groups, test_moved, test_ops, test_rows
from tests.fuse.test_groups import build, node
from tests.support import fusing, warps
from tests.support.slow import few

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


@pytest.fixture(params=few([False, True], [True]), ids=["", "small blocks"])
def small_blocks(request, monkeypatch):
    """Whether blocks are so small that threads compute several elements of small values, too."""
    if request.param:
        monkeypatch.setattr(cuda, "THREADS", WARP)
        monkeypatch.setattr(cuda, "FEW", 0)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("over", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_random_groups(request, over):
    """20,000 of them: ``pytest tests/fuse/test_cuda.py -k random --fuzz 20000``."""
    count, fused = request.config.getoption("--fuzz") or 15, 0
    for seed in range(count):
        rng = np.random.default_rng([seed, 36])
        model = test_groups.random_model(rng)
        if model is not None:
            made = assert_same(model, test_groups.random_feeds(model, rng), exact=True, over=over)
            fused += len(made.kernels)
    assert fused > count


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("over", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_random_rows(request, monkeypatch, over):
    monkeypatch.setattr("onnx_remat.fuse.rows.LEAST_WARPS", 8)
    count, fused = max((request.config.getoption("--fuzz") or 0) // 20, 20), 0
    for seed in range(count):
        model = test_rows.random_model(np.random.default_rng([seed, 61]), test_rows.ALONG_WHAT[seed % 5 // 3])
        made = assert_same(model, test_rows.feeds_of(model, seed), exact=False, over=over)
        fused += sum(
            kernel.threads == BLOCK or kernel.grain <= cuda.THREADS // cuda.LEAST_LANES for kernel in made.kernels
        )
    assert fused > count // 2


@pytest.mark.usefixtures("small_blocks")
def test_random_moves(request):
    count, fused = request.config.getoption("--fuzz") or 15, 0
    for seed in range(count):
        model = test_moved.random_model(np.random.default_rng([seed, 63]))
        feeds = {name: array / 4 for name, array in test_rows.feeds_of(model, seed).items()}
        fused += len(assert_same(model, feeds, exact=False).kernels)
    assert fused > count


LENGTHS = [8, 31, 32, 33, 100, rows.LONG - 1, rows.LONG, rows.CHUNK + 1]


@pytest.mark.parametrize("columns", few(LENGTHS, [each for each in LENGTHS if each != rows.LONG]))
def test_rows_of_any_length(columns):
    nodes = [node("Mul", ["x", "x"], "a"), node("Softmax", ["a"], "y", axis=-1)]
    model = build(nodes, {"x": (LEAST_WARPS, columns)}, ["y"])
    made = assert_same(model, test_rows.feeds_of(model), exact=False, kernels=1, over=True)
    (kernel,) = made.kernels
    lanes = 4 if columns == 8 else 8 if columns < 33 else WARP if columns > 64 else 16
    wanted = (1, BLOCK) if columns >= rows.LONG else (THREADS // lanes, THREADS)
    assert (kernel.grain, kernel.threads) == wanted and kernel.size == LEAST_WARPS


@pytest.mark.parametrize("size", [cuda.FEW - 1, cuda.FEW, cuda.FEW + 1500])
def test_a_thread_computes_several_of_many_elements(size):
    model = build([node("Neg", ["x"], "a"), node("Abs", ["a"], "y")], {"x": (size,)}, ["y"])
    made = assert_same(model, test_rows.feeds_of(model), exact=True, kernels=1, over=True)
    assert made.kernels[0].grain == THREADS * (cuda.AT_ONCE if size >= cuda.FEW else 1)
    shapes = {"x": (size // 5, 5), "b": (5,)}
    broadcast = build([node("Add", ["x", "b"], "a"), node("Abs", ["a"], "y")], shapes, ["y"])
    assert_same(broadcast, test_rows.feeds_of(broadcast), exact=True, kernels=1, over=True)


def batch_norm():
    return [
        node("ReduceMean", ["x"], "mean", axes=[0, 2, 3], keepdims=1), node("Sub", ["x", "mean"], "below"),
        node("Mul", ["below", "below"], "square"),
        node("ReduceMean", ["square"], "variance", axes=[0, 2, 3], keepdims=1),
        node("Add", ["variance", "small"], "more"), node("Sqrt", ["more"], "deviation"),
        node("Div", ["below", "deviation"], "normal"), node("Mul", ["normal", "weight"], "scaled"),
        node("Add", ["scaled", "bias"], "shifted"), node("Relu", ["shifted"], "y"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "shape", [(2, 8, 4, 4), (2, 9, 4, 4), (5, 8, 7, 7), (11, 8, 7, 7), (3, 10, 10, 10), (2, 8, 16, 32), (3, 8, 25, 41)]
)
@pytest.mark.parametrize("over", [False, True])
def test_a_batch_norm_is_a_launch_in_which_a_block_has_a_long_channel(shape, over):
    shapes = {"x": shape, "weight": (shape[1], 1, 1), "bias": (shape[1], 1, 1)}
    model = build(batch_norm(), shapes, ["y", "mean", "deviation"], {"small": np.array(1e-5, np.float32)})
    made = assert_same(model, test_rows.feeds_of(model), exact=False, kernels=1, over=over)
    is_long = shape[0] * shape[2] * shape[3] >= rows.LONG_OF_RUNS
    assert made.kernels[0].threads == (BLOCK if is_long else THREADS) and made.kernels[0].size == shape[1]


def test_a_row_that_a_broadcast_divides_takes_a_warp():
    nodes = [
        node("Mul", ["x", "scale"], "a"), node("ReduceMean", ["a"], "mean", axes=[1, 2], keepdims=1),
        node("Sub", ["a", "mean"], "y"),
    ]  # fmt: skip
    model = build(nodes, {"x": (LEAST_WARPS, 4, 96), "scale": (4, 1)}, ["y"])
    made = assert_same(model, test_rows.feeds_of(model), exact=False, kernels=1, over=True)
    assert made.kernels[0].threads == THREADS and made.kernels[0].grain == THREADS // WARP


def test_the_gradient_of_a_batch_norm_is_a_launch():
    nodes = [
        node("Mul", ["dy", "normal"], "a"), node("ReduceSum", ["a", "axes"], "dweight", keepdims=1),
        node("ReduceSum", ["dy", "axes"], "dbias", keepdims=1), node("Mul", ["normal", "dweight"], "b"),
        node("Mul", ["dy", "count"], "c"), node("Sub", ["c", "dbias"], "d"), node("Sub", ["d", "b"], "e"),
        node("Mul", ["e", "factor"], "dx"),
    ]  # fmt: skip
    shape, weights = (3, 8, 6, 9), {"count": np.array(162, np.float32), "axes": np.array([0, 2, 3])}
    model = build(nodes, {"dy": shape, "normal": shape, "factor": (8, 1, 1)}, ["dx", "dweight", "dbias"], weights)
    assert_same(model, test_rows.feeds_of(model), exact=False, kernels=1, over=True)


@pytest.mark.parametrize(
    ("shape", "pads"),
    [
        ((3, 4, 5), (0, 1, 2, 0, 3, 0)), ((6,), (300, 1)), ((2, 3, 4, 5), (0, 0, 1, 1, 0, 0, 1, 1)),
        ((2, 3, 4, 5), (1, 0, 0, 0, 0, 2, 0, 0)), ((5, 7), (-1, 2, -2, -3)), ((4, 4), (0, 0, 0, 0)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [1, 7, 9, 10])
def test_a_pad(shape, pads, dtype):
    nodes = [node("Pad", ["x", "pads"], "y")]
    model = build(nodes, {"x": (dtype, shape)}, ["y"], {"pads": np.array(pads)})
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * 3).astype(warps.STORED[dtype])
    assert_same(model, {"x": x}, exact=True, kernels=1)


def test_a_pad_that_states_its_zeros():
    zero = np.array(0, np.float32)
    nodes = [node("Pad", ["x", "pads", "zero"], "y", mode="constant")]
    model = build(nodes, {"x": (3, 5)}, ["y"], {"pads": np.array([1, 0, 0, 2]), "zero": zero})
    assert_same(model, test_rows.feeds_of(model), exact=True, kernels=1)


def test_pads_with_other_values_are_left_to_onnx_runtime():
    weights = {"pads": np.array([1, 1]), "one": np.array(1, np.float32)}
    nodes = [node("Pad", ["x", "pads"], "y", mode="edge"), node("Pad", ["x", "pads", "one"], "z")]
    assert not warps.fused(build(nodes, {"x": (6,)}, ["y", "z"], weights)).kernels


def test_few_channels_of_many_elements_are_left_to_onnx_runtime():
    model = build(batch_norm(), {"x": (8, rows.LEAST_BLOCKS - 1, 64, 64), "weight": (47, 1, 1), "bias": (47, 1, 1)},
                  ["y"], {"small": np.array(1e-5, np.float32)})  # fmt: skip
    kernels = warps.fused(model).kernels
    assert kernels and all(kernel.threads == THREADS and kernel.grain >= THREADS for kernel in kernels)


def test_a_warp_has_no_row_in_part():
    """All of its threads take part in an exchange, which the simulated device demands."""
    nodes = [node("Mul", ["x", "x"], "a"), node("Softmax", ["a"], "y", axis=-1)]
    model = build(nodes, {"x": (LEAST_WARPS + 1, 8)}, ["y"])
    made = assert_same(model, test_rows.feeds_of(model), exact=False, kernels=1)
    assert made.kernels[0].grain == THREADS // WARP


@pytest.mark.slow
def test_the_shared_memory_of_a_block_holds_as_many_sums_as_a_kernel_may_have():
    count = MOST_REDUCTIONS // 2  # a Softmax has two
    nodes = [node("Softmax", [f"v{i}"], f"v{i + 1}", axis=-1) for i in range(count)]
    model = build(nodes, {"v0": (rows.LEAST_BLOCKS, rows.LONG)}, [f"v{count}"])
    made = assert_same(model, test_rows.feeds_of(model), exact=False, kernels=1)
    text = cuda.ptx(made.kernels[0].text)
    assert text.count("bar.sync") == MOST_REDUCTIONS and f".maxntid {BLOCK}" in text


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


@pytest.mark.parametrize("capability", few(["75", "80", "90"], ["75"]))
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
    for columns in (64, rows.LONG):
        nodes = [node("Mul", ["x", "x"], "a"), node("LogSoftmax", ["a"], "y", axis=-1)]
        rowed = build(nodes, {"x": (LEAST_WARPS, columns)}, ["y"])
        texts |= dict.fromkeys(kernel.text for kernel in warps.fused(rowed).kernels)
    shapes = {"x": (2, 8, 16, 32), "weight": (8, 1, 1), "bias": (8, 1, 1)}
    normalised = build(batch_norm(), shapes, ["y"], {"small": np.array(1e-5, np.float32)})
    texts |= dict.fromkeys(kernel.text for kernel in warps.fused(normalised).kernels)
    nodes = [node("Mul", ["x", "y"], "a"), node("Sub", ["a", "z"], "b")]
    plain = build(nodes, {"x": (300,), "y": (300,), "z": ()}, ["b"])
    for count, each in (2, rowed), (4, normalised), (29, plain):
        texts[segments.joined(list(warps.fused(each).kernels) * count).text] = None
    path = tmp_path / "module.ptx"
    path.write_bytes(cuda.module(list(texts))[:-1])
    command = [assembler, "-v", f"-arch=sm_{capability}", str(path), "-o", str(tmp_path / "made")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"(\d+) bytes spill stores", done.stderr) == ["0"] * len(texts), done.stderr
