"""Functions of float32 against float64, with ONNX Runtime's own errors for comparison."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from tests.support.fusing import options, run, session, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")

F = TensorProto.FLOAT
erf = np.vectorize(math.erf, otypes=[np.float64])


def logistic(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


FUNCTIONS = {
    "Erf": (erf, 1.5),
    "Exp": (np.exp, 1.0),
    "Log": (np.log, 1.0),
    "Sigmoid": (logistic, 2.5),
    "Tanh": (np.tanh, 6.0),
}  # with the bound in units of the last place


def one_node(op: str, size: int | str, **attributes):
    given, made = (helper.make_tensor_value_info(name, F, (size,)) for name in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], **attributes)], "g", [given], [made])
    domains = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=9)


def numbers() -> np.ndarray:
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 2**32, 50_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    usual = [rng.uniform(-bound, bound, 40_000).astype(np.float32) for bound in (1, 12, 110)]
    return np.concatenate([anything[np.isfinite(anything)], *usual])


def errors(got: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distances in units of the last place of a result."""
    with np.errstate(over="ignore"):
        nearest = exact.astype(np.float32)
    unit = np.spacing(np.maximum(np.abs(nearest), np.finfo(np.float32).tiny)).astype(np.float64)
    with np.errstate(invalid="ignore"):
        distance = np.abs(got.astype(np.float64) - exact) / unit
    return np.where((got == nearest) | (np.isnan(got) & np.isnan(exact)), 0, distance)


@pytest.mark.parametrize("op", FUNCTIONS)
def test_a_function_is_as_exact_as_stated(op):
    function, most = FUNCTIONS[op]
    x = numbers()
    if op == "Log":
        x = np.abs(x)
    if op == "Sigmoid":  # below, its exponential is infinite
        x = x[x > -88]
    opened, made = session(one_node(op, len(x)))
    assert made.kernels
    with np.errstate(over="ignore"):
        exact = function(x.astype(np.float64))
    found = errors(run(opened, {"x": x})["y"], exact)
    assert found.max() <= most, (found.max(), x[found.argmax()])
    plain = onnxruntime.InferenceSession(one_node(op, len(x)).SerializeToString(), options())
    of_runtime = errors(plain.run(None, {"x": x})[0], exact)
    assert found.max() <= max(1.5, of_runtime.max())


SPECIAL = {
    "Erf": ([-0.0, 0.0, np.inf, -np.inf, 4.0], [-0.0, 0.0, 1, -1, 1]),
    "Exp": ([0.0, np.inf, -np.inf, 89.0, -104.5, -100.0], [1, np.inf, 0, np.inf, 0, np.float32(np.exp(-100.0))]),
    "Log": ([0.0, -0.0, 1.0, np.inf, -1.0, 1e-40], [-np.inf, -np.inf, 0, np.inf, np.nan, np.float32(np.log(1e-40))]),
    "Sigmoid": ([0.0, np.inf, -np.inf, -200.0], [0.5, 1, 0, 0]),
    "Tanh": ([-0.0, 0.0, np.inf, -np.inf, 1e-30], [-0.0, 0.0, 1, -1, 1e-30]),
}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_special_values(op):
    given, wanted = (np.array([*each, np.nan], np.float32) for each in SPECIAL[op])
    for repeat in (1, 40):  # in a vector, and in what is left over
        opened, made = session(one_node(op, len(given) * repeat))
        assert made.kernels
        got = run(opened, {"x": np.tile(given, repeat)})["y"]
        np.testing.assert_allclose(got, np.tile(wanted, repeat), rtol=2e-7)
        np.testing.assert_array_equal(
            np.signbit(got[~np.isnan(got)]), np.signbit(np.tile(wanted, repeat)[~np.isnan(got)])
        )


@pytest.mark.parametrize("op", FUNCTIONS)
def test_an_element_has_the_same_bits_wherever_it_lies(op):
    x = np.random.default_rng(2).uniform(0, 3, 67).astype(np.float32)
    whole = run(session(one_node(op, len(x)))[0], {"x": x})["y"]
    for first in range(0, 60, 7):
        part = x[first : first + 5]
        np.testing.assert_array_equal(run(session(one_node(op, 5))[0], {"x": part})["y"], whole[first : first + 5])


GELU = [("Gelu", {}), ("Gelu", {"approximate": "tanh"}), ("Gelu", {"domain": "com.microsoft"}),
        ("QuickGelu", {"domain": "com.microsoft", "alpha": 1.5})]  # fmt: skip


@pytest.mark.parametrize(("op", "attributes"), GELU, ids=str)
def test_gelu(op, attributes):
    x = np.concatenate([numbers()[-40_000:], np.float32([0, -0.0, np.inf, np.nan, 1e-30, -1e-30])])
    built = one_node(op, len(x), **attributes)
    opened, made = session(built)
    assert made.kernels
    plain = onnxruntime.InferenceSession(built.SerializeToString(), options())
    np.testing.assert_allclose(run(opened, {"x": x})["y"], plain.run(None, {"x": x})[0], rtol=2e-5, atol=2e-6)


def powers(dtype: int, base: float, size: int) -> onnx.ModelProto:
    """A constant to each of some exponents."""
    given, made = (helper.make_tensor_value_info(name, dtype, (size,)) for name in "xy")
    number = onnx.numpy_helper.from_array(np.array(base, helper.tensor_dtype_to_np_dtype(dtype)), "base")
    graph = helper.make_graph([helper.make_node("Pow", ["base", "x"], ["y"])], "g", [given], [made], [number])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


@pytest.mark.parametrize("dtype", [F, TensorProto.DOUBLE])
@pytest.mark.parametrize("base", [0.9, 0.999, 0.5, 1.1, 2.0, 1e-3, 1e30])
def test_powers_of_a_constant(dtype, base):
    """As of an optimizer's decay by the number of steps, which PyTorch computes in float64."""
    kind = helper.tensor_dtype_to_np_dtype(dtype)
    rng, ends = np.random.default_rng(0), [np.inf, -np.inf, np.nan, 1e30, -1e30, 0.0, -0.0]
    x = np.concatenate([np.arange(500), rng.uniform(-800, 800, 500), rng.uniform(-2, 2, 500), ends]).astype(kind)
    number = kind.type(base)
    opened, made = session(powers(dtype, base, len(x)))
    assert made.kernels
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        exact = np.power(np.longdouble(number), x.astype(np.longdouble))
        nearest = exact.astype(kind)
        got = run(opened, {"x": x})["y"]
        unit = np.spacing(np.maximum(np.abs(nearest), np.finfo(kind).tiny))
        off = np.where((got == nearest) | (np.isnan(got) & np.isnan(nearest)), 0, np.abs(got - exact) / unit)
    assert off.max() <= 2, (off.max(), x[off.argmax()])


@pytest.mark.parametrize("base", [1.0, 0.0, -2.0, np.inf])
def test_other_bases_are_left_to_onnxruntime(base):
    assert not session(powers(F, base, 5))[1].kernels
