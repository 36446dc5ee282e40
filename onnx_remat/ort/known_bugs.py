"""Known bugs of ONNX Runtime: graph patterns that its default optimisations compute wrongly or refuse to run.

All but one, a bug of a kernel, are correct with optimisations off. They were found by running every operator that the
converters write at all four levels, and by trying the patterns of each fusion by hand; docs/onnxruntime-bugs.md has a
minimal model of each. The converters write none of these patterns; `find` names the nodes of other files.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnx_remat.ir.constant_nodes import tensor_of
from onnx_remat.ir.dropout import training_mode
from onnx_remat.ir.graph import Graph, captures
from onnx_remat.ir.op_semantics import semantics
from onnx_remat.ir.opsets import canonical, opset_of
from onnx_remat.ir.shapes import Tensor


@dataclass(frozen=True, slots=True)
class Bug:
    """One wrong fusion.

    Attributes
    ----------
    fusion : str
        ONNX Runtime's name for it, as ``disabled_optimizers`` takes it; empty for a wrong kernel.
    level : str
        The lowest optimisation level at which it happens.
    versions : str
        First and last version in which it was seen, of 1.19.2, 1.22.1, 1.26.0, 1.31.1 and 1.32.0.
    says : str
        Predicate of the message, after "node 'x' ".
    instead : str
        Advice.
    """

    fusion: str
    level: str
    versions: str
    says: str
    instead: str


@dataclass(frozen=True, slots=True)
class Found:
    """A bug, and the node of a model that triggers it (its name, or its first output if it has none)."""

    bug: Bug
    node: str


TRANSPOSED_BY_VECTOR = Bug(
    "MatmulTransposeFusion",
    "extended",
    "1.19 to 1.32",
    "multiplies a transposed matrix by a vector of one dimension: the transposition is lost, the result is wrong",
    "make the vector a column with Unsqueeze",
)
PADDED_MAXIMUM = Bug(
    "Pad_Fusion",
    "basic",
    "1.22 to 1.31",
    "takes the maximum of an input that a Pad pads with zeros: they become minus infinity, the border is wrong",
    "give the Pad its axes as an input",
)
PADDED_AVERAGE = Bug(
    "Pad_Fusion",
    "basic",
    "1.19 to 1.22",
    "averages an input that a Pad pads with zeros: the border is divided by a wrong number",
    "give the Pad its axes as an input",
)
IDLE_TRANSPOSE = Bug(
    "GemmTransposeFusion",
    "basic",
    "1.19 to 1.26",
    "permutes nothing, and the Gemm next to it transposes nevertheless: the result is wrong or its shapes do not fit",
    "leave the Transpose out",
)
LOST_STATISTICS = Bug(
    "SkipLayerNormFusion",
    "extended",
    "1.19 to 1.26",
    "outputs mean or deviation of a sum that no other node reads: these outputs are never computed",
    "let another node read the sum too, or compute the statistics apart",
)
SHARED_STATISTICS = Bug(
    "ConstantSharing",
    "basic",
    "1.19 to 1.32",
    "overwrites its running statistics, which are constants of at most 8 elements with the values of another constant: "
    "the two are merged, so that readers of the other constant read the new statistics",
    "make the running statistics inputs, or make the new ones outputs",
)
LOST_DROPOUT = Bug(
    "EliminateDropout",
    "basic",
    "1.19 to 1.32",
    "drops in training, and its mask has no reader: it is eliminated as in inference, so that nothing is dropped",
    "read the mask: Where(mask, output, 0)",
)
MISCOUNTED_PADS = Bug(
    "",
    "disable",
    "1.22",
    "averages over pads at the end of one axis but counts them as pads at the beginning of the next: the border is "
    "divided by a wrong number",
    "pad by a Pad with its axes as an input",
)


_TYPED_OPSET = 21
"""First opset in which QuantizeLinear has an attribute for its output type."""


def unsqueezed_badly(graph: Graph, tensors: Mapping[str, Tensor]) -> frozenset[str]:
    """Return the values that no Unsqueeze may read: otherwise ONNX Runtime (1.32 and before) cannot load the file.

    It moves a DequantizeLinear past an Unsqueeze by a QuantizeLinear and another DequantizeLinear. From opset 21 on it
    states int8 for the QuantizeLinear, but not for the zero point, which it stores separately. An Identity or a Dropout
    in between is eliminated before.
    """
    found: set[str] = set()
    if opset_of(graph.model) < _TYPED_OPSET:
        return frozenset()
    for op in graph.ops:
        kind = op.node.op_type
        copied = kind in ("Identity", "Dropout") and op.inputs[0] in found
        if copied or (kind == "DequantizeLinear" and tensors[op.inputs[0]].dtype == onnx.TensorProto.INT8):
            found.update(op.writes)
    return frozenset(found)


def pads_to_share(graph: Graph) -> frozenset[int]:
    """Return the Pads that a pool and other nodes read: each of two copies would have one reader, and be fused into it.

    ONNX Runtime would compute the border wrongly then, see `PADDED_MAXIMUM` and `PADDED_AVERAGE`.
    """
    pools = [op.node for op in graph.ops if op.node.op_type in ("MaxPool", "AveragePool")]
    scope = _Scope.of(graph.model.graph, opset_of(graph.model), {}) if pools else None
    pads = [_zero_pad(node, scope) for node in pools if scope is not None]
    return frozenset(
        graph.makers[p.output[0]] for p in pads if p is not None and scope and scope.reads[p.output[0]] > 1
    )


def find(model: onnx.ModelProto, ranks: Mapping[str, int] | None = None) -> tuple[Found, ...]:
    """Find the nodes of a model that trigger a known bug.

    Parameters
    ----------
    model : onnx.ModelProto
        Bodies of If, Loop and Scan are searched, too; local functions are not.
    ranks : mapping of str to int, optional
        Ranks of values beyond those that the model states: a rank identifies a vector.

    Returns
    -------
    tuple of Found
        In the order of the nodes.

    Examples
    --------
    >>> text = '''<ir_version: 9, opset_import: ["" : 20]>
    ...     g (float[5, 3] w, float[5] v) => (float[3] y) { t = Transpose <perm = [1, 0]> (w)  y = MatMul (t, v) }'''
    >>> [(found.bug.fusion, found.node) for found in find(onnx.parser.parse_model(text))]
    [('MatmulTransposeFusion', 'y')]
    """
    return tuple(_found(_Scope.of(model.graph, opset_of(model), dict(ranks or {}))))


def warnings(model: onnx.ModelProto, ranks: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Return one line for each bug that a model triggers; see `find`."""
    nodes: dict[Bug, list[str]] = {}
    for found in find(model, ranks):
        nodes.setdefault(found.bug, []).append(found.node)
    return tuple(
        f"node {names[0]!r}"
        + (f" (and {len(names) - 1} like it)" if len(names) > 1 else "")
        + f" {bug.says} (ONNX Runtime {bug.versions}{_where(bug)}); {bug.instead}"
        for bug, names in nodes.items()
    )


