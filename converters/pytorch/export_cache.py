"""Steps that were exported and compared before: a traced graph is translated and compared with torch once.

The key of an exported step is a hash of the traced graph with its constants, the options, and the surroundings, see
`process.cache`. Values of parameters and state are inputs of the graph: they are not part of the key. Neither is how
torch runs the step, with checkpointing for example: what its own step takes is measured each time, and the entry's
figure counts where the two hardly differ, so that noise does not change the plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
import torch

from onnx_remat.process.cache import Entries, surroundings

from .arrays import array
from .preparation import Request
from .private_torch import FakeTensor, Operator, pytree
from .step import StepParts
from .trace import Trace

ENTRIES = Entries("exports")

MOST_BYTES = 64 << 20
"""Largest step to keep."""

_EXPORTED, _NUMBER = "exported", 8
_PACKAGES = ("torch", "onnxscript", "onnx-ir")


@dataclass(frozen=True, slots=True)
class Exported:
    """An exported step, and the bytes that torch's own took, 0 if they were not measured."""

    step: onnx.ModelProto
    torch_bytes: int = 0


def key_of(traced: Trace, step: StepParts, request: Request) -> str:
    """Return the key of a traced step, empty for a graph that text does not describe completely."""
    options: list[Any] = [
        traced.outputs, traced.watched, sorted(traced.outside), request.dynamic, request.loss_parts,
        request.attention_parts, request.check, request.provider, step.recipe, step.recipe.state({}), step.batch.names,
        bool(step.optimizers), surroundings(_PACKAGES, Path(__file__).parents[1]),
    ]  # fmt: skip
    found = hashlib.sha256(repr(options).encode())
    for name, value in step.inputs.items():
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
    try:
        for part in _described(traced.graph):
            found.update(part)
    except _Indescribable:
        return ""
    return found.hexdigest()[:32]


class _Indescribable(Exception):
    """A part of a graph that is neither an operator, a number nor a tensor with data."""


def _described(graph: torch.fx.GraphModule) -> Iterator[bytes]:
    for node in graph.graph.nodes:
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        if any(isinstance(leaf, torch.Tensor | torch.nn.Module) for leaf in leaves):
            raise _Indescribable
        label = {key: node.meta.get("custom", {}).get(key) for key in ("phase", "module")}
        value = pytree.tree_map_only(torch.Tensor, _kind, node.meta.get("val"))
        target = node.target if isinstance(node.target, str) else _name(node.target)
        yield repr((node.op, node.name, target, node.args, node.kwargs, label, value)).encode()
        if node.op == "get_attr":
            constant = getattr(graph, str(node.target), None)
            if not isinstance(constant, torch.Tensor) or isinstance(constant, FakeTensor):
                raise _Indescribable
            yield repr(_kind(constant)).encode() + array(constant).tobytes()


def _kind(tensor: torch.Tensor) -> tuple[str, ...]:
    return str(tensor.dtype), str(tuple(tensor.shape)), str(tensor.stride())


def _name(target: Any) -> str:
    if isinstance(target, Operator):
        return str(target)
    return f"{target.__module__}.{target.__qualname__}"


def find(key: str) -> Exported | None:
    """Return what was kept under a key."""
    data = ENTRIES.take(key, {}, _EXPORTED) if key else None
    if data is None:
        return None
    size = int.from_bytes(data[:_NUMBER], "little")
    return Exported(onnx.ModelProto.FromString(data[_NUMBER:]), size)


def keep(key: str, exported: Exported) -> None:
    """Store what `find` returns, unless it is too large."""
    data = exported.step.SerializeToString(deterministic=True) if key else b""
    if key and len(data) <= MOST_BYTES:
        ENTRIES.add(key, {_EXPORTED: exported.torch_bytes.to_bytes(_NUMBER, "little") + data})
