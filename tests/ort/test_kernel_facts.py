"""Operator facts against stock ONNX Runtime's own buffer plan.

A copying node feeds one input of the operator under test and nobody else needs that value. ONNX Runtime's
node memory statistics then count no bytes for an output that took over the buffer. The same graph with the
value also as a graph output forbids working in place, and leaves only a mandatory alias without bytes.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_remat.ir.op_semantics import OpSemantics, is_random, semantics
from onnx_remat.ort.kernels.cpu import CPU

ort = pytest.importorskip("onnxruntime")

_STATISTICS = "session.collect_node_memory_stats_to_file"

F32, F64, I64, I32, U8, BOOL = "f4", "f8", "i8", "i4", "u1", "?"
Inputs = Sequence[tuple[str, tuple[int, ...]]]
Case = tuple[str, Inputs, Mapping[str, Any], int]  # "domain:Op", inputs, attributes, opset

_X = (F32, (4, 6))
_IMAGE = (F32, (2, 4, 3, 3))
_CHANNELS = (F32, (4,))

_UNARY = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Celu", "Cos", "Cosh", "Dropout",
    "Elu", "Erf", "Exp", "Flatten", "Floor", "Gelu", "HardSigmoid", "Hardmax", "Identity", "IsInf",
    "IsNaN", "LeakyRelu", "Log", "LogSoftmax", "Max", "Mean", "Min", "Neg", "Reciprocal", "Relu",
    "Round", "Selu", "Shape", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Size", "Softmax", "Softplus",
    "Softsign", "Sqrt", "Sum", "Tan", "Tanh", "ThresholdedRelu", "Trilu", "LpNormalization", "NonZero",
    "RandomNormalLike", "RandomUniformLike",
)  # fmt: skip
_BINARY = (
    "Add", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min",
    "Mul", "PRelu", "Pow", "Sub", "Sum",
)  # fmt: skip

CASES: list[Case] = [
    *((op, [_X], {}, 20) for op in _UNARY),
    *((op, [_X, _X], {}, 20) for op in _BINARY),
    *((op, [_X], {}, 11) for op in ("Relu", "Softmax", "LogSoftmax", "Dropout", "Exp", "Tanh", "Sigmoid")),
    *((op, [(F64, (4, 6))], {}, 20) for op in ("Softmax", "LogSoftmax", "Relu", "Tanh", "Sqrt")),
    *((op, [(BOOL, (4, 6))] * 2, {}, 20) for op in ("And", "Or", "Xor")),
    *((op, [(I64, (4, 6))] * 2, {}, 20) for op in ("Add", "Mod", "BitwiseAnd", "Mul")),
    ("Not", [(BOOL, (4, 6))], {}, 20),
    ("Add", [(F32, (6,)), _X], {}, 20),
    ("Where", [(BOOL, (4, 6)), _X, _X], {}, 20),
    ("Clip", [_X, (F32, ()), (F32, ())], {}, 20),
    ("Cast", [_X], {"to": onnx.TensorProto.INT32}, 20),
    ("Cast", [(I32, (4, 6))], {"to": onnx.TensorProto.FLOAT}, 20),
    ("Cast", [(BOOL, (4, 6))], {"to": onnx.TensorProto.UINT8}, 20),
    ("BitCast", [_X], {"to": onnx.TensorProto.INT32}, 26),
    ("Reshape", [_X, (I64, (2,))], {}, 20),
    ("Squeeze", [(F32, (4, 1, 6)), (I64, (1,))], {}, 20),
    ("Unsqueeze", [_X, (I64, (1,))], {}, 20),
    ("Squeeze", [(F32, (4, 1, 6))], {"axes": [1]}, 11),
    ("Unsqueeze", [_X], {"axes": [1]}, 11),
    ("OptionalGetElement", [_X], {}, 20),
    ("com.microsoft:ExpandDims", [_X, (I32, ())], {}, 20),
    ("Expand", [_X, (I64, (2,))], {}, 20),
    ("Tile", [_X, (I64, (2,))], {}, 20),
    ("Pad", [_X, (I64, (4,))], {}, 20),
    ("Transpose", [(F32, (4, 4))], {}, 20),
    ("Transpose", [(F32, (1, 4, 6))], {"perm": [0, 1, 2]}, 20),
    ("Concat", [_X], {"axis": 0}, 20),
    ("Slice", [_X, (I64, (1,)), (I64, (1,)), (I64, (1,))], {}, 20),
    ("Gather", [_X, (I64, (4,))], {}, 20),
    ("GatherElements", [_X, (I64, (4, 6))], {}, 20),
    ("ScatterElements", [_X, (I64, (4, 6)), _X], {}, 20),
    ("Scatter", [_X, (I64, (4, 6)), _X], {}, 10),
    ("ScatterND", [_X, (I64, (1, 1)), (F32, (1, 6))], {}, 20),
    ("TensorScatter", [(F32, (2, 3, 4, 5)), (F32, (2, 3, 1, 5))], {}, 24),
    ("CumSum", [_X, (I64, ())], {}, 20),
    ("ReduceSum", [(F32, (4, 1)), (I64, (1,))], {}, 20),
    ("Gemm", [_X, (F32, (6, 6)), _X], {}, 20),
    ("MatMul", [_X, (F32, (6, 6))], {}, 20),
    ("BatchNormalization", [_IMAGE, *[_CHANNELS] * 4], {}, 20),
    ("InstanceNormalization", [_IMAGE, *[_CHANNELS] * 2], {}, 20),
    ("LayerNormalization", [_X, (F32, (6,)), (F32, (6,))], {}, 20),
    ("RMSNormalization", [_X, (F32, (6,))], {}, 23),
    ("SimplifiedLayerNormalization", [_X, (F32, (6,))], {}, 20),
    ("MaxPool", [_IMAGE], {"kernel_shape": [1, 1]}, 20),
    ("GlobalAveragePool", [(F32, (2, 4, 1, 1))], {}, 20),
    ("Conv", [_IMAGE, (F32, (4, 4, 1, 1))], {}, 20),
    ("com.microsoft:Gelu", [_X], {}, 20),
    ("com.microsoft:QuickGelu", [_X], {}, 20),
    ("com.microsoft:BiasGelu", [_X, (F32, (6,))], {}, 20),
    ("com.microsoft:FastGelu", [_X, (F32, (6,))], {}, 20),
    ("com.microsoft:Trilu", [_X], {}, 20),
    ("com.microsoft:SkipLayerNormalization", [(F32, (2, 4, 6))] * 2 + [(F32, (6,))] * 2, {}, 20),
    ("com.microsoft:FusedMatMul", [_X, (F32, (6, 6))], {}, 20),
    ("com.microsoft:FusedGemm", [_X, (F32, (6, 6)), _X], {"activation": "Relu"}, 20),
    ("com.microsoft:FusedConv", [_IMAGE, (F32, (4, 4, 1, 1)), _CHANNELS, _IMAGE], {"activation": "Relu"}, 20),
    ("com.microsoft.nchwc:Conv",
     [(F32, (1, 16, 4, 4)), (F32, (16, 16, 1, 1)), (F32, (16,)), (F32, (1, 16, 4, 4))], {}, 20),
    ("com.microsoft.nchwc:ReorderInput", [(F32, (1, 16, 4, 4))], {}, 20),
    ("com.microsoft.nchwc:ReorderOutput", [(F32, (1, 16, 4, 4))], {"channels": 16}, 20),
]  # fmt: skip

# Inputs that say a shape, axes or the like must have sensible values and be constant.
_CONSTANTS: dict[tuple[str, int], Any] = {
    ("Reshape", 1): [6, 4],
    ("Squeeze", 1): [1],
    ("Unsqueeze", 1): [1],
    ("ExpandDims", 1): 0,
    ("Expand", 1): [4, 6],
    ("Tile", 1): [1, 1],
    ("Pad", 1): [0, 0, 0, 0],
    ("Slice", 1): [0],
    ("Slice", 2): [4],
    ("Slice", 3): [0],
    ("CumSum", 1): 0,
    ("ReduceSum", 1): [1],
    ("Clip", 1): 0,
    ("Clip", 2): 1,
}


def _element_type(dtype: np.dtype[Any]) -> int:
    return helper.np_dtype_to_tensor_dtype(dtype)


def _allocated(case: Case, slot: int, keep: bool, directory: Path) -> int:
    """Return the bytes ONNX Runtime takes for the output when `slot` dies there (or is kept)."""
    name, inputs, attributes, opset = case
    domain, _, op = name.rpartition(":")
    feed: dict[str, np.ndarray] = {}
    initializers = []
    for index, (dtype, shape) in enumerate(inputs):
        constant = _CONSTANTS.get((op, index))
        if constant is None:
            feed[f"x{index}"] = np.ones(shape, dtype)
        else:
            initializers.append(onnx.numpy_helper.from_array(np.array(constant, dtype), f"x{index}"))
    slots = ["dies" if index == slot else f"x{index}" for index in range(len(inputs))]
    nodes = [
        helper.make_node("Concat", [f"x{slot}"], ["dies"], name="copy", axis=0),
        helper.make_node(op, slots, ["out"], name="tested", domain=domain, **attributes),
        helper.make_node("Shape", ["out"], ["shape"], name="reader"),
    ]
    outputs = [helper.make_tensor_value_info("shape", onnx.TensorProto.INT64, None)]
    if keep:
        outputs.append(onnx.ValueInfoProto(name="dies"))
    infos = [helper.make_tensor_value_info(k, _element_type(v.dtype), v.shape) for k, v in feed.items()]
    graph = helper.make_graph(nodes, "graph", infos, outputs, initializers)
    domains = {"": opset, "com.microsoft": 1, "com.microsoft.nchwc": 1}
    imports = [helper.make_opsetid(*item) for item in domains.items()]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    directory.mkdir()
    options.add_session_config_entry(_STATISTICS, str(directory / "stats.csv"))
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    session.run(None, feed)
    del session
    rows = [row for path in directory.iterdir() for row in csv.DictReader(path.open())]
    (row,) = [row for row in rows if row["#name"].startswith("tested_")]
    return int(row["total_dynamic_sizes"])


def _name(case: Case) -> str:
    return f"{case[0]}-{[dtype for dtype, _ in case[1]]}-{dict(case[2])}-{case[3]}".replace(" ", "")


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_alias_and_inplace_are_what_onnxruntime_plans(case: Case, tmp_path: Path) -> None:
    name, inputs, _, _ = case
    domain, _, op = name.rpartition(":")
    dtype = _element_type(np.dtype(inputs[0][0]))
    node = onnx.NodeProto(op_type=op, domain=domain)
    alias, inplace = CPU.aliases(node), CPU.may_inplace(node, dtype)
    assert semantics(domain, op).known
    for slot, (_, shape) in enumerate(inputs):
        if shape == () or (op, slot) in _CONSTANTS:
            continue  # ONNX Runtime cannot copy it here, or it could not be the output's buffer.
        dying = _allocated(case, slot, keep=False, directory=tmp_path / f"{slot}-dies")
        kept = _allocated(case, slot, keep=True, directory=tmp_path / f"{slot}-kept")
        assert (kept == 0) == ((slot, 0) in alias), f"alias of input {slot}"
        assert (dying == 0) == ((slot, 0) in (*alias, *inplace)), f"input {slot} in place"


def test_in_place_needs_the_same_element_size(tmp_path: Path) -> None:
    case: Case = ("Cast", [_X], {"to": onnx.TensorProto.INT64}, 20)
    assert _allocated(case, 0, keep=False, directory=tmp_path / "cast") > 0


def test_every_kernel_of_the_cpu_provider_is_known() -> None:
    registry = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")
    kernels = {k.op_name for k in registry.get_all_opkernel_def() if k.domain == "" and "CPU" in k.provider}
    experimental = {"DynamicSlice"}  # Without a schema even there.
    assert [k for k in sorted(kernels - experimental) if not semantics("", k).known] == []
    nchwc = {k.op_name for k in registry.get_all_opkernel_def() if k.domain == "com.microsoft.nchwc"}
    assert [k for k in sorted(nchwc) if not semantics("com.microsoft.nchwc", k).known] == []


def test_functions_are_the_operators_without_a_kernel() -> None:
    registry = pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")
    kernels = {k.op_name for k in registry.get_all_opkernel_def() if k.domain == "" and "CPU" in k.provider}
    schemas: dict[str, Any] = {s.name: s for s in onnx.defs.get_all_schemas() if s.domain == ""}
    for name, schema in schemas.items():
        has_body = schema.has_function or schema.has_context_dependent_function
        assert (("", name) in CPU.no_kernel) == (has_body and name not in kernels), name


@pytest.mark.parametrize(
    ("domain", "op", "options", "expected"),
    [
        ("", "RandomNormal", {}, True),
        ("ai.onnx", "Bernoulli", {}, True),
        ("", "Multinomial", {}, True),
        ("", "Relu", {}, False),
        ("", "Dropout", {"training_mode": True}, True),
        ("", "Dropout", {"training_mode": False}, False),
        ("", "Dropout", {}, True),  # In doubt.
        ("", "Dropout", {"opset": 10}, False),  # Only an inference form there.
        ("", "Dropout", {"opset": 6}, True),
        ("com.microsoft", "BitmaskDropout", {}, True),
    ],
)
def test_is_random(domain: str, op: str, options: dict[str, Any], expected: bool) -> None:
    assert is_random(domain, op, **options) is expected


def test_nothing_is_promised_of_the_unknown() -> None:
    for domain, op in (("custom", "Reshape"), ("", "NoSuchOperator")):
        node = onnx.NodeProto(op_type=op, domain=domain)
        assert semantics(domain, op) == OpSemantics(known=False)
        assert CPU.aliases(node) == CPU.may_inplace(node, onnx.TensorProto.FLOAT) == ()


def test_both_names_of_the_standard_domain() -> None:
    first, second = (onnx.NodeProto(op_type="Reshape", domain=domain) for domain in ("", "ai.onnx"))
    assert semantics("ai.onnx", "Reshape") == semantics("", "Reshape") == OpSemantics()
    assert CPU.aliases(first) == CPU.aliases(second) == ((0, 0),)


def test_state() -> None:
    assert not semantics("", "BatchNormalization").stateful  # Running statistics are outputs.
    assert semantics("com.microsoft", "InPlaceAccumulatorV2").stateful