def _where(bug: Bug) -> str:
    return f", optimisation {bug.fusion}, {bug.level} level" if bug.fusion else ", at every level"


@dataclass(frozen=True)
class _Scope:
    """Facts visible from the nodes of one graph, by value name, and the version of their operators."""

    graph: onnx.GraphProto
    opset: int
    ranks: dict[str, int]
    constants: dict[str, onnx.TensorProto]
    makers: dict[str, onnx.NodeProto]
    reads: Counter[str]

    @staticmethod
    def of(graph: onnx.GraphProto, opset: int, ranks: dict[str, int], outer: _Scope | None = None) -> _Scope:
        ranks = (outer.ranks if outer else {}) | ranks
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.HasField("shape"):
                ranks[value.name] = len(value.type.tensor_type.shape.dim)
        constants = (dict(outer.constants) if outer else {}) | {t.name: t for t in graph.initializer}
        makers: dict[str, onnx.NodeProto] = {}  # no fusion reaches into the outer graph
        reads = Counter(value.name for value in graph.output)
        for node in reversed(graph.node):
            makers.update(dict.fromkeys(node.output, node))
            if node.op_type != "Identity" or reads[node.output[0]]:  # it is eliminated where no node reads it
                reads.update((*node.input, *captures(node)))
            if (value := tensor_of(node)) is not None:
                constants[node.output[0]] = value
        ranks |= {name: len(tensor.dims) for name, tensor in constants.items()}
        return _Scope(graph, opset, ranks, constants, makers, reads)

    @cached_property
    def alike(self) -> Mapping[str, int]:
        """For each constant that `_bits` knows and no caller may feed, how many have its type, shape and bits."""
        inputs = {value.name for value in self.graph.input}
        bits = {name: _bits(tensor) for name, tensor in self.constants.items() if name not in inputs}
        counts = Counter(bits.values())
        return {name: counts[found] for name, found in bits.items() if found is not None}

    def maker(self, name: str, past: Callable[[onnx.NodeProto, _Scope], str] = lambda *_: "") -> onnx.NodeProto | None:
        """Return the node that makes a value; for nodes before it, `past` names the input to go on from."""
        node = self.makers.get(name)
        while node is not None and (before := past(node, self)):
            node = self.makers.get(before)
        return node

    def fixed(self, name: str) -> bool:
        """Whether a value is an input, a constant, or computed from constants alone without random numbers."""
        if self.maker(name, _copied) is None:
            return True
        waiting, seen = [name], {name}
        while waiting:
            name = waiting.pop()
            node = self.makers.get(name)
            if node is None and name not in self.constants:
                return False
            if node is not None and semantics(node.domain, node.op_type).random:
                return False
            new = {other for other in (node.input if node is not None else ()) if other} - seen
            seen |= new
            waiting += new
        return True

    def single(self, name: str, next_to: str) -> bool:
        """Whether a value is one number, of no more dimensions than `next_to`."""
        dims = self.constants[name].dims if name in self.constants else None
        return self.ranks.get(name) == 0 or (
            dims is not None and set(dims) == {1} and len(dims) <= self.ranks.get(next_to, len(dims))
        )

    def zero(self, name: str, next_to: str) -> bool:
        """Whether a value is the constant zero, of no more dimensions than `next_to`."""
        value = self.constant(name) if self.single(name, next_to) else None
        return value is not None and not value.any()

    def constant(self, name: str) -> np.ndarray | None:
        tensor = self.constants.get(name)
        return None if tensor is None or tensor.data_location else numpy_helper.to_array(tensor)


