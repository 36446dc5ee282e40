"""Memory facts about the kernels of ONNX Runtime's CUDA provider, and the nodes that have one.

The tables state the decisions of ONNX Runtime 1.31.1 on a device, measured for the operators that the converters write,
with seven element types. ``tests/ort/test_cuda_facts.py`` repeats the measurement. See `cpu` for the effect of the
declarations on the buffer plan.

* In place here but not on the CPU: Gelu, QuickGelu, HardSwish, ScatterND. The other way round: Softmax, LogSoftmax,
  Cast, Clip, ScatterElements, and the residual input of FusedConv.
* A node without a kernel runs on the host: its inputs are copied to the host, its results back, and the device waits.
* Kernels read shapes, axes and similar inputs in host memory. Such values count as if they were on the device: a plan
  has a few hundred bytes of them.
* cuDNN's workspace for a convolution depends on the device and the version: see `cuda_workspace`.
"""

from __future__ import annotations

from typing import Final

import onnx
from onnx import TensorProto

from onnx_remat.ir import large_windows
from onnx_remat.ir.graph import attributes
from onnx_remat.ort.kernels import cuda_workspace
from onnx_remat.ort.kernels.base import Kernels, OpKey, Pairs, key

_ONNX: Final = ""
_MS: Final = "com.microsoft"
_NCHWC: Final = "com.microsoft.nchwc"

_FIRST: Final[Pairs] = ((0, 0),)

_ALIAS: Final[dict[OpKey, Pairs]] = {
    (_ONNX, op): _FIRST for op in ("Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze")
}

_INPLACE: Final[dict[OpKey, Pairs]] = {
    **{
        (_ONNX, op): _FIRST
        for op in (
            "Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "ScatterND", "Selu", "Shrink", "Sigmoid",
            "Softplus", "Softsign", "Tanh", "TensorScatter", "ThresholdedRelu", "Trilu",
        )
    },
    **{(_MS, op): _FIRST for op in ("Gelu", "QuickGelu", "Trilu")},
}  # fmt: skip

_REDUCTIONS: Final = (
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd",
    "ReduceSum", "ReduceSumSquare",
)  # fmt: skip

_HOST_INPUTS: Final[dict[OpKey, tuple[int, ...]]] = {
    **{(_ONNX, op): (1,) for op in ("CumSum", "Expand", "Reshape", "Split", "Squeeze", "Tile", "TopK", "Unsqueeze")},
    **{(_ONNX, op): (1,) for op in (*_REDUCTIONS, "Upsample")},
    **{(_ONNX, op): (1, 2) for op in ("Dropout", "OneHot")},
    (_ONNX, "ConstantOfShape"): (0,),
    (_ONNX, "Pad"): (1, 2, 3),
    (_ONNX, "Range"): (0, 1, 2),
    (_ONNX, "Resize"): (1, 2, 3),
    (_ONNX, "Slice"): (1, 2, 3, 4),
    (_ONNX, "If"): (0,),
    (_ONNX, "Loop"): (0, 1),
    (_ONNX, "MemcpyFromHost"): (0,),
}

_HALF: Final = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16})
_FLOATS: Final = _HALF | {TensorProto.DOUBLE}
_BRAIN: Final = _FLOATS | {TensorProto.BFLOAT16}
_LONG: Final = frozenset({TensorProto.INT64})
_INT: Final = frozenset({TensorProto.INT32})
_BYTE: Final = frozenset({TensorProto.UINT8})
_UNSIGNED: Final = frozenset({TensorProto.UINT32, TensorProto.UINT64})

