"""Check that an original and its rewrite round half-precision values alike on ONNX Runtime's CPU provider.

An op without a half kernel runs as Cast -> float kernel -> Cast. When it loads a file, ONNX Runtime removes a pair of
adjacent casts, optimisations off or on, and with them the rounding. Whether two casts are adjacent depends on all
readers of the value, and an op that only moves data runs in float if all of its neighbours do::

    file          Tanh -> Transpose -> MatMul                 as it runs    Tanh -> Transpose -> MatMul, all in float
    with a node   Tanh -> Unsqueeze -> Transpose -> MatMul    as it runs    Tanh -> Cast16 -> Unsqueeze -> Transpose ...

So no rule about the file alone decides where a helper node is safe. This module compares both files as ONNX Runtime
loads them with optimisations off: value numbering identifies every value by the expression that computes it, without
roundings that change nothing. Equal numbers mean equal bits, in whatever order and however often the nodes run.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import onnx
from onnx import TensorProto

from onnx_remat.errors import ModelError, VerificationError
from onnx_remat.ir.graph import captures
from onnx_remat.ir.light import without_weights
from onnx_remat.ir.shapes import UNSEEN
from onnx_remat.ort import runtime
from onnx_remat.ort.prepare import Compiled
from onnx_remat.write.decided import Rewritten
from onnx_remat.write.private_buffers import Unrolled

INSERTED = "InsertedPrecisionFreeCast_"
"""Prefix that ONNX Runtime adds to a value's name where it computes it in float."""

_ALL = (-1,)
_DATA_SLOTS: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Concat", "Max", "Min"), _ALL), "Where": (1, 2), "Pad": (0, 2),
    **dict.fromkeys(("ScatterElements", "ScatterND"), (0, 2)),
    **dict.fromkeys(
        (
            "DepthToSpace", "Expand", "Flatten", "Gather", "GatherElements", "GatherND", "Identity", "MaxPool",
            "Reshape", "Slice", "SpaceToDepth", "Split", "Squeeze", "Tile", "Transpose", "Trilu", "Unsqueeze",
        ), (0,),
    ),
}  # fmt: skip
"""Ops that copy elements of their inputs, so that rounding before and after them is equivalent; the data slots."""

_HALF, _SINGLE = TensorProto.FLOAT16, TensorProto.FLOAT
_ROUND = "round"
_COPIES = frozenset((*_DATA_SLOTS, _ROUND))


@dataclass(frozen=True, slots=True)
class Direct:
    """Values next to which no helper node may stand, as far as written files have shown it.

    Attributes
    ----------
    compiled : Compiled
        The original.
    loaded : onnx.ModelProto or None
        The original as ONNX Runtime loads it with optimisations off; None if no value is rounded or ONNX Runtime is
        not available.
    values : set of str
        Values that no helper node may read or pass on. The set grows with every file that differs.
    """

    compiled: Compiled
    loaded: onnx.ModelProto | None
    values: set[str]

    @staticmethod
    def of(compiled: Compiled) -> Direct:
        """Return the record of an original; load it in ONNX Runtime if the CPU may compute half precision in float."""
        halves = any(tensor.dtype == _HALF for tensor in compiled.tensors.values())
        affected = halves and compiled.kernels.device == "cpu" and runtime.available()
        if not affected or runtime.is_large(compiled.graph.model):
            return Direct(compiled, None, set())
        try:
            return Direct(compiled, _loaded(compiled.graph.model), set())
        except ModelError:  # `as_executed` reports it
            return Direct(compiled, None, set())

    def differing(self, written: Rewritten, unrolled: Unrolled) -> tuple[str, ...]:
        """Return the values of the original around which the file of a schedule rounds differently.

        Raises
        ------
        VerificationError
            ONNX Runtime cannot load the file.
        """
        if self.loaded is None or runtime.is_large(written.model):
            return ()
        names = list(self.compiled.graph.values)
        origin = {name: name for name in names}
        origin |= zip(written.occurrences, (names[v] for v in unrolled.source.tolist()), strict=True)
        for node in written.model.graph.node:
            if _passes(node) and node.input[0] in origin:  # ONNX Runtime may give the helper another input
                origin.setdefault(node.output[0], origin[node.input[0]])
        try:
            loaded = _loaded(written.model)
        except ModelError as error:
            raise VerificationError(f"the rewritten model is not usable: {error}") from error
        return differing(self.loaded, loaded, origin)


def _loaded(model: onnx.ModelProto) -> onnx.ModelProto:
    return runtime.optimized(without_weights(model), None, "disable")


