"""Memory facts about the kernels of ONNX Runtime's CPU provider.

The buffer plan of ONNX Runtime depends on what each kernel declares when it registers itself: whether an
output *must* share its input's buffer (``Alias``) and whether it *may* overwrite an input that dies there
(``MayInplace``). The tables below state those declarations for the CPU kernels of ONNX Runtime 1.31.1. They
were obtained by running nearly every kernel in stock ONNX Runtime and reading its node memory statistics,
over opsets 7 to 26 and seven element types; ``tests/ort/test_kernel_facts.py`` repeats a part of the measurement.

Results of the measurement that may surprise:

* Add, Sub, Mul, Div, Exp, Log, Sqrt, Neg, Erf, Where, Gelu, Sum, Max and the comparisons never work in place.
* Dropout, Transpose (even when it moves no data), Expand, Slice, Concat, Split and Tile always copy.
* Softmax and LogSoftmax work in place on float but not on double.
* No declaration changes with the opset.

A kernel that exists for float but not for float16 runs as Cast -> float kernel -> Cast, so the facts of its
float form apply, to float tensors twice as large.
"""

from __future__ import annotations

from typing import Final

import onnx

from onnx_remat.ort.kernels import cpu_workspace
from onnx_remat.ort.kernels.base import Kernels, OpKey, Pairs

_ONNX: Final = ""
_MS: Final = "com.microsoft"
_NCHWC: Final = "com.microsoft.nchwc"

_FIRST: Final[Pairs] = ((0, 0),)

_ALIAS: Final[dict[OpKey, Pairs]] = {
    (_ONNX, "Reshape"): _FIRST,
    (_ONNX, "Squeeze"): _FIRST,
    (_ONNX, "Unsqueeze"): _FIRST,
    (_ONNX, "Flatten"): _FIRST,
    (_ONNX, "Identity"): _FIRST,
    (_ONNX, "Optional"): _FIRST,
    (_ONNX, "OptionalGetElement"): _FIRST,
    (_MS, "ExpandDims"): _FIRST,
    # Of the training build; none of its gradient kernels works in place.
    (_MS, "BatchNormInternal"): ((3, 1), (4, 2)),
    (_MS, "InPlaceAccumulator"): _FIRST,
    (_MS, "InPlaceAccumulatorV2"): ((0, 1),),
    (_MS, "ZeroGradient"): _FIRST,
}

_INPLACE: Final[dict[OpKey, Pairs]] = {
    **{
        (_ONNX, op): _FIRST
        for op in (
            # Activations.
            "Celu", "Elu", "HardSigmoid", "LeakyRelu", "ParametricSoftplus", "Relu", "ScaledTanh", "Selu",
            "Sigmoid", "Softplus", "Softsign", "Tanh", "ThresholdedRelu",
            # The rest of the standard domain.
            "BitCast", "Cast", "Clip", "LogSoftmax", "Scatter", "ScatterElements", "Shrink", "Softmax",
            "TensorScatter", "Trilu",
        )
    },
    (_MS, "Trilu"): _FIRST,
    # The residual input ("Z", "Sum") of a fused convolution.
    (_MS, "FusedConv"): ((3, 0),),
    (_NCHWC, "Conv"): ((3, 0),),
}  # fmt: skip

_NOT_INPLACE: Final = frozenset(
    {((_ONNX, "Softmax"), onnx.TensorProto.DOUBLE), ((_ONNX, "LogSoftmax"), onnx.TensorProto.DOUBLE)}
)

# Standard operators without a CPU kernel: ONNX Runtime replaces the node by its function body when it loads
# a file.
_NO_KERNEL: Final = frozenset(
    {
        "Bernoulli", "CastLike", "CausalConvWithState", "CenterCropPad", "GroupNormalization", "HardSwish",
        "LinearAttention", "Mish", "NegativeLogLikelihoodLoss", "SequenceMap", "SoftmaxCrossEntropyLoss",
        "SwiGLU",
        "Swish",
    }
)  # fmt: skip

_RACES: Final[dict[OpKey, str]] = {
    (_ONNX, "ScatterND"): "may lose updates where its indices repeat (onnxruntime issue 23396)",
    (_MS, "GatherGrad"): "sums in the order in which threads arrive, so that rounding differs",
}
"""With several threads; seen with 1.31.1 and with the training build."""

CPU: Final = Kernels(
    name="cpu",
    execution_providers=("CPUExecutionProvider",),
    device="cpu",
    threads=8,
    alias=_ALIAS,
    inplace=_INPLACE,
    not_inplace=_NOT_INPLACE,
    workspace=cpu_workspace.RULES,
    asks_first=cpu_workspace.ASKS_FIRST,
    by_malloc=cpu_workspace.BY_MALLOC,
    host_inputs={},
    host_outputs={},
    absorbs_transpose=frozenset({(_ONNX, "MatMul"), (_ONNX, "Gemm"), (_ONNX, "Transpose")}),
    races=_RACES,
    no_kernel=frozenset((_ONNX, op_type) for op_type in _NO_KERNEL),
)
