"""Every exact operator of the table against ONNX Runtime, over special values, types and broadcasts."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from onnx_remat.fuse.code import BFLOAT, BOOL, DOUBLE, FLOAT, HALF, INT, LONG, UINT
from onnx_remat.fuse.ops import OPS, call_of
from tests.support.fusing import assert_same_bits, bits, options, run, session, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")

NUMPY = {
    FLOAT: np.float32, DOUBLE: np.float64, INT: np.int32, LONG: np.int64, UINT: np.uint32, BOOL: np.bool_,
    HALF: np.float16,
}  # fmt: skip
NAMES = {
    FLOAT: "float", DOUBLE: "double", INT: "int32", LONG: "int64", UINT: "uint32", BOOL: "bool", HALF: "half",
    BFLOAT: "bfloat",
}  # fmt: skip


def special(dtype: int) -> np.ndarray:
    """Values at which operators go wrong."""
    if dtype == BOOL:
        return np.array([True, False])
    if dtype == UINT:
        return np.array([0, 1, 2, 3, 1000, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1], np.uint32)
    if dtype in (INT, LONG):
        ends = np.iinfo(NUMPY[dtype])
        return np.array([0, 1, -1, 2, -2, 3, 1000, -1000, ends.max, ends.min, ends.max - 1, ends.min + 1], NUMPY[dtype])
    kind = np.finfo(NUMPY[dtype])
    plain = [0.0, 1.0, 0.5, 2.0, 3.0, 1.5, 2.5, 0.1, 1e-3, 7.0, 1234.5, 1 / 3]
    edges = [kind.max, kind.tiny, kind.smallest_subnormal, kind.tiny / 2, kind.eps, 1 + kind.eps, np.inf, np.nan]
    values = np.array([*plain, *edges], NUMPY[dtype])
    return np.concatenate([values, -values])


def pairs(dtype: int, count: int) -> list[np.ndarray]:
    """Arrays that hold all combinations of special values, in an order that mixes them, and then random ones."""
    values = special(dtype)
    grid = np.stack([each.ravel() for each in np.meshgrid(*[values] * min(count, 2), indexing="ij")])
    rng = np.random.default_rng(3)
    arrays = [grid[i % len(grid)][rng.permutation(grid.shape[1])] if i > 1 else grid[i] for i in range(count)]
    return [np.ascontiguousarray(array) for array in arrays]


def model(op: str, types: list[int], made: int, shapes: list[tuple[int, ...]], out: tuple[int, ...], **attributes):
    """One operator and, so that there is a group, a copy of its result."""
    names = [f"x{i}" for i in range(len(types))]
    nodes = [helper.make_node(op, names, ["y"], **attributes), helper.make_node("Identity", ["y"], ["z"])]
    inputs = [helper.make_tensor_value_info(*each) for each in zip(names, types, shapes, strict=True)]
    outputs = [helper.make_tensor_value_info(name, made, out) for name in ("y", "z")]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


CASES = [
    (op, dtype)
    for op, entry in OPS.items()
    for dtype in (FLOAT, DOUBLE, INT, LONG, UINT, BOOL)
    if dtype in entry.types and entry.exact and op not in ("Cast", "Pow", "BitShift")
]


def needs_kernel(op: str, dtype: int) -> None:
    """Skip a test where ONNX Runtime itself has no kernel: before 1.31, Where has none of uint32."""
    count = OPS[op].inputs[0]
    types = [BOOL if op == "Where" and not i else dtype for i in range(count)]
    built = model(op, types, BOOL if OPS[op].logical else dtype, [(1,)] * count, (1,))
    try:
        onnxruntime.InferenceSession(built.SerializeToString(), options(), ["CPUExecutionProvider"])
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
        pytest.skip("this onnxruntime has no kernel")


def counts(op: str) -> list[int]:
    least, most = OPS[op].inputs
    return [1, 2, 3, 5] if most > 3 else list(range(least, most + 1))


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=lambda x: NAMES.get(x, x) if isinstance(x, int) else x)
def test_an_operator_gives_onnx_runtimes_bits(op, dtype):
    needs_kernel(op, dtype)
    for count in counts(op):
        arrays = pairs(dtype, count)
        if op == "Where":
            arrays[0] = np.random.default_rng(0).random(arrays[1].shape) < 0.5
        shapes = [array.shape for array in arrays]
        if op in ("Max", "Min") and dtype in (FLOAT, DOUBLE):  # one is a constant, of any value but zero
            for number in (1e-3, -2.5, np.inf, -np.inf):
                for order in (1, -1):
                    names = ["x0", "x1"][::order]
                    built = model(op, [dtype, dtype], dtype, [arrays[0].shape, ()], arrays[0].shape)
                    built.graph.node[0].input[:] = names
                    del built.graph.input[1]
                    built.graph.initializer.append(onnx.numpy_helper.from_array(np.array(number, NUMPY[dtype]), "x1"))
                    assert_same_bits(built, {"x0": arrays[0]})
        elif op == "Clip":  # bounds are single numbers
            for low, high in [(-2, 3), (0, 0), (1, 1)]:
                bounds = [np.array(x, NUMPY[dtype]) for x in (low, high)][: count - 1]
                _compare(op, dtype, [arrays[0], *bounds], arrays[0].shape)
        else:
            _compare(op, dtype, arrays, shapes[-1])


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=lambda x: NAMES.get(x, x) if isinstance(x, int) else x)
def test_onnx_runtime_gives_the_same_bits_wherever_an_element_lies(op, dtype):
    """In a vector or in what is left over; where it does not, no kernel can (Max and Min of zeros)."""
    needs_kernel(op, dtype)
    count = OPS[op].inputs[0]
    arrays = pairs(dtype, count)
    if op == "Where":
        arrays[0] = np.random.default_rng(0).random(arrays[1].shape) < 0.5
    types = [BOOL if op == "Where" and not i else dtype for i in range(count)]
    made = BOOL if OPS[op].logical else dtype
    built = model(op, types, made, [("n",)] * count, ("n",))
    opened = onnxruntime.InferenceSession(built.SerializeToString(), options(), ["CPUExecutionProvider"])

    def results(first, last):
        return opened.run(["y"], {f"x{i}": array[first:last] for i, array in enumerate(arrays)})[0]

    size = len(arrays[0])
    parts = np.concatenate([results(first, min(first + 3, size)) for first in range(0, size, 3)])
    same = np.array_equal(bits(results(0, size)), bits(parts))
    assert same or (op in ("Max", "Min") and dtype in (FLOAT, DOUBLE))


def _compare(op: str, dtype: int, arrays: list[np.ndarray], out: tuple[int, ...], **attributes) -> None:
    types = [dtype] * len(arrays)
    if op == "Where":
        types[0] = BOOL
    made = BOOL if OPS[op].logical else dtype
    built = model(op, types, made, [array.shape for array in arrays], out, **attributes)
    feeds = {f"x{i}": array for i, array in enumerate(arrays)}
    assert_same_bits(built, feeds)


HALVES = [
    (op, dtype)
    for op, entry in OPS.items()
    for dtype in (HALF, BFLOAT)
    if dtype in entry.types and entry.exact and op not in ("Cast", "Identity", "Sum", "IsNaN", "Max", "Min")
]


def _as_bits(values: np.ndarray, dtype: int) -> np.ndarray:
    """float32 in half precision: numpy's float16, or bfloat16's bits."""
    if dtype == HALF:
        with np.errstate(over="ignore"):
            return values.astype(np.float16)
    wide = values.astype(np.float32).view(np.uint32)
    near = (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC1, near).astype(np.uint16)


@pytest.mark.parametrize(("op", "dtype"), HALVES, ids=lambda x: NAMES.get(x, x) if isinstance(x, int) else x)
def test_half_precision_is_computed_in_float32_and_rounded(op, dtype):
    """As ONNX Runtime has it, which has no such kernels and puts a Cast before and after: the same with those Casts."""
    count = OPS[op].inputs[0]
    arrays = [_as_bits(array.astype(np.float32), dtype) for array in pairs(HALF if dtype == HALF else FLOAT, count)]
    logical, where = OPS[op].logical, op == "Where"
    if where:
        arrays[0] = np.random.default_rng(0).random(arrays[1].shape) < 0.5
    shapes = [array.shape for array in arrays]
    types = [BOOL if where and not i else dtype for i in range(count)]
    built = model(op, types, BOOL if logical else dtype, shapes, shapes[-1])
    reference = model(op, [t if t == BOOL else FLOAT for t in types], BOOL if logical else FLOAT, shapes, shapes[-1])
    nodes = []
    for i, kind in enumerate(types):
        reference.graph.input[i].type.tensor_type.elem_type = kind
        if kind != BOOL:
            nodes.append(helper.make_node("Cast", [f"x{i}"], [f"f{i}"], to=FLOAT))
            reference.graph.node[0].input[i] = f"f{i}"
    if not logical:
        reference.graph.node[0].output[0] = "wide"
        nodes.append(helper.make_node("Cast", ["wide"], ["y"], to=dtype))
        for value in reference.graph.output:
            value.type.tensor_type.elem_type = dtype
    every = [*nodes[:-1], reference.graph.node[0], nodes[-1]] if not logical else [*nodes, reference.graph.node[0]]
    every.append(reference.graph.node[1])
    del reference.graph.node[:]
    reference.graph.node.extend(every)
    feeds = {f"x{i}": array for i, array in enumerate(arrays)}
    plain = onnxruntime.InferenceSession(reference.SerializeToString(), options(), ["CPUExecutionProvider"])
    opened, made = session(built)
    assert made.kernels
    wanted, got = run(plain, feeds), run(opened, feeds)
    for name, value in wanted.items():
        first, second = (_one_nan(array, dtype) for array in (value, got[name]))
        np.testing.assert_array_equal(second, first, name)


def _one_nan(array: np.ndarray, dtype: int) -> np.ndarray:
    """Bits, all NaNs one."""
    if array.dtype == np.bool_:
        return array
    found = np.ascontiguousarray(array).view(np.uint16)
    infinity = 0x7C00 if dtype == HALF else 0x7F80
    return np.where((found & 0x7FFF) > infinity, 0xFFFF, found)


KINDS = (FLOAT, DOUBLE, INT, LONG, BOOL, HALF, BFLOAT)


def casts(dtype: int, to: int):
    """Two casts, and values that are hard to round."""
    if dtype == BFLOAT:
        values = _as_bits(special(FLOAT), BFLOAT)
    else:
        values = special(dtype)
        if dtype in (FLOAT, DOUBLE):  # and what lies half way between two of half precision
            extra = np.arange(-600, 600, dtype=np.float64) * 2.0**-9 + 1
            values = np.concatenate([values, extra.astype(NUMPY[dtype]), (extra * 2.0**-16).astype(NUMPY[dtype])])
    if to in (INT, LONG):  # beyond these ONNX says nothing
        wide = values.astype(np.float64) if dtype != BFLOAT else (values.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(invalid="ignore"):
            values = values[np.isfinite(wide) & (np.abs(wide) < 2**30)]
    names = ["x0"]
    nodes = [helper.make_node("Cast", names, ["y"], to=to), helper.make_node("Cast", ["y"], ["z"], to=FLOAT)]
    inputs = [helper.make_tensor_value_info("x0", dtype, values.shape)]
    outputs = [helper.make_tensor_value_info("y", to, values.shape)]
    outputs.append(helper.make_tensor_value_info("z", FLOAT, values.shape))
    built = helper.make_model(
        helper.make_graph(nodes, "g", inputs, outputs), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    return built, values


def assert_casts(built, values, to, got) -> None:
    """Results are those of ONNX Runtime."""
    plain = onnxruntime.InferenceSession(built.SerializeToString(), options(), ["CPUExecutionProvider"])
    wanted = run(plain, {"x0": values})
    half = BFLOAT if to == BFLOAT else HALF
    for name, value in wanted.items():
        halves = name == "y" and to in (HALF, BFLOAT)
        first, second = (_one_nan(x, half) if halves else bits(x) for x in (value, got[name]))
        np.testing.assert_array_equal(second, first, name)


@pytest.mark.parametrize("to", KINDS, ids=NAMES.get)
@pytest.mark.parametrize("dtype", KINDS, ids=NAMES.get)
def test_casts(dtype, to):
    built, values = casts(dtype, to)
    opened, made = session(built)
    assert made.kernels
    assert_casts(built, values, to, run(opened, {"x0": values}))


@pytest.mark.parametrize("dtype", [FLOAT, DOUBLE], ids=NAMES.get)
@pytest.mark.parametrize("exponent", [2.0, 3.0])
def test_small_powers(dtype, exponent):
    values = special(dtype)
    built = model("Pow", [dtype, dtype], dtype, [values.shape, ()], values.shape)
    del built.graph.input[1]
    built.graph.initializer.append(onnx.numpy_helper.from_array(np.array(exponent, NUMPY[dtype]), "x1"))
    assert_same_bits(built, {"x0": values})


def test_other_powers_are_left_alone():
    values = np.abs(special(FLOAT))
    built = model("Pow", [FLOAT, FLOAT], FLOAT, [values.shape, ()], values.shape)
    del built.graph.input[1]
    built.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.5), "x1"))
    assert not assert_same_bits(built, {"x0": values}, least_fused=0).kernels


def test_clip_without_bounds():
    values = special(FLOAT)
    for names in (["x0"], ["x0", "", "x1"], ["x0", "x1"]):
        built = model("Clip", [FLOAT, FLOAT], FLOAT, [values.shape, ()], values.shape)
        del built.graph.node[0].input[:]
        built.graph.node[0].input.extend(names)
        assert_same_bits(built, {"x0": values, "x1": np.float32(0.5)})


@pytest.mark.parametrize("alpha", [0.01, 0.0, 2.5, -1.0])
def test_leaky_relu(alpha):
    _compare("LeakyRelu", FLOAT, [special(FLOAT)], special(FLOAT).shape, alpha=alpha)


def test_an_attribute_that_is_not_known_leaves_a_node_alone():
    node = helper.make_node("Clip", ["x"], ["y"], min=-1.0, max=1.0)  # as opset 6 has it
    assert call_of(node, [FLOAT], FLOAT, {}.get) is None
    assert call_of(helper.make_node("Clip", ["x"], ["y"]), [FLOAT], FLOAT, {}.get) is not None
    assert call_of(helper.make_node("Div", ["x", "x"], ["y"]), [INT, INT], INT, {}.get) is None  # ends the process at 0
    assert call_of(helper.make_node("Add", ["x", "x"], ["y"], domain="com.x"), [FLOAT, FLOAT], FLOAT, {}.get) is None


@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
@pytest.mark.parametrize("by", [0, 1, 13, 31])
def test_bits_shift_by_a_constant(direction, by):
    values = special(UINT)
    built = model("BitShift", [UINT, UINT], UINT, [values.shape, ()], values.shape, direction=direction)
    del built.graph.input[1]
    built.graph.initializer.append(onnx.numpy_helper.from_array(np.array(by, np.uint32), "x1"))
    assert_same_bits(built, {"x0": values})


@pytest.mark.parametrize("by", [32, None])
def test_bits_that_shift_out_of_a_word_or_by_a_variable_stay_with_onnx_runtime(by):
    """C++ leaves such a shift undefined."""
    node = helper.make_node("BitShift", ["a", "b"], ["c"], direction="LEFT")
    assert call_of(node, [UINT, UINT], UINT, lambda _: by) is None


@pytest.mark.parametrize("to", [FLOAT, DOUBLE, INT, LONG, BOOL, HALF])
def test_casts_of_unsigned_words(to):
    values = special(UINT)
    if to == HALF:
        values = values[values < 60_000]
    assert_same_bits(model("Cast", [UINT], to, [values.shape], values.shape, to=to), {"x0": values})


@pytest.mark.parametrize("dtype", [INT, LONG, BOOL])
def test_casts_to_unsigned_words(dtype):
    values = special(dtype)
    assert_same_bits(model("Cast", [dtype], UINT, [values.shape], values.shape, to=UINT), {"x0": values})