def _found(scope: _Scope) -> Iterator[Found]:
    for node in scope.graph.node:
        for bug, meets in _PATTERNS.get((canonical(node.domain), node.op_type), ()):
            if meets(node, scope):
                yield Found(bug, node.name or node.output[0])
        for attribute in node.attribute:
            for body in (attribute.g, *attribute.graphs) if attribute.type in _BODIES else ():
                yield from _found(_Scope.of(body, scope.opset, {}, scope))


_BODIES = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)


def _attribute(node: onnx.NodeProto, name: str, default: Any = None) -> Any:
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


def _copied(node: onnx.NodeProto, _: _Scope) -> str:
    """Return the input of an Identity; empty for any other node."""
    return node.input[0] if (canonical(node.domain), node.op_type) == ("", "Identity") else ""


def _scaled(node: onnx.NodeProto, scope: _Scope) -> str:
    """Return the input of a node that changes nothing but type and scale; empty for any other node."""
    if canonical(node.domain):
        return ""
    kind = node.op_type
    inputs: list[str] = [*node.input]
    if kind in ("Identity", "Cast", "CastLike") or training_mode(node, scope.constants) is False:
        return inputs[0]
    if kind in ("Mul", "Div", "Add", "Sub"):
        operands = [inputs, inputs[::-1]] if kind in ("Mul", "Add") else [inputs]
        keeps = scope.single if kind in ("Mul", "Div") else scope.zero
        return next((kept for kept, other in operands if keeps(other, kept)), "")
    stated = scope.constant(inputs[1]) if kind in ("Reshape", "Expand") and len(inputs) > 1 else None
    if stated is None or (kind == "Reshape" and _attribute(node, "allowzero", 0)):
        return ""
    idle = stated.size <= scope.ranks.get(inputs[0], stated.size) and (stated == (kind == "Expand")).all()
    return inputs[0] if idle else ""


