"""Facts of operators' definitions, independent of the provider: random, stateful, known, overwriting.

Facts about a provider's kernels (aliases, in-place outputs, workspace) are in `ort/kernels`.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import onnx

from onnx_remat.errors import closest
from onnx_remat.ir.opsets import STANDARD, canonical
from onnx_remat.ir.training_ops import STATED, is_training_op

_MS: Final = "com.microsoft"
_NCHWC: Final = "com.microsoft.nchwc"

SPLIT: Final = "onnx_remat"
DRAW, PRODUCT = "DropoutDraw", "DropoutProduct"
"""Domain and names of the two halves of a Dropout, which exist only in plans (`dropout`)."""

MOVE: Final = "Move"
"""In that domain, the op that copies a value back from the host (`ort.moves`); it also exists only in plans."""


@dataclass(frozen=True, slots=True)
class OpSemantics:
    """Properties of an operator that matter when it is executed a second time.

    Attributes
    ----------
    random : bool
        The outputs may differ between two executions; `is_random` has details for Dropout.
    stateful : bool
        It has side effects besides its outputs, so executing it twice differs from executing it once.
    known : bool
        It has a schema, or a listed ONNX Runtime kernel; others must be treated as opaque.
    overwrites : tuple of int
        Input slots whose buffers it always overwrites: a recompute must get copies.
    renews : tuple of (int, int)
        Input slot and output slot: the kernel writes the output over the input, even over a graph input, unless the
        node lacks the output or it is a graph output. See `overwritten`.
    stated : bool
        It takes its output's shape from the file's value_info, which must therefore stay.
    shapes : tuple of int
        Input slots with only a shape, if the op has no other inputs.
    """

    random: bool = False
    stateful: bool = False
    known: bool = True
    overwrites: tuple[int, ...] = ()
    renews: tuple[tuple[int, int], ...] = ()
    stated: bool = False
    shapes: tuple[int, ...] = ()


# BatchNormInternal updates running statistics in place, even in a graph input.
_OVERWRITES: Final[dict[tuple[str, str], tuple[int, ...]]] = {
    (_MS, "BatchNormInternal"): (3, 4),
    (_MS, "InPlaceAccumulator"): (0,),
    (_MS, "InPlaceAccumulatorV2"): (0,),
    (_MS, "ZeroGradient"): (0,),
}

_DROPOUTS: Final = frozenset(
    {(STANDARD, "Dropout"), (_MS, "BiasDropout"), (_MS, "BitmaskDropout"), (_MS, "BitmaskBiasDropout")}
)

# Even with an explicit ``seed`` these differ between runs of one session: the kernel keeps its generator's state.
_RANDOM: Final = frozenset(
    {
        (STANDARD, "Bernoulli"),
        (STANDARD, "Multinomial"),
        (STANDARD, "RandomNormal"),
        (STANDARD, "RandomNormalLike"),
        (STANDARD, "RandomUniform"),
        (STANDARD, "RandomUniformLike"),
        (_MS, "Sampling"),
        (SPLIT, DRAW),
    }
)

# No standard operator is stateful: BatchNormalization in training mode returns its running statistics as outputs.
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

# Operators with an ONNX Runtime kernel but no ONNX schema: those that its optimizers create, and old experimental ones.
_CONTRIB: Final[dict[str, frozenset[str]]] = {
    STANDARD: frozenset(
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
    SPLIT: frozenset({DRAW, PRODUCT, MOVE}),
    _NCHWC: frozenset(
        {
            "AveragePool", "Conv", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "ReorderInput",
            "ReorderOutput", "Upsample",
        }
    ),
}  # fmt: skip


@lru_cache(1024)
def semantics(domain: str, op_type: str) -> OpSemantics:
    """Return the semantics of an operator; ``""`` and ``"ai.onnx"`` are the same domain.

    >>> semantics("", "RandomNormal").random, semantics("custom", "Op").known
    (True, False)
    """
    key = (canonical(domain), op_type)
    return OpSemantics(
        random=key in _RANDOM or key in _DROPOUTS,
        stateful=key in _STATEFUL,
        known=_is_known(*key),
        overwrites=_OVERWRITES.get(key, ()),
        renews=_RENEWS.get(key, ()),
        stated=key in STATED,
        shapes=(0,) if key == (STANDARD, "ConstantOfShape") else (),
    )


_ELEMENTWISE: Final = frozenset(
    {
        "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Div", "Equal", "Erf", "Exp", "Floor", "Greater",
        "GreaterOrEqual", "Identity", "IsInf", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min",
        "Mul", "Neg", "Not", "Or", "Pow", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sqrt", "Sub",
        "Sum", "Tanh", "Where", "Xor",
    }
)  # fmt: skip


def is_elementwise(domain: str, op_type: str) -> bool:
    """Whether an operator is elementwise: each output element depends on the broadcast input elements at its index.

    >>> is_elementwise("", "Sqrt"), is_elementwise("", "MatMul")
    (True, False)
    """
    return canonical(domain) == STANDARD and op_type in _ELEMENTWISE


# Running statistics in training mode, the only mode with these outputs; measured with ONNX Runtime 1.31.1.
_RENEWS: Final[dict[tuple[str, str], tuple[tuple[int, int], ...]]] = {("", "BatchNormalization"): ((3, 1), (4, 2))}


def overwritten(node: onnx.NodeProto, outputs: Container[str] = ()) -> tuple[int, ...]:
    """Return the input slots whose buffers a node's kernel overwrites; `outputs` are the graph's.

    >>> text = "y, m1, v1 = BatchNormalization <training_mode = 1> (x, s, b, m, v)"
    >>> node = onnx.parser.parse_node(text)
    >>> overwritten(node), overwritten(node, {"m1", "v1"})
    ((3, 4), ())
    """
    says = semantics(node.domain, node.op_type)
    renewed = (slot for slot, out in says.renews for name in node.output[out : out + 1] if name and name not in outputs)
    return (*says.overwrites, *renewed)


def is_random(domain: str, op_type: str, *, opset: int = 24, training_mode: bool | None = None) -> bool:
    """Whether two executions of a node may return different values.

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
    key = (canonical(domain), op_type)
    if key in _RANDOM:
        return True
    if key not in _DROPOUTS:
        return False
    if key[0] == STANDARD and 7 <= opset < 12:
        return False
    return training_mode is not False


def nearest_op(domain: str, op_type: str) -> str | None:
    """Return the known operator with the most similar name to an unknown one, if any is similar.

    >>> nearest_op("", "Tahn"), nearest_op("com.microsoft", "Gelu"), nearest_op("com.microsoft", "Geluu")
    ('Tan', None, 'Gelu')
    """
    domain = canonical(domain)
    if _is_known(domain, op_type):
        return None
    names = set(_CONTRIB.get(domain, frozenset()))
    if domain == STANDARD:
        names |= {s.name for s in onnx.defs.get_all_schemas_with_history() if s.domain == STANDARD}
    return closest(op_type, sorted(names))


def _is_known(domain: str, op_type: str) -> bool:
    if op_type in _CONTRIB.get(domain, frozenset()) or is_training_op(domain, op_type):
        return True
    return domain == STANDARD and bool(onnx.defs.has(op_type, domain=STANDARD))
