"""ONNX operators as functions of torch tensors, for use in rules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.onnx import ops

Attribute: TypeAlias = int | float | str | bool | Sequence[int] | Sequence[float] | Sequence[str] | Sequence[bool]


def op(
    op_type: str,
    *inputs: torch.Tensor | None,
    shape: Sequence[Any],
    dtype: torch.dtype | None = None,
    **attributes: Attribute,
) -> torch.Tensor:
    """One ONNX node with one output of this shape, and of the first input's dtype unless another is given."""
    first = next(x for x in inputs if x is not None)
    return ops.symbolic(op_type, inputs, attributes, dtype=dtype or first.dtype, shape=list(shape))


def many(
    op_type: str,
    *inputs: torch.Tensor | None,
    shapes: Sequence[Sequence[Any]],
    dtypes: Sequence[torch.dtype],
    **attributes: Attribute,
) -> Sequence[torch.Tensor]:
    """One ONNX node with several outputs."""
    return ops.symbolic_multi_out(op_type, inputs, attributes, dtypes=dtypes, shapes=[list(s) for s in shapes])
