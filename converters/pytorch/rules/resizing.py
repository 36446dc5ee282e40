"""Resizing: one product of matrices per axis, as are its gradients.

torch differentiates it as gathers, whose gradients scatter, entry by entry, over indices as many as the image's
entries. Nearest neighbours of a multiple of the size are repeated instead, and those of data, which have no gradient,
are gathered: a product spreads NaN and infinity over rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..private_torch import computed_now
from .registry import rule

aten = torch.ops.aten


def _matrices(
    kind: Any, sizes: Sequence[int], counts: Sequence[int], corners: bool, scales: Sequence[float | None]
) -> list[list[list[float]]]:
    """Per axis, how much each element made takes of each element read."""
    if not all(isinstance(n, int) for n in (*sizes, *counts)):
        raise NotImplementedError("resizing with antialiasing of dimensions that vary")
    made = []
    for old, new, scale in zip(sizes, counts, scales, strict=True):
        with computed_now():  # computed now: what becomes of the unit vectors, side by side
            unit = torch.eye(old, dtype=torch.float64)[None, None]
            made.append(kind(unit, [new, old], corners, scale, None)[0, 0].tolist())
    return made


def _resized(kind: Any) -> Callable[..., torch.Tensor]:
    def forward(
        x: torch.Tensor, size: Sequence[int], corners: bool, scale_h: float | None = None, scale_w: float | None = None
    ) -> torch.Tensor:
        rows, columns = _matrices(kind, x.shape[2:], size, corners, (scale_h, scale_w))
        return torch.tensor(rows, dtype=x.dtype) @ x @ torch.tensor(columns, dtype=x.dtype).t()

    return forward


def _unresized(kind: Any) -> Callable[..., torch.Tensor]:
    def backward(
        gradient: torch.Tensor, size: Sequence[int], input_size: Sequence[int], corners: bool,
        scale_h: float | None = None, scale_w: float | None = None,
    ) -> torch.Tensor:  # fmt: skip
        rows, columns = _matrices(kind, input_size[2:], size, corners, (scale_h, scale_w))
        return torch.tensor(rows, dtype=gradient.dtype).t() @ gradient @ torch.tensor(columns, dtype=gradient.dtype)

    return backward


_NEAREST = ("nearest", "nearest-exact")
_LINEAR = ("linear", "bilinear", "trilinear")


def interpolate(
    input: torch.Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.interpolate`; torch's own where sizes vary, for the mode area, and with antialiasing."""
    sizes = list(input.shape[2:])
    more = {"mode": mode, "align_corners": align_corners, "recompute_scale_factor": recompute_scale_factor}
    if mode == "area" or antialias or not all(isinstance(n, int) for n in sizes):
        return F.interpolate(input, size, scale_factor, antialias=antialias, **more)  # type: ignore[arg-type]
    made = input
    for axis in reversed(range(len(sizes))):
        wanted, scale = _of_axis(size, axis), _of_axis(scale_factor, axis)
        matrix = _matrix(sizes[axis], wanted, scale, mode, align_corners, recompute_scale_factor)
        made = _along(made, axis + 2, matrix, nearest=mode in _NEAREST)
    return made


def _of_axis(given: Any, axis: int) -> Any:
    return given[axis] if isinstance(given, (list, tuple, torch.Size)) else given


def _matrix(
    old: int, size: int | None, scale: float | None, mode: str, corners: bool | None, recompute: bool | None
) -> torch.Tensor:
    """How much each entry made, a column, takes of each entry read: what becomes of the unit vectors."""
    along = {"align_corners": corners, "recompute_scale_factor": recompute}
    with computed_now():
        unit = torch.eye(old, dtype=torch.float64)[None]
        if mode == "bicubic":  # of planes alone
            both = (None if size is None else [old, size], None if scale is None else [1.0, scale])
            return F.interpolate(unit[None], *both, mode=mode, **along)[0, 0]  # type: ignore[arg-type]
        of_line = "linear" if mode in _LINEAR else mode
        return F.interpolate(unit, size, scale, mode=of_line, **along)[0]  # type: ignore[arg-type]


def _along(x: torch.Tensor, axis: int, matrix: torch.Tensor, nearest: bool) -> torch.Tensor:
    """An axis of `x` resized."""
    with computed_now():
        old, new = matrix.shape
        unit = torch.eye(old, dtype=matrix.dtype)
        same = old == new and bool(torch.equal(matrix, unit))
        times = new // old if new % old == 0 else 0
        repeated = nearest and times and bool(torch.equal(matrix, unit.repeat_interleave(times, 1)))
        weights, neighbours = matrix.tolist(), matrix.argmax(0).tolist()
    if same:
        return x
    shape = list(x.shape)
    if repeated:
        wide = x.unsqueeze(axis + 1).expand([*shape[: axis + 1], times, *shape[axis + 1 :]])
        return wide.reshape([*shape[:axis], new, *shape[axis + 1 :]])
    if nearest and not x.requires_grad:
        return x.index_select(axis, torch.tensor(neighbours))
    if axis == x.dim() - 1:
        return x @ torch.tensor(weights, dtype=x.dtype)
    made = torch.tensor(weights, dtype=x.dtype).t() @ x.flatten(axis + 1)
    return made.reshape([*shape[:axis], new, *shape[axis + 1 :]])


rule(aten._upsample_bilinear2d_aa.default)(_resized(aten._upsample_bilinear2d_aa))
rule(aten._upsample_bicubic2d_aa.default)(_resized(aten._upsample_bicubic2d_aa))
rule(aten._upsample_bilinear2d_aa_backward.default)(_unresized(aten._upsample_bilinear2d_aa))
rule(aten._upsample_bicubic2d_aa_backward.default)(_unresized(aten._upsample_bicubic2d_aa))