def differing(before: onnx.ModelProto, after: onnx.ModelProto, origin: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values of the original around which exactly one of original and rewrite is rounded.

    Parameters
    ----------
    before, after : onnx.ModelProto
        Original and rewrite, as ONNX Runtime's CPU provider writes them with optimisations off (`runtime.optimized`).
    origin : mapping of str to str
        Value of the original for each of its occurrences in the rewrite.

    Returns
    -------
    tuple of str
        In order of first mention: the inputs of differing ops, back to the ops that compute them. Empty if every
        output is equal to the last bit.
    """
    terms = _Terms()
    original = _Numbered(terms, before, {name: name for name in origin.values()})
    return tuple(_Numbered(terms, after, origin, original).blamed)


class _Term(NamedTuple):
    """The expression of a value: an op, everything else it depends on, and the numbers of the terms it reads."""

    op: str
    how: tuple[object, ...]
    read: tuple[int, ...]

    def with_data(self, change: Callable[[int], int]) -> _Term:
        """Return the term of a data-moving op with its data inputs replaced by `change`."""
        return self._replace(read=tuple(change(n) if i in self._slots() else n for i, n in enumerate(self.read)))

    def data(self) -> list[int]:
        """Return the data inputs of a data-moving op."""
        return [n for i, n in enumerate(self.read) if i in self._slots()]

    def _slots(self) -> Sequence[int]:
        slots = _DATA_SLOTS[self.op]
        return range(len(self.read)) if slots == _ALL else slots


class _Terms:
    """Table of terms; equal terms have the same number.

    Attributes
    ----------
    exact : set of int
        Terms whose values are representable in half precision.
    """

    def __init__(self) -> None:
        self._numbers: dict[_Term, int] = {}
        self._terms: list[_Term] = []
        self.exact: set[int] = set()

    def number(self, term: _Term) -> int:
        found = self._numbers.setdefault(term, len(self._terms))
        if found == len(self._terms):
            self._terms.append(term)
        return found

    def leaf(self, name: str) -> int:
        return self.number(_Term("", (name,), ()))

    def rounded(self, number: int) -> int:
        """Return the term rounded to half precision; the term itself if that changes nothing."""
        found: dict[int, int] = {}
        for each in self._copied(number, self.exact):
            term = self._terms[each]
            found[each] = each
            if each not in self.exact:
                within = term.with_data(found.__getitem__) if term.op in _DATA_SLOTS else _Term(_ROUND, (), (each,))
                found[each] = self.number(within)
        self.exact.update(found.values())
        return found[number]

    def unrounded(self, number: int) -> int:
        """Return the term without roundings of the data it copies: enough for Shape and Size."""
        found: dict[int, int] = {}
        for each in self._copied(number, ()):
            term = self._terms[each]
            moved = term.op in _DATA_SLOTS
            found[each] = self.number(term.with_data(found.__getitem__)) if moved else each
            if term.op == _ROUND:
                found[each] = found[term.read[0]]
        return found[number]

    def _copied(self, number: int, ends: Container[int]) -> list[int]:
        """Return a term and those whose elements it copies, back to `ends`; each after the terms that it reads."""
        seen, todo = {number}, [number]
        while todo:
            term = self._terms[(each := todo.pop())]
            if each in ends or term.op not in _COPIES:
                continue
            new = set(term.read if term.op == _ROUND else term.data()) - seen
            seen |= new
            todo += new
        return sorted(seen)


class _Numbered:
    """Value numbering of a loaded graph; given that of an original, also the values to blame for a difference.

    Attributes
    ----------
    raw : dict of str to int
        Per value of the file, the term that its op computes, before any rounding of the result.
    blamed : dict of str to None
        As `differing` returns them.
    """

    def __init__(
        self,
        terms: _Terms,
        model: onnx.ModelProto,
        origin: Mapping[str, str],
        original: _Numbered | None = None,
    ) -> None:
        self._terms, self._origin, self._original = terms, origin, original
        self.raw: dict[str, int] = {}
        self.blamed: dict[str, None] = {}
        self._number: dict[str, int] = {"": terms.leaf("")}
        self._half: set[str] = set()
        self._near: set[str] = set()  # values of half precision, or kept in float instead, or casts of these
        self._maker: dict[str, onnx.NodeProto] = {}
        graph = model.graph
        leaves = {value.name: value.type.tensor_type.elem_type for value in graph.input}
        leaves |= {value.name: value.data_type for value in graph.initializer}
        for name, dtype in leaves.items():
            self._number[name] = terms.leaf(name)
            if dtype == _HALF:
                self._half.add(name)
                self._near.add(name)
                terms.exact.add(self._number[name])
        for node in graph.node:
            self._maker |= dict.fromkeys(node.output, node)
            self._add(node)
        for value in graph.output:
            if value.name in self._near and original and self._number[value.name] != original._number[value.name]:
                self._blame(self._maker[value.name], value.name)

    def _add(self, node: onnx.NodeProto) -> None:
        read = tuple(self._of(name) for name in node.input)
        in_half = any(name in self._half for name in node.input)
        captured = captures(node)
        near = in_half or any(name in self._near or name.startswith(INSERTED) for name in (*node.input, *captured))
        to = next((a.i for a in node.attribute if a.name == "to"), 0) if node.op_type == "Cast" else 0
        plain = [name.removeprefix(INSERTED) for name in node.output]
        if to == _HALF:
            self._set(node.output[0], self._terms.rounded(read[0]), True, True)
        elif to == _SINGLE and in_half:
            self._set(node.output[0], read[0], False, True)
        elif _passes(node):
            self._set(node.output[0], read[0], in_half, near)
        elif node.op_type in _DATA_SLOTS:
            for i, name in enumerate(node.output):
                number = self._terms.number(_Term(node.op_type, (_attributes(node), i), read))
                self._set(name, number, in_half, near)
                if in_half:
                    self._terms.exact.add(number)
        else:
            if only_shape := node.op_type in ("Shape", "Size"):
                read = tuple(self._terms.unrounded(number) for number in read)
            inside = tuple(self._of(name) for name in captured)
            drawn = plain[0] if not node.input else ""
            halves = _halves_of_body(node)
            for i, name in enumerate(node.output):
                half = in_half and not only_shape if halves is None else i in halves
                how = (node.domain, _attributes(node), i, half, inside, drawn)
                number = self._terms.number(_Term(node.op_type, how, read))
                expected = self._as_original(plain[i], number)
                if number != expected and (near or name.startswith(INSERTED)):
                    self._blame(node, plain[i])
                self._set(name, expected, half, half or (near and not only_shape))
                if half:
                    self._terms.exact.add(number)
        for name, bare in zip(node.output, plain, strict=True):
            if to != _HALF or bare not in self.raw:
                self.raw[bare] = self._number[name]

    def _of(self, name: str) -> int:
        if name not in self._number:  # of an outer graph, or of an unknown kind: identified by its name
            self._number[name] = self._terms.leaf(name)
        return self._number[name]

    def _set(self, name: str, number: int, half: bool, near: bool) -> None:
        if not name:  # an absent output: what absent inputs read stays a leaf
            return
        self._number[name] = number
        if half:
            self._half.add(name)
        if near:
            self._near.add(name)

    def _as_original(self, name: str, number: int) -> int:
        """Return the original's number for a value: a difference counts once, and one of form alone does not count."""
        origin = self._origin.get(name)
        return number if self._original is None or origin is None else self._original.raw.get(origin, number)

    def _blame(self, node: onnx.NodeProto, made: str) -> None:
        """Blame the inputs of a node that makes `made`, here and in the original."""
        self.blamed |= dict.fromkeys(self._walk([*node.input, *captures(node)]))
        if self._original is not None and (other := self._original._maker_of(self._origin.get(made, made))):
            self.blamed |= dict.fromkeys(self._original._walk([*other.input, *captures(other)]))

    def _maker_of(self, name: str) -> onnx.NodeProto | None:
        return self._maker.get(INSERTED + name) or self._maker.get(name)

    def _walk(self, names: list[str]) -> Iterator[str]:
        """Yield values of the original from these back to the ops that compute something."""
        seen: set[str] = set()
        while names:
            name = names.pop()
            if name in seen:
                continue
            seen.add(name)
            plain = name.removeprefix(INSERTED)
            if name in self._near or name.startswith(INSERTED):
                if plain in self._origin:
                    yield self._origin[plain]
                node = self._maker.get(name)
                if node is not None and (
                    node.op_type == "Cast" or node.op_type in _DATA_SLOTS or plain not in self._origin
                ):
                    names.extend(node.input)


def _passes(node: onnx.NodeProto) -> bool:
    """Whether a node is a barrier (`barriers`), which hides a shape or makes a value wait, or another copy."""
    hides = node.op_type in ("Unsqueeze", "Concat") and any(name.startswith(UNSEEN) for name in node.input[1:])
    return hides or node.op_type in ("Identity", "MemcpyFromHost", "MemcpyToHost")


def _attributes(node: onnx.NodeProto) -> tuple[tuple[str, bytes], ...]:
    """Return all attributes but bodies, whose text contains names of outer values."""
    stated = [a for a in node.attribute if a.type not in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)]
    return tuple(sorted((a.name, a.SerializeToString(deterministic=True)) for a in stated))


def _halves_of_body(node: onnx.NodeProto) -> set[int] | None:
    """Return the outputs of an If, a Loop or a Scan in half precision; None for a node without bodies."""
    bodies = [a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH]
    if not bodies:
        return None
    made = list(bodies[0].output)[1 if node.op_type == "Loop" else 0 :]  # a Loop's first output is its condition
    return {i for i, value in enumerate(made) if value.type.tensor_type.elem_type == _HALF}