def _transposed_by_vector(node: onnx.NodeProto, scope: _Scope) -> bool:
    if scope.ranks.get(node.input[1]) != 1:
        return False
    before = scope.maker(node.input[0], _scaled)
    if before is None or before.op_type != "Transpose":
        return False
    perm = _perm(before, scope)
    return perm is None or perm == [*range(len(perm) - 2), len(perm) - 1, len(perm) - 2]


def _perm(node: onnx.NodeProto, scope: _Scope) -> list[int] | None:
    """Return the permutation of a Transpose, None if it is not stated and the rank is unknown."""
    stated = _attribute(node, "perm")
    if stated is not None:
        return list(stated)
    rank = scope.ranks.get(node.input[0])
    return None if rank is None else list(range(rank))[::-1]


def _zero_pad(node: onnx.NodeProto, scope: _Scope) -> onnx.NodeProto | None:
    """Return the Pad with zeros and without axes that makes the input of a node."""
    pad = scope.maker(node.input[0], _copied)
    if pad is None or pad.op_type != "Pad" or _attribute(pad, "mode", b"constant") != b"constant" or any(pad.input[3:]):
        return None
    stated = np.asarray(_attribute(pad, "value", 0.0))  # before opset 11
    value = scope.constant(pad.input[2]) if len(pad.input) > 2 and pad.input[2] else stated
    return pad if value is not None and not value.any() else None


def _zero_padded(node: onnx.NodeProto, scope: _Scope) -> bool:
    """Whether the input of a node is made by such a Pad, which no other node reads."""
    pad = _zero_pad(node, scope)
    return pad is not None and scope.reads[pad.output[0]] == 1


def _padded_maximum(node: onnx.NodeProto, scope: _Scope) -> bool:
    return len([name for name in node.output if name]) == 1 and _zero_padded(node, scope)


