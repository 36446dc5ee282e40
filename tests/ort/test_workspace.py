"""Workspace rules against stock ONNX Runtime's own count of a node's temporary allocations."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_remat.ort.kernels.base import Call, itemsize
from onnx_remat.ort.kernels.cpu import CPU

ort = pytest.importorskip("onnxruntime")

_STATISTICS = "session.collect_node_memory_stats_to_file"

F32, F64, I64, I32, U8, BOOL, F16 = "f4", "f8", "i8", "i4", "u1", "?", "f2"
Inputs = Sequence["tuple[str, tuple[int, ...]] | None"]
Case = tuple[str, Inputs, Mapping[str, Any], int]  # "domain:Op", inputs, attributes, outputs

_X = (F32, (2, 4, 6))
_IMAGE = (2, 16, 16, 16)
_SCALE = [(F32, ()), (U8, ())]  # Scale and zero point.


def _conv(data: tuple[int, ...], weight: tuple[int, ...], **attributes: Any) -> Case:
    return "Conv", [(F32, data), (F32, weight)], attributes, 1


def _recurrent(op: str, gates: int, direction: str) -> Case:
    sides = 2 if direction == "bidirectional" else 1
    inputs = [(F32, (7, 3, 8)), (F32, (sides, gates * 16, 8)), (F32, (sides, gates * 16, 16))]
    return op, inputs, {"hidden_size": 16, "direction": direction}, 1


_SEVEN_BY_SEVEN = _conv(_IMAGE, (32, 1, 7, 7), group=16, pads=[3, 3, 3, 3], strides=[2, 2])

CASES: list[Case] = [
    _conv((1, 3, 32, 32), (8, 3, 3, 3)),
    _conv((2, 3, 32, 32), (8, 3, 3, 3)),
    _conv((8, 32, 16, 16), (32, 32, 3, 3), pads=[1, 1, 1, 1]),
    _conv((1, 32, 64, 64), (32, 32, 3, 3), pads=[1, 1, 1, 1]),
    _conv((1, 2, 5, 20), (4, 2, 3, 3)),
    _conv((1, 8, 9, 9), (8, 8, 3, 3)),
    _conv(_IMAGE, (16, 1, 3, 3), group=16),  # Depthwise.
    _conv(_IMAGE, (32, 8, 3, 3), group=2),
    _SEVEN_BY_SEVEN,
    _conv(_IMAGE, (16, 16, 1, 1)),  # Pointwise: a plain product ...
    _conv(_IMAGE, (16, 16, 1, 1), strides=[2, 2]),  # ... unless it strides
    _conv(_IMAGE, (16, 16, 1, 1), pads=[1, 1, 1, 1]),  # ... or pads.
    _conv(_IMAGE, (16, 16, 3, 3), auto_pad="SAME_UPPER"),
    _conv(_IMAGE, (16, 16, 1, 1), auto_pad="SAME_UPPER"),
    _conv(_IMAGE, (16, 16, 3, 3), dilations=[2, 2]),
    _conv((2, 64, 8, 8), (128, 64, 3, 3), pads=[1, 1, 1, 1]),  # More filters than pixels.
    _conv((12, 4, 40, 40), (24, 4, 40, 40), pads=[1, 1, 1, 1]),  # A weight gradient.
    _conv((2, 16, 64), (16, 16, 3)),
    _conv((2, 1, 64), (16, 1, 64)),
    _conv((1, 1, 8, 8), (4, 1, 8, 1)),
    _conv((1, 1, 8, 8), (4, 1, 3, 8)),
    _conv((2, 4, 8, 8, 8), (4, 4, 3, 3, 3)),
    _conv((2, 3, 5, 5, 5, 5), (4, 3, 2, 2, 2, 2)),
    ("com.microsoft:FusedConv", [(F32, _IMAGE), (F32, (16, 16, 3, 3))], {"activation": "Relu"}, 1),
    ("ConvTranspose", [(F32, (4, 12, 10, 9)), (F32, (12, 6, 3, 3))], {"strides": [2, 2]}, 1),
    ("ConvTranspose", [(F32, (4, 12, 10, 9)), (F32, (12, 6, 1, 1))], {}, 1),
    ("ConvTranspose", [(F32, (4, 12, 10, 9)), (F32, (12, 2, 3, 3))], {"group": 4}, 1),
    ("ConvInteger", [(U8, (2, 4, 16, 16)), (U8, (4, 4, 3, 3))], {}, 1),
    ("Where", [(BOOL, (2, 4, 6)), _X, _X], {}, 1),
    ("Where", [(BOOL, (2, 4, 1)), (F32, ()), _X], {}, 1),  # The scalar's mask stays small.
    ("Where", [(BOOL, (4, 6)), _X, (F32, (6,))], {}, 1),
    ("Where", [(BOOL, (2, 4, 6)), (I64, (2, 4, 6)), (I64, ())], {}, 1),
    *(("Softmax", [_X], {"axis": axis}, 1) for axis in (0, 1, 2, -1, -2)),
    ("Softmax", [_X], {}, 1),
    ("Softmax", [(F64, (2, 4, 6))], {"axis": 1}, 1),
    ("Softmax", [(F32, (2, 6, 1))], {"axis": 1}, 1),  # Transposed even where nothing moves.
    ("LogSoftmax", [_X], {"axis": 1}, 1),
    ("Hardmax", [_X], {"axis": 0}, 1),
    ("Sum", [_X, _X], {}, 1),
    ("Sum", [_X, _X, _X], {}, 1),
    ("Max", [(F32, (6,)), (F32, (4, 6)), _X], {}, 1),
    ("Mean", [_X, _X, (F32, (6,))], {}, 1),
    ("LRN", [(F32, (2, 5, 6, 7))], {"size": 3}, 1),
    ("MeanVarianceNormalization", [(F32, (2, 5, 6, 7))], {}, 1),
    ("BatchNormalization", [(F32, (2, 3, 4, 5)), *[(F32, (3,))] * 4], {}, 1),
    ("BatchNormalization", [(F32, (2, 3, 4, 5)), *[(F32, (3,))] * 4], {"training_mode": 1}, 3),
    ("LayerNormalization", [_X, (F32, (6,)), (F32, (6,))], {}, 1),
    ("LayerNormalization", [(F16, (2, 4, 6)), (F16, (6,)), (F16, (6,))], {}, 1),
    ("com.microsoft:BiasGelu", [_X, (F32, (6,))], {}, 1),
    ("com.microsoft:FastGelu", [_X, (F32, (6,))], {}, 1),
    ("com.microsoft:FastGelu", [_X], {}, 1),
    ("Einsum", [_X], {"equation": "abc->cab"}, 1),
    ("QLinearMatMul", [(U8, (4, 6)), *_SCALE, (U8, (6, 5)), *_SCALE, *_SCALE], {}, 1),
    ("com.microsoft:Attention", [(F32, (2, 8, 16)), (F32, (16, 48)), (F32, (48,))], {"num_heads": 4}, 1),
    ("Attention", [(F32, (2, 4, 8, 16))] * 3, {}, 1),
    ("Attention", [(F32, (2, 4, 8, 16))] * 3, {"is_causal": 1}, 1),
    ("Attention", [(F32, (2, 4, 8, 16)), *[(F32, (2, 2, 12, 16))] * 2], {}, 1),
    ("Attention", [(F32, (2, 8, 64))] * 3, {"q_num_heads": 4, "kv_num_heads": 4}, 1),
    *(_recurrent("LSTM", 4, d) for d in ("forward", "reverse", "bidirectional")),
    *(_recurrent("GRU", 3, d) for d in ("forward", "reverse", "bidirectional")),
    *(_recurrent("RNN", 1, d) for d in ("forward", "bidirectional")),
    # Operators that take nothing: training graphs consist of these.
    *((op, [_X], {}, 1) for op in ("Relu", "Exp", "Erf", "Gelu", "Sqrt", "Tanh", "Transpose", "Neg")),
    *((op, [_X, _X], {}, 1) for op in ("Add", "Sub", "Mul", "Div", "Pow", "Equal", "Less")),
    *((op, [_X], {"keepdims": 0}, 1) for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2")),
    ("MatMul", [(F32, (2, 8, 16)), (F32, (2, 16, 4))], {}, 1),
    ("Gemm", [(F32, (16, 8)), (F32, (4, 16)), (F32, (4,))], {"transA": 1, "transB": 1}, 1),
    ("MaxPool", [(F32, _IMAGE)], {"kernel_shape": [2, 2]}, 2),
    ("Concat", [_X, _X], {"axis": 1}, 1),
    ("Cast", [_X], {"to": onnx.TensorProto.INT64}, 1),
    ("GatherElements", [_X, (I64, (2, 4, 6))], {"axis": 1}, 1),
    ("CumSum", [_X, (I64, ())], {}, 1),
]  # fmt: skip

# Taken with malloc, which the statistics do not see.
MALLOC: list[tuple[Case, int]] = [
    (("ScatterElements", [_X, (I64, (2, 3, 6)), (F32, (2, 3, 6))], {"axis": 1}, 1), 2 * 3 * 6 * 8),
    (("ScatterElements", [_X, (I32, (2, 3, 6)), (F32, (2, 3, 6))], {"axis": 1}, 1), 2 * 3 * 6 * 8),
    (("NonZero", [_X], {}, 1), 3 * 48 * 8),
]


def _feed(inputs: Inputs) -> dict[str, np.ndarray]:
    """Values below every extent of the shapes used here, and non-zero, so that they also serve as indices."""
    present = ((f"i{slot}", entry) for slot, entry in enumerate(inputs) if entry)
    return {name: np.ones(shape, dtype) for name, (dtype, shape) in present}


def _element_type(array: np.ndarray) -> int:
    return helper.np_dtype_to_tensor_dtype(array.dtype)


def _measure(case: Case, directory: Path, opset: int, threads: int) -> tuple[int, int]:
    """Return what the statistics say a node allocated for itself, and what the rule says."""
    name, inputs, attributes, n_outputs = case
    domain, _, op = name.rpartition(":")
    feed = _feed(inputs)
    slots = [f"i{slot}" if entry else "" for slot, entry in enumerate(inputs)]
    outputs = [f"o{slot}" for slot in range(n_outputs)]
    node = helper.make_node(op, slots, outputs, name="node", domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info(k, _element_type(v), v.shape) for k, v in feed.items()],
        [onnx.ValueInfoProto(name=output) for output in outputs],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry(_STATISTICS, str(directory / "stats.csv"))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results = session.run(None, feed)
    del session
    rows = [row for path in directory.iterdir() for row in csv.DictReader(path.open())]
    measured = sum(int(row["total_temp_allocations"]) for row in rows)
    call = Call(
        attributes,
        [feed[s].shape if s else None for s in slots],
        [itemsize(_element_type(feed[s])) if s else 0 for s in slots],
        [r.shape for r in results],
        [itemsize(_element_type(r)) for r in results],
        threads,
        opset,
    )
    ruled = CPU.blocks((domain, op), call)
    assert len(rows) == 1, "the operator did not run as one kernel"
    return measured, sum(ruled)


def _name(case: Case) -> str:
    return f"{case[0]}-{[entry[1] if entry else None for entry in case[1]]}-{dict(case[2])}".replace(" ", "")


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("case", CASES, ids=_name)
def test_rule_is_what_onnxruntime_allocates(case: Case, threads: int, tmp_path: Path) -> None:
    opset = 23 if case[0] == "Attention" else 17 if case[0].startswith("Reduce") else 20
    measured, ruled = _measure(case, tmp_path, opset, threads)
    if case == _SEVEN_BY_SEVEN and not measured:  # processors with AVX-512 have a direct kernel for this one
        assert ruled
        return
    assert ruled == measured


@pytest.mark.parametrize(("opset", "expected"), [(12, 0), (13, 2 * 48 * 4)])
def test_softmax_transposes_from_opset_13_on(opset: int, expected: int, tmp_path: Path) -> None:
    assert _measure(("Softmax", [_X], {"axis": 1}, 1), tmp_path, opset, 1) == (expected, expected)


@pytest.mark.parametrize("n_inputs", [4, 5])
def test_variadic_keeps_two_partial_results_however_many_inputs(n_inputs: int, tmp_path: Path) -> None:
    measured, ruled = _measure(("Max", [_X] * n_inputs, {}, 1), tmp_path, 20, 1)
    assert measured == (n_inputs - 2) * 48 * 4  # A sum: each one is freed when the next but one is taken.
    assert ruled == 2 * 48 * 4


@pytest.mark.parametrize("equation", ["ij,jk->ik", "ij,jk->ki", "ij,ij->ij", "ij,ij->i"])
def test_einsum_is_an_upper_bound(equation: str, tmp_path: Path) -> None:
    case: Case = ("Einsum", [(F32, (32, 32)), (F32, (32, 32))], {"equation": equation}, 1)
    measured, ruled = _measure(case, tmp_path, 20, 1)
    assert 0 < measured <= ruled


@pytest.mark.parametrize(("case", "expected"), MALLOC, ids=lambda v: v[0] if isinstance(v, tuple) else str(v))
def test_memory_behind_the_allocators_back(case: Case, expected: int, tmp_path: Path) -> None:
    assert _measure(case, tmp_path, 20, 1) == (0, expected)


def test_unlisted_operators_take_nothing() -> None:
    assert CPU.blocks(("custom", "Op"), Call({}, [(4,)], [4], [(4,)], [4], 8)) == ()
