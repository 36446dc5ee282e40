"""Functions that refuse negative indices, where ONNX would count them from the end: they lie beyond every tensor.

ONNX Runtime then stops the run, as it does for indices that are too large.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from onnx_remat.errors import ConversionError

_BEYOND = {torch.int64: 2**40, torch.int32: 2**30}
"""Sizes that no tensor has. They are far below the largest number of the type, so that no address that is computed from
such an index wraps around."""


def beyond(index: torch.Tensor) -> torch.Tensor:
    """Return indices with the negative ones beyond every tensor."""
    return index % _BEYOND[index.dtype] if index.dtype in _BEYOND else index


def _picking(
    function: Callable[..., torch.Tensor], input: torch.Tensor, dim: int, index: torch.Tensor, *more: Any, **named: Any
) -> torch.Tensor:
    """Call a function whose third argument is an index."""
    return function(input, dim, beyond(index), *more, **named)


def _of_classes(
    function: Callable[..., torch.Tensor],
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    *more: Any,
    **named: Any,
) -> torch.Tensor:
    """Call a loss of numbers of classes, which torch takes in 64 bits or 8; the one that is ignored moves with the
    others."""
    if target.dtype in (torch.int8, torch.int16, torch.int32):
        raise ConversionError(f"the numbers of classes are {target.dtype}, which torch refuses: use target.long()")
    if target.dtype == torch.uint8:
        target = target.long()
    if target.dtype in _BEYOND:
        target, ignore_index = beyond(target), ignore_index % _BEYOND[target.dtype]
    return function(input, target, weight, size_average, ignore_index, *more, **named)


_PICKING = (
    "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_select",
    "index_add", "index_add_", "index_copy", "index_copy_",
)  # fmt: skip

CHECKED: dict[Any, Callable[..., Any]] = {
    **{loss: partial(_of_classes, loss) for loss in (F.cross_entropy, F.nll_loss)},
    **{
        function: partial(_picking, function)
        for home in (torch, torch.Tensor)
        for name in _PICKING
        if (function := getattr(home, name, None)) is not None
    },
}