_DEVICE_TYPES: Final[dict[OpKey, frozenset[int]]] = {
    (_ONNX, op): types
    for types, ops in (
        (frozenset[int](), (
            "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr",
            "BitwiseXor", "Celu", "Cosh", "GRU", "Hardmax", "LpPool", "Mean", "MeanVarianceNormalization",
            "Multinomial", "Sinh", "Tan", "Unique",
        )),
        (frozenset({TensorProto.FLOAT}), ("GridSample",)),
        (_HALF, ("LpNormalization",)),
        (_FLOATS, (
            "ArgMax", "ArgMin", "BatchNormalization", "Ceil", "Conv", "ConvTranspose", "Cos", "DepthToSpace",
            "Dropout", "Einsum", "Elu", "Floor", "GlobalAveragePool", "GlobalMaxPool", "HardSigmoid", "HardSwish",
            "InstanceNormalization", "LRN", "LSTM", "LeakyRelu", "Log", "LogSoftmax", "PRelu", "RNN",
            "RandomNormalLike", "RandomUniformLike", "Reciprocal", "ReduceLogSum", "ReduceLogSumExp",
            "ReduceSumSquare", "Round", "Selu", "Sin", "Softplus", "Softsign", "SpaceToDepth", "ThresholdedRelu",
        )),
        (_FLOATS | _INT, ("ReduceL1", "ReduceL2", "ReduceProd")),
        (_FLOATS | _LONG | _INT, ("CumSum",)),
        (frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.UINT64}) | _LONG | _INT, ("EyeLike",)),
        (_FLOATS | _LONG | _BYTE, ("Clip",)),
        (_FLOATS | _INT | _BYTE, ("Resize", "Upsample")),
        (_FLOATS | _LONG | _INT | _BYTE, ("ReduceMax", "ReduceMin", "TopK")),
        (_FLOATS | _LONG | _INT | _UNSIGNED | {TensorProto.BOOL}, ("Equal",)),
        (_FLOATS | _LONG | _INT | _UNSIGNED, ("Greater", "GreaterOrEqual", "Less", "LessOrEqual")),
        (_FLOATS | {TensorProto.BOOL}, ("Pad",)),
        (_FLOATS | _BYTE, ("MaxPool",)),
        (_HALF | _LONG | _INT | _BYTE | {TensorProto.BOOL}, ("NonZero",)),
        (_BRAIN, (
            "AveragePool", "Erf", "Exp", "Gelu", "Gemm", "LayerNormalization", "MatMul", "Relu", "Sigmoid", "Softmax",
            "Sqrt", "Sum", "Tanh",
        )),
        (_BRAIN | _INT, ("ReduceMean",)),
        (_BRAIN | _LONG | {TensorProto.BOOL}, ("GatherND",)),
        (_BRAIN | _LONG | _INT | _UNSIGNED, ("Max", "Min", "Mod")),
        (_BRAIN | _LONG | _INT, ("Pow", "ReduceSum", "Tile")),
    )
    for op in ops
} | {
    **{(_MS, op): frozenset[int]() for op in ("ExpandDims", "FusedGemm")},
    **{(_NCHWC, op): frozenset[int]() for op in ("Conv", "MaxPool", "ReorderInput", "ReorderOutput")},
    (_MS, "FusedConv"): frozenset({TensorProto.FLOAT}),
}  # fmt: skip

# BatchNormalization of them in training mode: https://github.com/microsoft/onnxruntime/issues/16867.
_FUNCTIONS: Final = (
    "BatchNormalization", "Bernoulli", "CastLike", "CausalConvWithState", "CenterCropPad", "GroupNormalization",
    "LinearAttention", "Mish", "NegativeLogLikelihoodLoss", "SequenceMap", "SoftmaxCrossEntropyLoss", "SwiGLU", "Swish",
)  # fmt: skip

_HOST_FUSIONS: Final = (
    "ConvAddActivationFusion", "GemmActivationFusion", "NchwcTransformer", "NhwcTransformer",
)  # fmt: skip

_DEVICE_FUSIONS: Final = ("BiasDropoutFusion", "BiasSoftmaxFusion")


def uneven_pads(node: onnx.NodeProto) -> bool:
    """Whether a ConvTranspose pads its two ends differently, which cuDNN does not support.

    >>> uneven_pads(onnx.helper.make_node("ConvTranspose", ["x", "w"], ["y"], pads=[1, 1, 0, 0]))
    True
    """
    if key(node) != (_ONNX, "ConvTranspose"):
        return False
    stated = attributes(node)
    pads = list(stated.get("pads", ()))
    half = len(pads) // 2
    return pads[:half] != pads[half:] or stated.get("auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER")


CUDA: Final = Kernels(
    name="cuda",
    execution_providers=("CUDAExecutionProvider", "CPUExecutionProvider"),
    device="cuda",
    threads=8,
    alias=_ALIAS,
    inplace=_INPLACE,
    not_inplace=frozenset(),
    workspace=cuda_workspace.RULES,
    asks_first=frozenset(),
    by_malloc=frozenset(),
    host_inputs=_HOST_INPUTS,
    host_outputs={(_ONNX, op): (0,) for op in ("MemcpyToHost", "Shape", "Size")},
    absorbs_transpose=frozenset({(_ONNX, "MatMul"), (_ONNX, "Gemm"), (_ONNX, "Transpose")}),
    races={},
    no_kernel=frozenset({*((_ONNX, op_type) for op_type in _FUNCTIONS), large_windows.OP}),
    device_types=_DEVICE_TYPES,
    device_until={(_ONNX, "MaxPool"): 22},
    not_on_device=uneven_pads,
    host_fusions=_HOST_FUSIONS,
    device_fusions=_DEVICE_FUSIONS,
    library_workspace=cuda_workspace.MARGIN,
    off_stream=frozenset((_ONNX, op) for op in ("Einsum", "LogSoftmax", "Softmax")),
    costs="a100",
)