def _padded_average(node: onnx.NodeProto, scope: _Scope) -> bool:
    """Whether 1.19 (the pool does not count its own pads) or 1.22 (uneven pads) fails to count the Pad's zeros."""
    if not _zero_padded(node, scope):
        return False
    pad = scope.maker(node.input[0], _copied)
    widths = None
    if pad is not None:
        widths = scope.constant(pad.input[1]) if len(pad.input) > 1 else np.asarray(_attribute(pad, "pads", ()))
    uneven = widths is None or bool((widths[: widths.size // 2] != widths[widths.size // 2 :]).any())
    own = _attribute(node, "pads")
    return uneven or (not _attribute(node, "count_include_pad", 0) and own is not None and any(own))


def _idle(node: onnx.NodeProto, scope: _Scope) -> bool:
    """Whether a node is a Transpose of a matrix that permutes nothing."""
    return node.op_type == "Transpose" and _perm(node, scope) == [0, 1]


def _idle_after(node: onnx.NodeProto, scope: _Scope) -> bool:
    before = scope.maker(node.input[0])
    return _idle(node, scope) and before is not None and before.op_type == "Gemm"


def _idle_before(node: onnx.NodeProto, scope: _Scope) -> bool:
    makers = [scope.maker(name) for name in node.input[:2]]
    return any(maker is not None and _idle(maker, scope) for maker in makers)


def _idle_in_sum(node: onnx.NodeProto, scope: _Scope) -> bool:
    """Whether an Add reads a MatMul that reads such a Transpose: both become a Gemm."""
    products = [scope.maker(name) for name in node.input]
    return any(p is not None and p.op_type == "MatMul" and _idle_before(p, scope) for p in products)


def _lost_statistics(node: onnx.NodeProto, scope: _Scope) -> bool:
    before = scope.maker(node.input[0])
    alone = scope.reads[node.input[0]] == 1 and before is not None and before.op_type == "Add"
    return alone and any(node.output[1:]) and scope.ranks.get(node.input[0], 3) == 3


def _lost_dropout(node: onnx.NodeProto, scope: _Scope) -> bool:
    """Whether a Dropout is eliminated: exactly one of its inputs is made by a node that is not folded before."""
    if len(node.input) < 3 or not node.input[2] or (len(node.output) > 1 and scope.reads[node.output[1]]):
        return False
    training = scope.constant(node.input[2])
    if training is not None and not training.any():
        return False
    if any(value.name == node.output[0] for value in scope.graph.output):
        return False
    return sum(not scope.fixed(name) for name in node.input if name) == 1


_MOST_SHARED = 8  # elements of the largest constants that ConstantSharing merges


def _shared_statistics(node: onnx.NodeProto, scope: _Scope) -> bool:
    if not _attribute(node, "training_mode", 0):
        return False
    outputs = {value.name for value in scope.graph.output}
    pairs = zip(node.input[3:5], node.output[1:], strict=False)
    return any(scope.alike.get(old, 1) > 1 for old, new in pairs if new not in outputs)


def _bits(tensor: onnx.TensorProto) -> tuple[object, ...] | None:
    """Return type, shape and bits of a constant that is small enough to be merged with equal ones, else None."""
    if tensor.data_location or math.prod(tensor.dims) > _MOST_SHARED:
        return None
    return tensor.data_type, *tensor.dims, numpy_helper.to_array(tensor).tobytes()


def miscounts_pads(opset: int, counted: int, pads: Sequence[int]) -> bool:
    """Whether 1.22's AveragePool divides the border by a wrong number.

    >>> miscounts_pads(20, 1, [1, 0, 1, 0]), miscounts_pads(20, 1, [1, 1, 1, 1]), miscounts_pads(18, 1, [1, 0, 1, 0])
    (True, False, False)
    """
    rank = len(pads) // 2
    return opset >= 19 and bool(counted) and any(pads[2 * axis + 1] < pads[rank + axis] for axis in range(rank))


def _miscounted(node: onnx.NodeProto, scope: _Scope) -> bool:
    return miscounts_pads(scope.opset, _attribute(node, "count_include_pad", 0), _attribute(node, "pads", ()))


_PATTERNS: dict[tuple[str, str], tuple[tuple[Bug, Callable[[onnx.NodeProto, _Scope], bool]], ...]] = {
    ("", "MatMul"): ((TRANSPOSED_BY_VECTOR, _transposed_by_vector),),
    ("com.microsoft", "FusedMatMul"): ((TRANSPOSED_BY_VECTOR, _transposed_by_vector),),
    ("", "MaxPool"): ((PADDED_MAXIMUM, _padded_maximum),),
    ("", "AveragePool"): ((PADDED_AVERAGE, _padded_average), (MISCOUNTED_PADS, _miscounted)),
    ("", "Transpose"): ((IDLE_TRANSPOSE, _idle_after),),
    ("", "Gemm"): ((IDLE_TRANSPOSE, _idle_before),),
    ("", "Add"): ((IDLE_TRANSPOSE, _idle_in_sum),),
    ("", "Dropout"): ((LOST_DROPOUT, _lost_dropout),),
    ("", "LayerNormalization"): ((LOST_STATISTICS, _lost_statistics),),
    ("", "BatchNormalization"): ((SHARED_STATISTICS, _shared_statistics),),
}
