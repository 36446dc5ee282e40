"""Facts about operators that the memory simulator and the planners need.

The buffer plan of ONNX Runtime depends on what each kernel declares when it registers itself: whether an
output *must* share its input's buffer (``Alias``) and whether it *may* overwrite an input that dies there
(``MayInplace``). The tables below state those declarations for the CPU kernels of ONNX Runtime 1.31.1. They
were obtained by running nearly every kernel in stock ONNX Runtime and reading its node memory statistics,
over opsets 7 to 26 and seven element types; ``tests/ort/test_kernel_facts.py`` repeats a part of the measurement.

What the measurement says, against first expectations:

* Add, Sub, Mul, Div, Exp, Log, Sqrt, Neg, Erf, Where, Gelu, Sum, Max and the comparisons never work in place.
* Dropout, Transpose (even when it moves no data), Expand, Slice, Concat, Split and Tile always copy.
* Softmax and LogSoftmax work in place on float but not on double.
* No declaration changes with the opset.

A kernel that exists for float but not for float16 runs as Cast -> float kernel -> Cast, so the facts of its
float form apply, to float tensors twice as large.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Final

import onnx

from onnx_remat.ir.training_ops import STATED, is_training_op

__all__ = ["OpFacts", "expands_to_function", "facts", "is_random", "nearest"]

_ONNX: Final = ""
_MS: Final = "com.microsoft"
_NCHWC: Final = "com.microsoft.nchwc"
SPLIT: Final = "onnx_remat"
DRAW, PRODUCT = "DropoutDraw", "DropoutProduct"
"""Domain and names of the two halves of a Dropout, which exist in plans alone (`draws`)."""

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What one operator's CPU kernel declares, and what recomputing it would mean.

    Attributes
    ----------
    alias
        ``(input slot, output slot)`` pairs that always share one buffer: no memory is taken for the output.
        A node output that is itself a graph output is the exception; ONNX Runtime then allocates and copies.
    inplace
        ``(input slot, output slot)`` pairs in the order ONNX Runtime tries them. The output takes the input's
        buffer if nothing else still needs that buffer and shape and element size agree.
    random
        The outputs differ between two executions (for Dropout: when it trains, see :func:`is_random`).
    stateful
        The kernel writes to something besides its outputs, so executing it twice is not executing it once.
    known
        The operator has a schema, or a listed ONNX Runtime kernel; others must be treated as opaque.
    overwrites
        Input slots whose buffers the kernel writes to, though they are not its own: a recompute must get copies.
    stated
        The kernel takes its output's shape from what the file states, which must therefore stay stated.
    """

    alias: Pairs = ()
    inplace: Pairs = ()
    random: bool = False
    stateful: bool = False
    known: bool = True
    overwrites: tuple[int, ...] = ()
    stated: bool = False


_FIRST: Final[Pairs] = ((0, 0),)

_ALIAS: Final[dict[tuple[str, str], Pairs]] = {
    (_ONNX, "Reshape"): _FIRST,
    (_ONNX, "Squeeze"): _FIRST,
    (_ONNX, "Unsqueeze"): _FIRST,
    (_ONNX, "Flatten"): _FIRST,
    (_ONNX, "Identity"): _FIRST,
    (_ONNX, "Optional"): _FIRST,
    (_ONNX, "OptionalGetElement"): _FIRST,
    (_MS, "ExpandDims"): _FIRST,
    # Of the training build; its gradient kernels work nowhere in place.
    (_MS, "BatchNormInternal"): ((3, 1), (4, 2)),
    (_MS, "InPlaceAccumulator"): _FIRST,
    (_MS, "InPlaceAccumulatorV2"): ((0, 1),),
    (_MS, "ZeroGradient"): _FIRST,
}

