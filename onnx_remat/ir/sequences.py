"""Bytes of sequences and optionals, for which shape inference finds a type but no size."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from onnx import TypeProto

from onnx_remat.ir.graph import Graph

Sizer = Callable[[TypeProto | None], int | None]
"""Bytes of a tensor of a type, None if unknown."""

_SUM_OF_INPUTS = ("SequenceConstruct", "SequenceInsert", "Optional", "OptionalGetElement", "Identity")
_FIRST_INPUT = ("SequenceErase", "SplitToSequence")  # at most, for the former


def is_container(kind: TypeProto | None) -> bool:
    """Whether a type is a sequence, a map or an optional."""
    return kind is not None and kind.WhichOneof("value") in ("sequence_type", "optional_type", "map_type")


def sizes(graph: Graph, types: Mapping[str, TypeProto], tensor_bytes: Sizer) -> dict[str, int]:
    """Return the bytes of every container whose size follows from the ops that make it; others are left out.

    ONNX Runtime copies tensors into a sequence, so a sequence counts with all its tensors.
    """
    known: dict[str, int] = {}
    for op in graph.ops:
        for name in op.writes:
            if not is_container(types.get(name)):
                continue
            parts = [known.get(n) if is_container(types.get(n)) else tensor_bytes(types.get(n)) for n in op.inputs if n]
            kind = op.node.op_type
            if kind == "SequenceEmpty":
                known[name] = 0
            elif kind in _SUM_OF_INPUTS and None not in parts:
                index = 1 if kind == "SequenceInsert" and len(parts) > 2 else 0  # the position to insert at
                known[name] = sum(p for p in parts[: len(parts) - index] if p is not None)
            elif kind in _FIRST_INPUT and parts and parts[0] is not None:
                known[name] = parts[0]
    return known
