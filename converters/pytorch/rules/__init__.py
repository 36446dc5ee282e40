"""How operators that ONNX has no counterpart for are written: backward passes above all.

A rule is a function of the aten operator's own arguments that computes the same with simpler aten operators, or with
ONNX operators by `onnx.op`. Rules of torch's own fill the gaps.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ..private_torch import get_decompositions
from . import convolution, draws, elementwise, gamma, indexing, losses, normalization, padding, pooling, resizing
from .registry import RULES

__all__ = [
    "convolution", "decompositions", "draws", "elementwise", "gamma", "indexing", "losses", "normalization", "padding",
    "pooling", "resizing",
]  # fmt: skip


@cache
def decompositions() -> dict[Any, Any]:
    """Rule of every operator that is to be rewritten while tracing."""
    aten = torch.ops.aten
    backward = [getattr(aten, name) for name in dir(aten) if "backward" in name]
    table: dict[Any, Any] = dict(get_decompositions(backward))
    return table | RULES
