"""Run by an interpreter with onnxruntime-training: what its kernels make and hold, as JSON, one object per case.

    FOLDER/bin/python tests/training_build_facts.py > tests/data/training_build_facts.json

Large float inputs are made by a node of their own. Kept alive until after the operator under test, they forbid working
in place; each in turn may die there. The rise of resident memory tells what the kernel takes besides and what it saves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

F32, I64, BOOL = "f4", "i8", "?"
X = (F32, [1024, 4096])
ROWS, COLUMNS = (I64, [1024]), (F32, [4096])
TOKENS, WIDTH, STATISTIC = (F32, [64, 64, 1024]), (F32, [1024]), (F32, [64, 64, 1])
IMAGE, MADE, CHANNELS = (F32, [16, 32, 64, 64]), (F32, [16, 48, 64, 64]), (F32, [32])
SCALAR, FLAG = (F32, []), (BOOL, [1])


def ints(*values: int) -> list[int]:
    """A constant input."""
    return list(values)


CASES: list[tuple[str, list[Any], dict[str, Any], int]] = [
    *((op, [X, X], {}, 1) for op in ("ReluGrad", "SigmoidGrad", "TanhGrad", "GeluGrad", "FastGeluGrad",
                                     "QuickGeluGrad", "LeakyReluGrad")),
    *((op, [X, X, COLUMNS], {}, 1) for op in ("BiasGeluGrad_dX", "BiasFastGeluGrad_dX")),
    *((op, [X, X], {"axis": 1}, 1) for op in ("SoftmaxGrad", "LogSoftmaxGrad")),
    *((op, [X, X], {"axis": axis}, 1) for op in ("SoftmaxGrad_13", "LogSoftmaxGrad_13") for axis in (-1, 0)),
    ("LayerNormalizationGrad", [TOKENS, TOKENS, WIDTH, STATISTIC, STATISTIC], {"axis": -1}, 3),
    ("SimplifiedLayerNormalizationGrad", [TOKENS, TOKENS, WIDTH, STATISTIC], {"axis": -1}, 2),
    ("BatchNormInternal", [IMAGE, *[CHANNELS] * 4], {"training_mode": 1}, 5),
    ("BatchNormalizationGrad", [IMAGE, IMAGE, *[CHANNELS] * 3], {"epsilon": 1e-5}, 3),
    ("ConvGrad", [MADE, IMAGE, (F32, [48, 32, 3, 3])], {"pads": [1] * 4, "kernel_shape": [3, 3]}, 3),
    ("ConvGrad", [MADE, IMAGE, (F32, [48, 8, 3, 3])], {"pads": [1] * 4, "kernel_shape": [3, 3], "group": 4}, 3),
    ("ConvGrad", [MADE, IMAGE, (F32, [48, 32, 1, 1])], {"kernel_shape": [1, 1]}, 3),
    ("ConvGrad", [(F32, [16, 48, 32, 32]), IMAGE, (F32, [48, 32, 3, 3])],
     {"pads": [1] * 4, "strides": [2, 2], "kernel_shape": [3, 3]}, 2),
    ("Scale", [X, (F32, [1])], {}, 1),
    ("DropoutGrad", [X, (BOOL, X[1])], {}, 1),
    ("FakeQuantGrad", [X, (BOOL, X[1])], {}, 1),
    ("GatherGrad", [ints(1024, 4096), ROWS, X], {"axis": 0}, 1),
    ("GatherElementsGrad", [X, ints(1024, 4096), (I64, X[1])], {"axis": 0}, 1),
    ("GatherNDGrad", [ints(1024, 4096), (I64, [1024, 1]), X], {"batch_dims": 0}, 1),
    ("SliceGrad", [(F32, [1024, 2048]), ints(1024, 4096), ints(0), ints(2048), ints(1), ints(1)], {}, 1),
    ("SoftmaxCrossEntropyLossGrad", [SCALAR, X, ROWS], {"reduction": "mean"}, 1),
    ("SoftmaxCrossEntropyLossInternal", [X, ROWS], {"reduction": "mean"}, 2),
    ("SoftmaxCrossEntropyLossInternalGrad", [SCALAR, X, ROWS], {"reduction": "mean"}, 1),
    (":SoftmaxCrossEntropyLoss", [X, ROWS], {"reduction": "mean"}, 2),
    (":SoftmaxCrossEntropyLoss", [X, ROWS], {"reduction": "mean"}, 1),
    ("ReduceSumTraining", [X, ints(0)], {"keepdims": 0}, 1),
    ("ConcatTraining", [X, X], {"axis": 0}, 2),
    ("SplitTraining", [X, ints(512, 512)], {"axis": 0}, 2),
    ("InPlaceAccumulator", [X, X], {}, 1),
    ("InPlaceAccumulatorV2", [X, X, FLAG], {}, 2),
    ("ZeroGradient", [X, (F32, [1])], {}, 1),
    ("Gelu", [X], {}, 1),
    ("FusedMatMul", [(F32, [1024, 1024]), X], {"transA": 1, "alpha": 0.5}, 1),
]  # fmt: skip

LARGE = 1 << 20
"""Elements from which on an input's memory can be distinguished from noise."""


