"""Every gradient rule against central differences in float64, sizes known and unknown beforehand."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx_remat.converters.autodiff import add_backward
from onnx_remat.converters.autodiff.registry import RULES
from onnx_remat.converters.checks.exact import Evaluator
from onnx_remat.converters.checks.finite_differences import widened

from onnx_remat.ort import runtime

OPSET = 20


@dataclass(frozen=True)
class Case:
    """One node: inputs are shapes (normal data), arrays (constants, no gradient) or None; `wrt` slots are checked."""

    op: str
    inputs: tuple[Any, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    low: float | None = None  # inputs uniform in [low, high] instead of normal
    high: float = 2.0
    opset: int = OPSET
    frozen: tuple[int, ...] = ()  # slots with shapes that are not differentiated
    dynamic: bool = True  # also with symbolic sizes
    tag: str = ""

    @property
    def id(self) -> str:
        return f"{self.op}-{self.tag}" if self.tag else self.op


def i64(*values: Any) -> np.ndarray:
    return np.asarray(values[0] if len(values) == 1 and isinstance(values[0], list | int) else values, np.int64)


def f32(*values: float) -> np.ndarray:
    return np.asarray(values if len(values) > 1 else values[0], np.float32)


NONE = np.zeros(0, np.float32)
UNARY = (
    "Identity", "Neg", "Abs", "Relu", "LeakyRelu", "Elu", "Selu", "Celu", "ThresholdedRelu", "HardSigmoid", "HardSwish",
    "Mish", "Gelu", "Sigmoid", "Tanh", "Softplus", "Softsign", "Erf", "Exp", "Sin", "Cos", "Atan", "Sinh", "Cosh",
    "Asinh", "Softmax", "LogSoftmax", "Tan", "Flatten",
)  # fmt: skip
REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare",
              "ReduceLogSumExp")  # fmt: skip
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean")

CASES = [
    *(Case(op, ((2, 3, 4),)) for op in UNARY),
    *(Case(op, ((2, 3),), low=0.2) for op in ("Log", "Sqrt", "Reciprocal")),
    *(Case(op, ((2, 3),), low=-0.9, high=0.9) for op in ("Asin", "Acos", "Atanh")),
    Case("Acosh", ((2, 3),), low=1.2),
    Case("Gelu", ((2, 5),), {"approximate": "tanh"}, tag="tanh"),
    Case("Swish", ((2, 5),), {"alpha": 1.5}, opset=24),
    Case("Elu", ((2, 5),), {"alpha": 0.5}, tag="alpha"),
    Case("Celu", ((2, 5),), {"alpha": 0.5}, tag="alpha"),
    Case("Flatten", ((2, 3, 4),), {"axis": 2}, tag="axis2"),
    Case("Softmax", ((2, 3, 4),), {"axis": 1}, tag="axis1"),
    Case("LogSoftmax", ((2, 3, 4),), {"axis": 0}, tag="axis0"),
    *(Case(op, ((2, 3), (2, 3)), low=0.3) for op in BINARY),
    *(Case(op, ((2, 3, 4), (3, 1)), low=0.3, tag="broadcast") for op in BINARY),
    *(Case(op, ((3, 1), (2, 1, 4)), low=0.3, tag="both") for op in ("Add", "Sub", "Mul", "Div", "Pow")),
    Case("Sum", ((2, 3), (3,), (1, 1)), tag="three"),
    Case("Max", ((2, 3), (3,), (2, 1)), tag="three"),
    Case("Pow", ((2, 3), (2, 3)), low=0.3),
    *(Case("Pow", ((2, 3), f32(n)), low=0.3, tag=f"by{n}") for n in (2.0, 0.5, 3.0, -1.0, 2.5)),
    Case("Pow", ((2, 3), i64(2)), tag="integer"),
    Case("Where", (np.asarray([[True, False, True]]), (2, 3), (1, 3))),
    Case("Clip", ((3, 4), f32(-0.5), f32(0.5))),
    Case("Clip", ((3, 4), None, f32(0.5)), tag="above"),
    Case("PRelu", ((2, 3, 4), (3, 1))),
    Case("Cast", ((2, 3),), {"to": TensorProto.FLOAT}),
    Case("CastLike", ((2, 3), f32(1, 2))),
    Case("Dropout", ((2, 3),), tag="inference"),
    *(Case(op, ((2, 3, 4), i64([1])), {"keepdims": k}, tag=f"keep{k}", low=0.2) for op in REDUCTIONS for k in (0, 1)),
    *(Case(op, ((2, 3, 4),), {"keepdims": 0}, tag="all", low=0.2) for op in REDUCTIONS),
    Case("ReduceSum", ((2, 3, 4), i64([0, -1])), {"keepdims": 0}, tag="two"),
    Case("ReduceMean", ((2, 3, 4), i64([0, -1])), {"keepdims": 0}, tag="two"),
    Case("ReduceSum", ((2, 3),), {"noop_with_empty_axes": 1}, tag="nothing"),
    Case("ReduceLogSum", ((2, 3), i64([1])), low=0.3),
    *(Case("ReduceProd", ((2, 3, 4), i64([1])), {"keepdims": k}, opset=18, tag=f"keep{k}", low=0.2) for k in (0, 1)),
    Case("ReduceProd", ((2, 3, 4),), {"keepdims": 0}, tag="all", low=0.5),
    Case("Mod", ((2, 3), (2, 1)), {"fmod": 1}, low=0.3),
    Case("Shrink", ((3, 4),), {"lambd": 0.4, "bias": 0.2}),
    Case("CumSum", ((2, 4), i64(1))),
    Case("CumSum", ((2, 4), i64(0)), {"exclusive": 1, "reverse": 1}, tag="reversed"),
    Case("MatMul", ((3, 4), (4, 5))),
    Case("MatMul", ((2, 3, 4), (4, 5)), tag="rows"),
    Case("MatMul", ((2, 3, 4), (2, 4, 5)), tag="batch"),
    Case("MatMul", ((2, 1, 3, 4), (5, 4, 2)), tag="broadcast"),
    Case("MatMul", ((4,), (4, 5)), tag="vector-matrix"),
    Case("MatMul", ((2, 3, 4), (4,)), tag="matrix-vector"),
    Case("MatMul", ((4,), (4,)), tag="vectors"),
    Case("MatMul", ((4,), (2, 4, 3)), tag="vector-batch"),
    *(
        Case("Gemm", ((4, 3) if a else (3, 4), (5, 4) if b else (4, 5), (5,)),
             {"transA": a, "transB": b, "alpha": 0.5, "beta": 2.0}, tag=f"{a}{b}")
        for a in (0, 1) for b in (0, 1)
    ),
    Case("Gemm", ((3, 4), (4, 5)), tag="plain"),
    Case("Einsum", ((2, 3), (3, 4)), {"equation": "ij,jk->ik"}),
    Case("Einsum", ((2, 3, 4), (2, 5, 4)), {"equation": "bij,bkj->bki"}, tag="batch"),
    Case("Einsum", ((2, 3), (4,)), {"equation": "ij,k->k"}, tag="summed"),
    Case("Einsum", ((2, 3), (3,)), {"equation": "ij,j"}, tag="implicit"),
    Case("Einsum", ((2, 3, 4), (4, 5)), {"equation": "...ij,jk->...ik"}, tag="ellipsis"),
    Case("Einsum", ((3, 2, 4), (3, 2, 4)), {"equation": "i...,i...->..."}, tag="ellipses"),
    Case("Einsum", ((2, 4, 3), (2, 3, 5)), {"equation": "...ij, ...jk"}, tag="implicit-ellipsis"),
    *(
        Case("AffineGrid", ((n, len(sizes), len(sizes) + 1), i64([n, 3, *sizes])), {"align_corners": c},
             tag=f"{len(sizes)}d-{n}-{c}", dynamic=False)
        for n in (1, 2) for sizes in ([4, 3], [2, 3, 2]) for c in (0, 1)
    ),
    # Convolutions: input, weight, bias.
    Case("Conv", ((2, 3, 7, 6), (4, 3, 3, 3), (4,)), {"pads": [1, 1, 1, 1]}),
    Case("Conv", ((2, 3, 8, 7), (4, 3, 3, 2)), {"strides": [2, 3], "pads": [1, 0, 0, 1]}, tag="strided"),
    Case("Conv", ((2, 3, 9, 9), (2, 3, 2, 3)), {"dilations": [2, 3], "strides": [2, 1]}, tag="dilated"),
    Case("Conv", ((2, 4, 6, 6), (6, 2, 3, 3), (6,)), {"group": 2, "strides": [2, 2]}, tag="grouped"),
    Case("Conv", ((2, 3, 5, 5), (3, 1, 3, 3)), {"group": 3, "pads": [1] * 4}, tag="depthwise"),
    Case("Conv", ((2, 3, 5, 4), (4, 3, 1, 1)), tag="pointwise"),
    Case("Conv", ((2, 3, 5, 4), (4, 3, 1, 1)), {"strides": [2, 2]}, tag="pointwise-strided"),
    Case("Conv", ((2, 4, 5, 4), (4, 2, 1, 1)), {"strides": [2, 2], "group": 2}, tag="pointwise-grouped"),
    Case("Conv", ((2, 3, 8, 7), (4, 3, 3, 3)), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}, tag="same",
         dynamic=False),
    Case("Conv", ((2, 3, 8, 7), (4, 3, 2, 2)), {"auto_pad": "SAME_LOWER"}, tag="same-lower", dynamic=False),
    Case("Conv", ((2, 3, 8, 7), (4, 3, 3, 3)), {"auto_pad": "VALID"}, tag="valid"),
    Case("Conv", ((2, 16, 6, 7), (3, 16, 3, 2)), {"strides": [2, 1], "pads": [1, 0, 0, 2]}, tag="many-channels"),
    Case("Conv", ((2, 16, 7, 7), (2, 16, 2, 3)), {"dilations": [3, 2], "strides": [2, 2]}, tag="many-dilated"),
    Case("ConvTranspose", ((1, 2, 3, 4), (2, 16, 3, 2)), {"strides": [2, 1], "pads": [1, 0, 0, 1]}, tag="many"),
    Case("Conv", ((1, 2, 21, 20), (3, 2, 3, 2)), {"pads": [1, 0, 0, 1], "dilations": [1, 2]}, tag="large"),
    Case("Conv", ((1, 4, 20, 20), (6, 2, 1, 3)), {"pads": [0, 2, 0, 1], "group": 2}, tag="large-grouped"),
    Case("Conv", ((1, 2, 20, 20), (2, 2, 2, 2)), {"pads": [2] * 4}, tag="large-overpadded"),
    Case("Conv", ((2, 3, 8), (4, 3, 3)), {"strides": [3]}, tag="1d"),
    Case("Conv", ((1, 2, 4, 5, 4), (2, 2, 3, 2, 2)), {"strides": [2, 1, 2], "pads": [1, 0, 0, 0, 1, 1]}, tag="3d"),
    Case("Conv", ((1, 2, 9, 9), (2, 2, 2, 2)), {"strides": [5, 5]}, tag="gaps"),
    Case("ConvTranspose", ((2, 3, 4, 4), (3, 2, 3, 3), (2,))),
    Case("ConvTranspose", ((2, 3, 4, 4), (3, 2, 3, 3)), {"strides": [2, 2], "pads": [1] * 4, "output_padding": [1, 1]},
         tag="strided"),
    Case("ConvTranspose", ((2, 4, 3, 3), (4, 2, 2, 2)), {"strides": [2, 2], "group": 2}, tag="grouped"),
    Case("ConvTranspose", ((1, 2, 4), (2, 3, 3)), {"dilations": [2]}, tag="dilated-1d"),
    # Pooling and resizing.
    Case("MaxPool", ((2, 2, 6, 6),), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    Case("MaxPool", ((2, 2, 7, 6),), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}, tag="overlap"),
    Case("MaxPool", ((2, 2, 7, 7),), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}, tag="ceil"),
    Case("MaxPool", ((2, 2, 7),), {"kernel_shape": [2], "dilations": [2]}, tag="1d-dilated"),
    Case("MaxPool", ((1, 2, 4, 4, 4),), {"kernel_shape": [2] * 3, "strides": [2] * 3}, tag="3d"),
    Case("AveragePool", ((2, 2, 6, 6),), {"kernel_shape": [2, 2], "strides": [2, 2]}),
    Case("AveragePool", ((2, 2, 6, 5),), {"kernel_shape": [3, 2], "strides": [1, 2]}, tag="overlap"),
    Case("AveragePool", ((2, 2, 6, 6),), {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1] * 4}, tag="padded",
         dynamic=False),
    Case("AveragePool", ((2, 2, 6, 6),), {"kernel_shape": [3, 3], "pads": [1] * 4, "count_include_pad": 1},
         tag="counted"),
    Case("AveragePool", ((2, 2, 7, 7),), {"kernel_shape": [3, 3], "strides": [2, 2], "ceil_mode": 1}, tag="ceil",
         dynamic=False),
    Case("AveragePool", ((1, 2, 6),), {"kernel_shape": [3], "strides": [3]}, tag="1d"),
    Case("GlobalAveragePool", ((2, 3, 4, 5),)),
    Case("GlobalMaxPool", ((2, 3, 4, 5),)),
    Case("LRN", ((2, 6, 2, 3),), {"size": 3, "alpha": 0.3, "beta": 0.75, "bias": 1.5}),
    Case("Resize", ((1, 2, 3, 4), NONE, f32(1, 1, 2, 2)), {"mode": "nearest",
         "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}, tag="nearest", dynamic=False),
    Case("Resize", ((1, 2, 4, 6), NONE, f32(1, 1, 0.5, 1.5)), {"mode": "nearest"}, tag="nearest-odd", dynamic=False),
    Case("Resize", ((1, 2, 3, 4), NONE, f32(1, 1, 2, 2)), {"mode": "linear"}, tag="linear", dynamic=False),
    Case("Resize", ((1, 2, 3, 4), None, None, i64([1, 2, 5, 7])), {"mode": "linear",
         "coordinate_transformation_mode": "align_corners"}, tag="corners", dynamic=False),
    Case("Resize", ((1, 2, 4, 4), NONE, f32(1, 1, 2, 2)), {"mode": "cubic"}, tag="cubic", dynamic=False),
    # Normalisation.
    Case("BatchNormalization", ((2, 3, 4), (3,), (3,), f32(0.1, -0.2, 0.3), f32(0.5, 1.0, 1.5)), tag="inference"),
    Case("LayerNormalization", ((2, 3, 4), (4,), (4,))),
    Case("LayerNormalization", ((2, 3, 4), (3, 4), (3, 4)), {"axis": 1, "epsilon": 1e-3}, tag="axis1"),
    Case("LayerNormalization", ((2, 3, 4), (4,)), tag="no-bias"),
    Case("RMSNormalization", ((2, 3, 4), (4,)), opset=23),
    Case("InstanceNormalization", ((2, 3, 4, 2), (3,), (3,)), dynamic=False),
    Case("GroupNormalization", ((2, 6, 3), (6,), (6,)), {"num_groups": 2}, opset=21, dynamic=False),
    Case("GroupNormalization", ((2, 6, 3), (2,), (2,)), {"num_groups": 2}, opset=18, dynamic=False, tag="of groups"),
    Case("LpNormalization", ((3, 4),), {"axis": 1}),
    Case("LpNormalization", ((3, 4),), {"axis": 0, "p": 1}, tag="p1"),
    # Moving entries.
    Case("Reshape", ((2, 3, 4), i64([3, -1]))),
    Case("Reshape", ((2, 3, 4), i64([0, -1])), tag="zero"),
    Case("Squeeze", ((2, 1, 3), i64([1]))),
    Case("Unsqueeze", ((2, 3), i64([0, 2]))),
    Case("Transpose", ((2, 3, 4),), {"perm": [2, 0, 1]}),
    Case("Transpose", ((2, 3, 4),), tag="reversed"),
    Case("Expand", ((3, 1), i64([2, 3, 4]))),
    Case("Tile", ((2, 3), i64([2, 2]))),
    Case("Concat", ((2, 3), (2, 4)), {"axis": 1}),
    Case("Concat", ((2, 3), (1, 3), (2, 3)), {"axis": 0}, tag="three"),
    Case("Concat", ((2, 3), (2, 4)), {"axis": 1}, frozen=(0,), tag="one-wanted"),
    Case("Split", ((2, 6),), {"axis": 1, "num_outputs": 3}, outputs=3),
    Case("Split", ((5, 2), i64([2, 3])), {"axis": 0}, outputs=2, tag="sizes"),
    Case("Slice", ((4, 5), i64([1]), i64([3]), i64([1]))),
    Case("Slice", ((4, 5), i64([-3, 0]), i64([99, 2])), tag="ends"),
    Case("Slice", ((4, 5), i64([0]), i64([5]), i64([1]), i64([2])), tag="steps"),
    Case("Slice", ((4, 5), i64([-1]), i64([-99]), i64([0]), i64([-1])), tag="backwards"),
    Case("Gather", ((5, 3), i64([[0, 2], [2, -1]]))),
    Case("Gather", ((2, 5, 3), i64([0, 2, 2])), {"axis": 1}, tag="axis1"),
    Case("Gather", ((2, 5, 3), i64(3)), {"axis": 1}, tag="scalar"),
    Case("Gather", ((5, 3), np.asarray([1, 4, 1], np.int32)), tag="int32"),
    Case("GatherElements", ((3, 4), i64([[0, 1, 1, 2], [2, 2, 0, 0]])), {"axis": 0}),
    Case("GatherND", ((3, 4, 2), i64([[0, 1], [2, 3], [0, 1]]))),
    Case("GatherND", ((2, 3, 4, 2), i64([[[0, 1], [2, -1], [0, 1]], [[1, 0], [1, 2], [1, 3]]])), {"batch_dims": 1},
         tag="batch", dynamic=False),
    Case("GatherND", ((2, 3, 4, 2), i64([[[3], [1], [1]], [[0], [-4], [2]]])), {"batch_dims": 2}, tag="batches",
         dynamic=False),
    Case("ReverseSequence", ((4, 3, 2), i64([1, 4, 2]))),
    Case("ReverseSequence", ((3, 4, 2), i64([1, 4, 2])), {"batch_axis": 0, "time_axis": 1}, tag="batch-first"),
    Case("MaxUnpool", ((1, 2, 2, 2), i64([[[[0, 3], [9, 10]], [[21, 18], [29, 31]]]])),
         {"kernel_shape": [2, 2], "strides": [2, 2]}, dynamic=False),
    Case("ScatterElements", ((3, 4), i64([[0, 1, 1, 2]]), (1, 4)), {"axis": 0}),
    Case("ScatterElements", ((3, 4), i64([[0, 1, 1, 1]]), (1, 4)), {"axis": 1, "reduction": "add"}, tag="add"),
    Case("ScatterND", ((4, 3), i64([[0], [2]]), (2, 3))),
    Case("ScatterND", ((4, 3), i64([[1], [1]]), (2, 3)), {"reduction": "add"}, tag="add"),
    Case("OneHot", (i64([[0, 2], [1, 1]]), i64(3), (2,)), {"axis": 1}),
    Case("Range", ((), f32(4.0), f32(0.8)), dynamic=False, low=0.5, high=0.6),
    Case("Range", (f32(0.0), f32(4.0), ()), dynamic=False, low=0.8, high=0.9, tag="difference"),
    Case("TopK", ((3, 5), i64([2])), {"axis": 1}, outputs=2),
    Case("Pad", ((2, 3), i64([0, 1, 2, 1]))),
    Case("Pad", ((2, 3), i64([0, -1, 2, 1])), tag="cut"),
    Case("Pad", ((2, 4), i64([1, 2]), None, i64([1])), tag="axes"),
    Case("Pad", ((2, 4), i64([0, 2, 0, 1])), {"mode": "reflect"}, tag="reflect"),
    Case("Pad", ((2, 4), i64([0, 2, 0, 1])), {"mode": "edge"}, tag="edge"),
    Case("Trilu", ((3, 4),), {"upper": 0}),
    Case("Trilu", ((3, 4), i64(1)), {"upper": 1}, tag="upper"),
    Case("DepthToSpace", ((1, 8, 2, 3),), {"blocksize": 2}),
    Case("DepthToSpace", ((1, 8, 2, 3),), {"blocksize": 2, "mode": "CRD"}, tag="CRD"),
    Case("SpaceToDepth", ((1, 2, 4, 2),), {"blocksize": 2}),
    # Losses.
    *(
        Case("SoftmaxCrossEntropyLoss", ((3, 4), i64([0, 3, 1])), {"reduction": r}, tag=r)
        for r in ("mean", "sum", "none")
    ),
    Case("SoftmaxCrossEntropyLoss", ((2, 4, 3), i64([[0, 3, 1], [1, 1, 2]]), f32(1, 2, 0.5, 3)), {"ignore_index": 1},
         tag="weighted"),
    Case("NegativeLogLikelihoodLoss", ((3, 4), i64([0, 3, 1]))),
    Case("NegativeLogLikelihoodLoss", ((2, 4, 3), i64([[0, 3, 1], [1, 1, 2]]), f32(1, 2, 0.5, 3)), {"ignore_index": 1},
         tag="weighted"),
    # Recurrent: [steps, batch, features], weights of each direction, biases, lengths, first states.
    Case("LSTM", ((3, 2, 2), (1, 12, 2), (1, 12, 3), (1, 24), None, (1, 2, 3), (1, 2, 3)), {"hidden_size": 3}, 3,
         dynamic=False),
    Case("LSTM", ((3, 2, 2), (2, 12, 2), (2, 12, 3)), {"hidden_size": 3, "direction": "bidirectional"}, dynamic=False,
         tag="both ways"),
    Case("GRU", ((3, 2, 2), (1, 9, 2), (1, 9, 3), (1, 18)), {"hidden_size": 3}, dynamic=False),
    Case("GRU", ((3, 2, 2), (1, 9, 2), (1, 9, 3), (1, 18)), {"hidden_size": 3, "linear_before_reset": 1}, dynamic=False,
         tag="product before reset"),
    Case("RNN", ((3, 2, 2), (1, 3, 2), (1, 3, 3)), {"hidden_size": 3, "direction": "reverse"}, dynamic=False),
    # Without rules of their own: by the definition in terms of others.
    Case("MeanVarianceNormalization", ((2, 3, 4, 2),), tag="function"),
    Case("Softmax", ((2, 3),), {"axis": -2}, tag="negative"),
]  # fmt: skip
IDS = [case.id for case in CASES]


def build(case: Case, symbolic: bool) -> tuple[onnx.ModelProto, dict[str, np.ndarray], list[str]]:
    """The node and a weighted sum of its first output as loss; feeds; the inputs to differentiate by."""
    rng = np.random.default_rng(zlib.crc32(case.id.encode()))
    names, inputs, feeds, constants, wrt = [], [], {}, [], []
    for slot, given in enumerate(case.inputs):
        name = "" if given is None else f"x{slot}"
        names.append(name)
        if isinstance(given, np.ndarray):
            constants.append(onnx.numpy_helper.from_array(given, name))
        elif given is not None:
            made = rng.standard_normal(given) if case.low is None else rng.uniform(case.low, case.high, given)
            feeds[name] = made
            shape = [f"{name}.{i}" for i in range(len(given))] if symbolic and slot == 0 else given
            inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
            wrt += [] if slot in case.frozen else [name]
    node = helper.make_node(case.op, names, [f"y{i}" for i in range(case.outputs)], "the-node", **case.attributes)
    graph = helper.make_graph([node], "case", inputs, [helper.make_tensor_value_info("y0", 1, None)], constants)
    opsets = [helper.make_opsetid("", case.opset)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    y = runtime.outputs(model, {k: v.astype(np.float32) for k, v in feeds.items()})["y0"]
    weight = rng.standard_normal(y.shape)
    inputs.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, weight.shape))
    feeds["w"] = weight
    weigh = helper.make_node("Mul", ["y0", "w"], ["wy"])
    nodes = [node, weigh, helper.make_node("ReduceSum", ["wy"], ["loss"], keepdims=0)]
    graph = helper.make_graph(nodes, "case", inputs, [helper.make_tensor_value_info("loss", 1, [])], constants)
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), feeds, wrt


def differences(model: onnx.ModelProto, feeds: dict[str, np.ndarray], wrt: list[str]) -> dict[str, np.ndarray]:
    """Central differences of the loss by each entry, in float64."""
    forward, h = Evaluator(widened(ir.from_proto(model), ir.DataType.DOUBLE)), 1e-5

    def loss(name: str, index: int, by: float) -> float:
        moved = feeds[name].copy()
        moved.reshape(-1)[index] += by
        return float(np.sum(forward.run({**feeds, name: moved})["loss"]))

    return {
        name: np.asarray([(loss(name, i, h) - loss(name, i, -h)) / (2 * h) for i in range(feeds[name].size)]).reshape(
            feeds[name].shape
        )
        for name in wrt
    }


SLOW = ("Conv-many-channels", "Conv-large-grouped", "Conv-many-dilated", "Conv-large", "Resize-nearest-odd")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if case.id in SLOW else case for case in CASES], ids=IDS
)
def test_rule_against_differences(case: Case) -> None:
    model, feeds, wrt = build(case, symbolic=False)
    expected = differences(model, feeds, wrt)
    single = {k: v.astype(np.float32) for k, v in feeds.items()}
    for symbolic in (False, True) if case.dynamic else (False,):
        forward = build(case, symbolic)[0]
        step = add_backward(forward, wrt=wrt, check=False)
        made = runtime.outputs(step, single)
        for name in wrt:
            gradient = made[f"grad.{name}"]
            assert gradient.shape == expected[name].shape, (name, symbolic)
            scale = max(np.abs(expected[name]).max(), 1e-3)
            error = np.abs(gradient - expected[name]).max() / scale
            assert error < 2e-4, (name, symbolic, gradient, expected[name])


def test_every_rule_has_a_case() -> None:
    assert sorted(set(RULES) - {case.op for case in CASES}) == []
