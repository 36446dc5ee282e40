"""Kernels that are said to be safe in place: each run with its output bound over an input, against apart from it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from onnx_remat.ort.kernels import in_place
from onnx_remat.ort.kernels.cpu import CPU

ort = pytest.importorskip("onnxruntime")

SHAPE = [257, 1031]  # of odd sizes, and enough for several threads
FLOATS = [TensorProto.FLOAT, TensorProto.DOUBLE]


def values(dtype: int, shape, seed: int) -> np.ndarray:
    """Random numbers, zeros of both signs, denormals, infinities and NaN among those that are floats."""
    generator = np.random.default_rng(seed)
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    if np.issubdtype(kind, np.integer):
        return generator.integers(1, 100, shape).astype(kind)
    array = generator.standard_normal(shape)
    some = array.reshape(-1)[::13]
    some[:] = np.resize([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 1e30], some.size)
    return array.astype(kind)


def may_overwrite(op: str, slot: int, dtype: int) -> bool:
    return in_place.may_overwrite(CPU, helper.make_node(op, ["a", "b"], ["c"]), slot, 0, dtype)


def run(op: str, arrays: list[np.ndarray], over: int | None, **attributes: int) -> bytes:
    """Bits of the output, bound to memory of its own or over an input."""
    feeds = [array.copy() for array in arrays]
    kinds = [helper.np_dtype_to_tensor_dtype(array.dtype) for array in arrays]
    dtype = kinds[-1]
    node = helper.make_node(op, [f"x{i}" for i in range(len(feeds))], ["y"], **attributes)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info(f"x{i}", kinds[i], a.shape) for i, a in enumerate(feeds)],
        [helper.make_tensor_value_info("y", dtype, None)],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for i, array in enumerate(feeds):
        binding.bind_input(f"x{i}", "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
    result = np.empty(SHAPE, arrays[-1].dtype) if over is None else feeds[over]
    binding.bind_output("y", "cpu", 0, result.dtype.type, result.shape, result.ctypes.data)
    session.run_with_iobinding(binding)
    return result.tobytes()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("op", sorted(in_place.UNARY))
def test_unary_kernel_gives_the_same_bits_in_place(op, dtype):
    arrays = [values(dtype, SHAPE, 0)]
    assert may_overwrite(op, 0, dtype)
    assert run(op, arrays, 0) == run(op, arrays, None)


@pytest.mark.parametrize("dtype", [*FLOATS, TensorProto.INT64])
@pytest.mark.parametrize("other", [SHAPE, [1, SHAPE[1]], [SHAPE[0], 1], [1], []])
@pytest.mark.parametrize(
    ("op", "slot"), [*((op, slot) for op in sorted(in_place.BINARY) for slot in (0, 1)), ("Max", 0), ("Min", 0)]
)
def test_binary_kernel_gives_the_same_bits_in_place(op, slot, other, dtype):
    """Over the operand of the output's shape; the other one may be broadcast."""
    arrays = [values(dtype, SHAPE, 0), values(dtype, other, 1)]
    arrays = arrays if slot == 0 else arrays[::-1]
    assert may_overwrite(op, slot, dtype)
    assert run(op, arrays, slot) == run(op, arrays, None)


@pytest.mark.parametrize("dtype", [*FLOATS, TensorProto.INT64])
@pytest.mark.parametrize("chooser", [SHAPE, [SHAPE[0], 1], []])
@pytest.mark.parametrize("other", [SHAPE, [1, SHAPE[1]], []])
@pytest.mark.parametrize("slot", [1, 2])
def test_where_gives_the_same_bits_in_place(slot, other, chooser, dtype):
    arrays = [np.random.default_rng(2).integers(0, 2, chooser).astype(bool), values(dtype, SHAPE, 0)]
    arrays.insert(3 - slot, values(dtype, other, 1))
    assert in_place.may_overwrite(CPU, helper.make_node("Where", ["a", "b", "c"], ["d"]), slot, 0, dtype)
    assert run("Where", arrays, slot) == run("Where", arrays, None)


@pytest.mark.parametrize("op", [*sorted(in_place.BINARY), "Max", "Min"])
def test_binary_kernel_of_one_array_twice(op):
    array = values(TensorProto.FLOAT, SHAPE, 0)
    same = run(op, [array, array], None)
    feed = array.copy()
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node(op, ["x", "x"], ["y"])], "g", [helper.make_tensor_value_info("x", 1, SHAPE)],
            [helper.make_tensor_value_info("y", 1, SHAPE)],
        ),
        opset_imports=[helper.make_opsetid("", 20)], ir_version=10,
    )  # fmt: skip
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_input("x", "cpu", 0, np.float32, SHAPE, feed.ctypes.data)
    binding.bind_output("y", "cpu", 0, np.float32, SHAPE, feed.ctypes.data)
    session.run_with_iobinding(binding)
    assert feed.tobytes() == same


def test_a_kernel_that_is_not_listed_shows_the_difference():
    """The measurement can fail: MatMul reads a row again after it has written a part of it."""
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal(shape).astype(np.float32) for shape in (SHAPE, [SHAPE[1], SHAPE[1]])]
    assert not may_overwrite("MatMul", 0, TensorProto.FLOAT)
    assert run("MatMul", arrays, 0) != run("MatMul", arrays, None)


def test_what_onnxruntime_declares_is_listed():
    for (domain, op), pairs in CPU.inplace.items():
        node = helper.make_node(op, ["x"], ["y"], domain=domain)
        assert in_place.may_overwrite(CPU, node, *pairs[0], TensorProto.FLOAT)


def test_cuda_kernels_that_read_an_element_before_they_write_it():
    """What was read in the templates of these kernels; a product of matrices reads others besides."""
    from onnx_remat.ort.kernels.cuda import CUDA

    def may(op: str, slot: int) -> bool:
        return in_place.may_overwrite(CUDA, helper.make_node(op, ["a", "b"], ["c"]), slot, 0, TensorProto.FLOAT)

    assert all(may(op, slot) for op in in_place.BINARY for slot in (0, 1))
    assert may("Where", 1) and may("Where", 2) and not may("Where", 0)
    assert may("Neg", 0) and not may("MatMul", 0) and not may("Softmax", 0) and not may("Identity", 0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("inner", [1, 17, 300])
def test_gemm_gives_the_same_bits_over_what_it_adds_to(inner, turned, dtype):
    attributes = {"transA": turned, "transB": turned}
    node = helper.make_node("Gemm", ["a", "b", "c"], ["y"], **attributes)
    assert in_place.may_overwrite(CPU, node, 2, 0, dtype)
    assert not any(in_place.may_overwrite(CPU, node, slot, 0, dtype) for slot in (0, 1))
    sizes = [SHAPE[0], inner], [inner, SHAPE[1]]
    arrays = [values(dtype, size[::-1] if turned else size, i) for i, size in enumerate(sizes)]
    arrays.append(values(dtype, SHAPE, 2))
    assert run("Gemm", arrays, 2, **attributes) == run("Gemm", arrays, None, **attributes)


def test_gemm_in_half_precision_may_read_what_it_adds_to_late():
    node = helper.make_node("Gemm", ["a", "b", "c"], ["y"])
    assert not in_place.may_overwrite(CPU, node, 2, 0, TensorProto.FLOAT16)