def model_of(case: tuple[str, list[Any], dict[str, Any], int], dying: int | None = None) -> onnx.ModelProto:
    """The operator, its large inputs made by nodes; all but `dying` are read again afterwards."""
    name, inputs, attributes, outputs = case
    domain, _, op = name.rpartition(":") if ":" in name else ("com.microsoft", "", name)
    made = [f"o{i}" for i in range(outputs)]
    weights = {"one": np.float32(1), "none": np.int64(0), "first": np.array([1], np.int64)}
    nodes, slots, feeds = [], [], []
    for i, entry in enumerate(inputs):
        slots.append(f"x{i}")
        if isinstance(entry, list):
            weights[f"x{i}"] = np.array(entry, np.int64)
            continue
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(entry[0]))
        feeds.append(helper.make_tensor_value_info(f"x{i}", kind, entry[1]))
        if is_large(entry):
            slots[-1] = f"t{i}"
            nodes.append(helper.make_node("Mul", [f"x{i}", "one"], [f"t{i}"]))
    nodes.append(helper.make_node(op, slots, made, name="tested", domain=domain, **attributes))
    nodes += [helper.make_node("Size", [value], [f"size.{value}"]) for value in made]
    nodes.append(helper.make_node("Mul", ["size.o0", "none"], ["zero"]))
    nodes.append(helper.make_node("Reshape", ["zero", "first"], ["start"]))
    later = [slot for i, slot in enumerate(slots) if slot == f"t{i}" and i != dying]
    nodes += [helper.make_node("Slice", [slot, "start", "first"], [f"later.{slot}"]) for slot in later]
    nodes += [helper.make_node("Size", [f"later.{slot}"], [f"size.{slot}"]) for slot in later]
    ends = [helper.make_tensor_value_info(f"size.{v}", TensorProto.INT64, []) for v in [*made, *later]]
    constants = [numpy_helper.from_array(np.asarray(value), n) for n, value in weights.items()]
    graph = helper.make_graph(nodes, "g", feeds, ends, constants)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def is_large(entry: Any) -> bool:
    """Is it a float input whose memory can be distinguished from noise?"""
    return isinstance(entry, tuple) and entry[0] == F32 and int(np.prod(entry[1])) >= LARGE


def run(model: onnx.ModelProto, extra: list[str] | None = None) -> tuple[list[np.ndarray], int]:
    """Outputs (`extra` values included), and the rise of resident memory in a second run."""
    import onnxruntime

    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in extra or [])
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.intra_op_num_threads, options.log_severity_level = 2, 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [d.dim_value for d in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        feeds[value.name] = np.full(shape, kind.elem_type == TensorProto.FLOAT, dtype)
    made = session.run(None, feeds)
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    session.run(None, feeds)
    return made, resident("VmHWM") - before


def resident(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def facts(case: tuple[str, list[Any], dict[str, Any], int]) -> dict[str, Any]:
    """Shapes of the outputs; megabytes taken besides them (negative: less), and saved by each input that dies."""
    values = [f"o{i}" for i in range(case[3])]
    shown = run(model_of(case), values)[0][-len(values) :]
    kept = run(model_of(case))[1]
    large = [i for i, entry in enumerate(case[1]) if is_large(entry)]
    held = sum(4 * int(np.prod(case[1][i][1])) for i in large) + sum(value.nbytes for value in shown)
    return {
        "shapes": [list(value.shape) for value in shown],
        "dtypes": [value.dtype.name for value in shown],
        "besides": round((kept - held) / 1e6, 1),
        "saved": {str(i): round((kept - run(model_of(case, i))[1]) / 1e6, 1) for i in large},
    }


if __name__ == "__main__":
    print("[\n" + ",\n".join(json.dumps(facts(case)) for case in CASES) + "\n]")
