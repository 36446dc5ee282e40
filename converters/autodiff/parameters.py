"""Parameters of a forward model: which of its values they are, and as inputs."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from onnx_remat.errors import ConversionError, UsageError, did_you_mean

from ..constants import static

_MASK = -1e4  # an initializer with a value at or below this is a mask, not a weight
_SETTINGS = {
    "BatchNormalization": (3, 4), "Clip": (1, 2), "DequantizeLinear": (0, 1, 2), "Dropout": (1, 2), "GRU": (5,),
    "GridSample": (1,), "LSTM": (5, 6), "MaxRoiPool": (1,), "NegativeLogLikelihoodLoss": (2,), "OneHot": (1, 2),
    "Pad": (2,), "QLinearConv": (1, 4, 6), "QLinearMatMul": (1, 4, 6), "QuantizeLinear": (1, 2), "RNN": (5,),
    "Range": (0, 1, 2), "Resize": (1, 2), "RoiAlign": (1,), "RotaryEmbedding": (1, 2), "STFT": (2,),
    "SoftmaxCrossEntropyLoss": (2,), "Upsample": (1,),
}  # fmt: skip
"""Inputs by op that are not weights: limits, statistics, scales, tables, windows, boxes, class weights, states."""
_MOVES = frozenset(
    {
        "Cast", "CastLike", "Concat", "Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze",
        "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
SETTING = "onnx_remat.setting"
"""Key in `meta` of a value that only ops which `load` replaces by their definitions read, as a setting."""
_ARITHMETIC = ("Sub", "Mul", "Div", "Pow", "Max", "Min", "Where", "Equal", "Greater", "Less", "Mod")


def initial_values(graph: ir.Graph) -> Iterator[tuple[str, ir.Value]]:
    """Yield the values that may become parameters: initializers, and values computed from constants alone."""
    yield from ((str(value.name), value) for value in graph.initializers.values())
    for node in graph:
        if not any(v is not None for v in node.inputs) or node.op_type == "ConstantOfShape":
            yield from ((str(value.name), value) for value in node.outputs)


def select(graph: ir.Graph, wrt: Sequence[str] | None, frozen: Sequence[str]) -> list[ir.Value]:
    """Return the parameters: values whose names match `wrt`, or by default all that look like weights.

    Those are all floating-point initializers except running statistics, masks (with values of -10000 and below, or not
    finite; or factors of zeros and ones), scalars, one-element vectors that ops other than layers read, and settings:
    the limits of Clip, scales of quantization, class weights, the tables of RotaryEmbedding, first states of recurrent
    layers and the like (`_SETTINGS`). A ConstantOfShape of a value other than 0 and 1 counts as an initializer, because
    files without data store weights in this form.

    Raises
    ------
    UsageError
        A name matches nothing, or an integer.
    """
    candidates = {str(value.name): value for value in graph.inputs} | dict(initial_values(graph))
    held = _frozen(candidates, frozen)
    if wrt is None:
        return [value for name, value in initial_values(graph) if name not in held and _is_weight(value)]
    found: dict[str, ir.Value] = {}
    for pattern in wrt:
        exact, names = pattern in candidates, _matching(pattern, candidates)
        if not names:
            hint = did_you_mean(pattern, candidates)
            raise UsageError(f"wrt: no input or initializer is called {pattern!r}{hint}")
        for name in names:
            dtype = candidates[name].dtype
            if dtype is None or dtype.is_floating_point():
                found[name] = candidates[name]
            elif exact:
                raise UsageError(f"wrt: {name!r} is {dtype}, and only floating point has gradients: leave it out")
    return [value for name, value in found.items() if name not in held]


def _frozen(known: Collection[str], patterns: Sequence[str]) -> set[str]:
    """Return the names that are frozen; raise UsageError for a pattern that matches none."""
    found: set[str] = set()
    for pattern in patterns:
        matched = _matching(pattern, known)
        if not matched:
            raise UsageError(f"frozen: no input or initializer is called {pattern!r}{did_you_mean(pattern, known)}")
        found.update(matched)
    return found


def _matching(pattern: str, known: Collection[str]) -> list[str]:
    """Return the name that a text is, or the names that match it as a pattern: names of parameters contain brackets."""
    return [pattern] if pattern in known else [name for name in known if fnmatch.fnmatchcase(name, pattern)]


def _is_weight(value: ir.Value) -> bool:
    node = value.producer()
    if node is not None and node.op_type != "ConstantOfShape":
        return False
    if SETTING in value.meta or is_setting(value):
        return False
    uses = value.uses()
    known = value.const_value.numpy() if value.const_value is not None else filled(value)
    if known is None or known.dtype.kind not in "fV" or not known.ndim:  # V: bfloat16 and similar types
        return False
    if node is not None and known.size and known.flat[0] in (0, 1):
        return False
    if known.size == 1:
        return any(use.node.op_type not in _ARITHMETIC for use in uses)
    array = known.astype(np.float32, copy=False)
    if all(use.node.op_type == "Mul" for use in uses) and set(np.unique(array)) == {0, 1}:
        return False
    return bool(np.isfinite(array).all()) and float(array.min(initial=0)) > _MASK


def is_setting(value: ir.Value) -> bool:
    """Return whether ops read a value as a setting alone, as it is or moved."""
    return all(
        use.idx in _SETTINGS.get(use.node.op_type, ())
        or (use.node.op_type in _MOVES and all(is_setting(v) and not v.is_graph_output() for v in use.node.outputs))
        for use in value.uses()
    )


def promote(graph: ir.Graph, value: ir.Value) -> tuple[ir.Value, np.ndarray | None]:
    """Turn a constant into an input; return the input, and the constant's value if it is stored or easily computed."""
    if value.is_graph_input():
        return value, None
    if value.is_initializer():
        assert value.const_value is not None and value.name is not None
        array = value.const_value.numpy()
        graph.initializers.pop(value.name)
        value.const_value = None
        value.shape, value.type = ir.Shape(array.shape), ir.TensorType(ir.tensor(array).dtype)
        return value, array
    made = filled(value)
    if made is None:
        raise ConversionError(f"wrt: the value of {value.name!r} does not follow from constants alone")
    node = value.producer()
    new = ir.Value(name=value.name, shape=ir.Shape(made.shape), type=ir.TensorType(ir.tensor(made).dtype))
    value.name = f"{value.name}.constant"
    value.replace_all_uses_with(new, replace_graph_outputs=True)
    if node is not None and all(not v.uses() and not v.is_graph_output() for v in node.outputs):
        graph.remove(node, safe=True)
    return new, made


def filled(value: ir.Value) -> np.ndarray | None:
    """Return the array of a value computed from constants alone; None if it is not such a value."""
    node = value.producer()
    if node is not None and node.op_type == "ConstantOfShape":
        shape = static(node.inputs[0]) if node.inputs[0] is not None else None
        fill = node.attributes["value"].as_tensor().numpy() if "value" in node.attributes else np.zeros(1, np.float32)
        return None if shape is None else np.full(tuple(shape), fill.item(), fill.dtype)
    return static(value)