# BatchNormInternal updates running statistics where they lie, even in a graph input.
_OVERWRITES: Final[dict[tuple[str, str], tuple[int, ...]]] = {
    (_MS, "BatchNormInternal"): (3, 4),
    (_MS, "InPlaceAccumulator"): (0,),
    (_MS, "InPlaceAccumulatorV2"): (0,),
    (_MS, "ZeroGradient"): (0,),
}

_INPLACE: Final[dict[tuple[str, str], Pairs]] = {
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

# Kernels that work in place for float only.
_INPLACE_FLOAT_ONLY: Final = frozenset({(_ONNX, "Softmax"), (_ONNX, "LogSoftmax")})

_DROPOUTS: Final = frozenset(
    {(_ONNX, "Dropout"), (_MS, "BiasDropout"), (_MS, "BitmaskDropout"), (_MS, "BitmaskBiasDropout")}
)

# Even with an explicit ``seed`` these differ between runs of one session: the kernel keeps its generator's
# state.
_RANDOM: Final = frozenset(
    {
        (_ONNX, "Bernoulli"),
        (_ONNX, "Multinomial"),
        (_ONNX, "RandomNormal"),
        (_ONNX, "RandomNormalLike"),
        (_ONNX, "RandomUniform"),
        (_ONNX, "RandomUniformLike"),
        (_MS, "Sampling"),
        (SPLIT, DRAW),
    }
)

# No standard operator is stateful: BatchNormalization in training mode returns its running statistics as
# outputs.
_STATEFUL: Final = frozenset(
    {
        (_MS, "AdamWOptimizer"),
        (_MS, "DecoderMaskedMultiHeadAttention"),
        (_MS, "DecoderMaskedSelfAttention"),
        (_MS, "GroupQueryAttention"),
        (_MS, "InPlaceAccumulator"),
        (_MS, "InPlaceAccumulatorV2"),
        (_MS, "PagedAttention"),
        (_MS, "RecordEvent"),
        (_MS, "SGDOptimizerV2"),
        (_MS, "SparseAttention"),
        (_MS, "WaitEvent"),
        (_MS, "YieldOp"),
        (_MS, "ZeroGradient"),
    }
)

# Operators with an ONNX Runtime kernel but no ONNX schema: those its optimizers create, and old
# experimental ones.
_CONTRIB: Final[dict[str, frozenset[str]]] = {
    _ONNX: frozenset(
        {
            "Affine", "Crop", "ImageScaler", "MemcpyFromHost", "MemcpyToHost", "ParametricSoftplus", "Scale",
            "ScaledTanh", "SimplifiedLayerNormalization",
        }
    ),
    _MS: frozenset(
        {
            "Attention", "BiasDropout", "BiasGelu", "BiasSoftmax", "BitmaskBiasDropout", "BitmaskDropout",
            "CDist",
            "ConvTransposeWithDynamicPads", "DecoderMaskedMultiHeadAttention", "DequantizeLinear",
            "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "EmbedLayerNormalization", "ExpandDims",
            "FastGelu",
            "FusedConv", "FusedGemm", "FusedMatMul", "FusedMatMulActivation", "GatedAdd", "GatedRMSNorm",
            "GatherBlockQuantized", "GatherND", "Gelu", "GridSample", "GroupQueryAttention", "Inverse",
            "LinearAttention", "MatMulBnb4", "MatMulFpQ4", "MatMulInteger16", "MatMulIntegerToFloat",
            "MatMulNBits", "MoE", "MultiHeadAttention", "NhwcFusedConv", "NhwcMaxPool", "Pad", "QAttention",
            "QGemm", "QLinearAdd", "QLinearAveragePool", "QLinearConcat", "QLinearConv",
            "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid", "QLinearSoftmax",
            "QLinearWhere", "QMoE", "QOrderedAttention", "QuantizeLinear", "QuickGelu", "RotaryEmbedding",
            "SampleOp", "ScaledSiLU", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
            "SparseAttention", "TransposeMatMul", "Trilu", "UnfoldTensor",
        }
    ),
    SPLIT: frozenset({DRAW, PRODUCT}),
    _NCHWC: frozenset(
        {
            "AveragePool", "Conv", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "ReorderInput",
            "ReorderOutput", "Upsample",
        }
    ),
}  # fmt: skip

# Standard operators without a CPU kernel: ONNX Runtime replaces the node by its function body when it loads
# a file.
_FUNCTIONS: Final = frozenset(
    {
        "Bernoulli", "CastLike", "CausalConvWithState", "CenterCropPad", "GroupNormalization", "HardSwish",
        "LinearAttention", "Mish", "NegativeLogLikelihoodLoss", "SequenceMap", "SoftmaxCrossEntropyLoss",
        "SwiGLU",
        "Swish",
    }
)  # fmt: skip


def facts(domain: str, op_type: str, dtype: int = onnx.TensorProto.FLOAT) -> OpFacts:
    """Return the facts about one operator.

    Parameters
    ----------
    domain
        The node's domain; ``""`` and ``"ai.onnx"`` are the same.
    op_type
        The operator's name.
    dtype
        Element type of the first input (``onnx.TensorProto`` enum); few operators care.

    Returns
    -------
    OpFacts
        For operators not in the tables: no alias, nothing in place.
    """
    key = (_canonical(domain), op_type)
    inplace = _INPLACE.get(key, ())
    if key in _INPLACE_FLOAT_ONLY and dtype == onnx.TensorProto.DOUBLE:
        inplace = ()
    return OpFacts(
        alias=_ALIAS.get(key, ()),
        inplace=inplace,
        random=key in _RANDOM or key in _DROPOUTS,
        stateful=key in _STATEFUL,
        known=_is_known(*key),
        overwrites=_OVERWRITES.get(key, ()),
        stated=key in STATED,
    )


def is_random(domain: str, op_type: str, *, opset: int = 24, training_mode: bool | None = None) -> bool:
    """Tell whether two executions of a node may return different values.

    Parameters
    ----------
    domain, op_type
        The operator.
    opset
        The opset the model imports for `domain`. Dropout only has a training form before 7 and from 12 on.
    training_mode
        For Dropout: the value of its ``training_mode`` input, ``False`` if the input is absent (for opsets
        before 7, the negated ``is_test`` attribute), ``None`` if it is not known before the run.

    Returns
    -------
    bool
        ``True`` if it may; in doubt (``training_mode=None``) a Dropout counts as random.
    """
    key = (_canonical(domain), op_type)
    if key in _RANDOM:
        return True
    if key not in _DROPOUTS:
        return False
    if key[0] == _ONNX and 7 <= opset < 12:
        return False
    return training_mode is not False


def nearest(domain: str, op_type: str) -> str | None:
    """The known operator whose name is most like that of an unknown one, if any is.

    >>> nearest("", "Tahn"), nearest("com.microsoft", "Gelu"), nearest("com.microsoft", "Geluu")
    ('Tan', None, 'Gelu')
    """
    if facts(domain, op_type).known:
        return None
    names = sorted(_CONTRIB.get(_canonical(domain), frozenset()))
    if _canonical(domain) == _ONNX:
        names = sorted({s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == _ONNX} | {*names})
    return next(iter(difflib.get_close_matches(op_type, names, n=1)), None)


def expands_to_function(domain: str, op_type: str) -> bool:
    """Tell whether ONNX Runtime's CPU provider runs this operator as its function body, not as one kernel."""
    return _canonical(domain) == _ONNX and op_type in _FUNCTIONS


def _canonical(domain: str) -> str:
    return _ONNX if domain == "ai.onnx" else domain


def _is_known(domain: str, op_type: str) -> bool:
    if op_type in _CONTRIB.get(domain, frozenset()) or is_training_op(domain, op_type):
        return True
    return domain == _ONNX and bool(onnx.defs.has(op_type, domain=_ONNX))
