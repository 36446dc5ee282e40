"""Functions that torch differentiates in one piece and ONNX has no gradient for, written out of simple parts.

While a step is traced, `Composites` puts these in the functions' places, above differentiation, so that their
gradients follow from the parts'. The reference of the check runs torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ..private_torch import old_weight_norm
from .indices import CHECKED, beyond
from .resizing import interpolate


def bilinear(
    input1: torch.Tensor, input2: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """x W y for every output."""
    made = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return made if bias is None else made + bias


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """Sum, mean or maximum of the rows in each bag, without those of the padding."""
    if scale_grad_by_freq:
        raise NotImplementedError("embedding_bag with scale_grad_by_freq: use F.embedding with it, and .sum(1)")
    if offsets is not None and mode == "max":
        raise NotImplementedError(
            "embedding_bag of mode 'max' with offsets: pad the bags to one length, give indices of shape (bags, "
            "length), and name the index that pads, padding_idx"
        )
    rows = embedding(input, weight, None, max_norm, norm_type)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    kept = None if padding_idx is None else input != padding_idx % weight.shape[0]
    if kept is not None:
        rows = torch.where(kept.unsqueeze(-1), rows, -math.inf if mode == "max" else 0.0)
    if offsets is None:
        if mode == "max":
            made = rows.max(1).values
            return made if kept is None else torch.where(kept.any(1, keepdim=True), made, 0.0)
        if mode == "sum" or kept is None:
            return rows.sum(1) if mode == "sum" else rows.mean(1)
        return rows.sum(1) / kept.sum(1, keepdim=True).clamp(min=1).to(rows.dtype)
    offsets = offsets.long()
    if not include_last_offset:
        offsets = torch.cat([offsets, offsets.new_full([1], input.numel())])
    # The bag of a row is the number of offsets up to it, less one; rows behind the last offset have one more.
    begun = offsets.new_zeros([input.numel() + 1]).scatter_add(0, offsets, torch.ones_like(offsets))
    bag = begun.cumsum(0)[:-1] - 1
    made = rows.new_zeros([offsets.numel(), rows.shape[1]]).index_add(0, bag, rows)[:-1]
    if mode == "sum":
        return made
    count = offsets.diff() if kept is None else torch.zeros_like(offsets).index_add(0, bag, kept.long())[:-1]
    return made / count.clamp(min=1).unsqueeze(1).to(made.dtype)


def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Rows of the table; those longer than `max_norm` are shortened in it first. Gradients are dense.

    torch's own finds the rows that are read by ``unique``, the size of whose result depends on data.
    """
    if max_norm is not None:
        with torch.no_grad():
            read = torch.zeros(weight.shape[0]).scatter(0, input.flatten().long(), 1.0) > 0
            length = torch.linalg.vector_norm(weight, norm_type, dim=1)
            factor = torch.where(read & (length > max_norm), max_norm / (length + 1e-7), 1.0)
            weight.mul_(factor.unsqueeze(1))
    return F.embedding(beyond(input), weight, padding_idx, None, norm_type, scale_grad_by_freq)


def cdist(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: Any = None) -> torch.Tensor:
    """Distances of all pairs of rows; the gradient at distance 0 is 0."""
    return _distance(x1.unsqueeze(-2) - x2.unsqueeze(-3), p)


def pdist(input: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    """Distances of the pairs of rows i < j."""
    first, second = torch.triu_indices(input.shape[0], input.shape[0], 1)
    return _distance(input.index_select(0, first) - input.index_select(0, second), p)


def _distance(difference: torch.Tensor, p: float) -> torch.Tensor:
    if p == 2:
        squares = (difference * difference).sum(-1)
        apart = squares > 0
        return torch.where(apart, torch.where(apart, squares, 1.0).sqrt(), 0.0)
    if p == 1:
        return difference.abs().sum(-1)
    if p == float("inf"):
        size = difference.abs()
        largest = size.detach().amax(-1, keepdim=True)
        # All that are the largest have the whole gradient: what is added is zero, and of the gradient that each lacks.
        hit = (size == largest) & (largest < math.inf)
        return largest.squeeze(-1) + torch.where(hit, size - size.detach(), 0.0).sum(-1)
    raise NotImplementedError(f"distances of p = {p}: 1, 2 and inf are supported")


def logcumsumexp(input: torch.Tensor, dim: int) -> torch.Tensor:
    """Of pairs, then of fours, and so on; Hillis & Steele 1986."""
    if not input.dim():
        return input.clone()
    made, length, shift = input.movedim(dim, -1), input.shape[dim], 1
    while shift < length:
        before = F.pad(made[..., : length - shift], (shift, 0), value=-math.inf)
        nothing = (made == -math.inf) & (before == -math.inf)  # where a logarithm has no derivative
        made = torch.where(nothing, -math.inf, torch.logaddexp(torch.where(nothing, 0.0, made), before))
        shift *= 2
    return made.movedim(-1, dim)


def grid_sample(
    input: torch.Tensor,
    grid: torch.Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> torch.Tensor:
    """Nearest or bilinear samples of (N, C, H, W) at (N, h, w, 2) coordinates from -1 to 1."""
    x = input
    if x.dim() != 4 or mode == "bicubic" or padding_mode == "reflection":
        raise NotImplementedError("grid_sample of volumes, bicubic, or with padding_mode reflection")
    (batch, channels, *sizes), places = x.shape, grid.shape[1:3]
    corners: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # per axis: (coordinate, weight) of its neighbours
    for axis, size in ((1, sizes[0]), (0, sizes[1])):
        at = grid[..., axis]
        at = (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2
        if padding_mode == "border":
            at = torch.where((at > 0) & (at < size - 1), at, torch.where(at > 0, size - 1.0, 0.0).to(at.dtype))
        if mode == "nearest":
            corners.append([(at.round(), torch.ones_like(at))])
        else:
            low = at.detach().floor()
            corners.append([(low, 1 - (at - low)), (low + 1, at - low)])
    made = None
    for row, row_weight in corners[0]:
        for column, column_weight in corners[1]:
            inside = (row >= 0) & (row < sizes[0]) & (column >= 0) & (column < sizes[1])
            # integers: half precision has no number for each pixel
            index = torch.where(inside, row.detach().long() * sizes[1] + column.detach().long(), 0)
            index = index.reshape([batch, 1, -1]).expand([batch, channels, -1])
            picked = x.flatten(2).gather(2, index).reshape([batch, channels, *places])
            picked = torch.where(inside.unsqueeze(1), picked, 0.0)  # the pixel at index 0 may be infinite
            weight = (row_weight * column_weight).unsqueeze(1)
            made = picked * weight if made is None else made + picked * weight
    assert made is not None
    return made


def weight_norm(direction: torch.Tensor, length: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Salimans & Kingma 2016: direction scaled to length, along every axis but `dim`."""
    axes = [axis for axis in range(direction.dim()) if dim == -1 or axis != dim % direction.dim()]
    return direction * (length / (direction * direction).sum(axes, keepdim=True).sqrt())


def affine_grid(theta: torch.Tensor, size: list[int], align_corners: bool | None = None) -> torch.Tensor:
    """(N, 2, 3) maps of the unit square's pixel centres, for `grid_sample`."""
    if len(size) != 4:
        raise NotImplementedError("affine_grid of volumes")
    axes = []
    for count in size[2:]:
        edge = 1.0 if align_corners and count > 1 else 1 - 1 / count
        axes.append(torch.linspace(-edge, edge, count, dtype=theta.dtype))
    y, x = torch.meshgrid(axes, indexing="ij")
    points = torch.stack([x, y, torch.ones_like(x)], -1).reshape([1, -1, 3])
    return (points @ theta.transpose(1, 2)).reshape([size[0], size[2], size[3], 2])


def cumprod(input: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Products of all prefixes, side by side; those of integers have no gradient."""
    x = input if dtype is None else input.to(dtype)
    if not x.is_floating_point() or not x.dim():
        made: torch.Tensor = torch.ops.aten.cumprod(x, dim)
        return made
    length = x.shape[dim]
    prefix = torch.ones([length, length], dtype=torch.bool).tril()
    return torch.where(prefix, x.movedim(dim, -1).unsqueeze(-2), 1.0).prod(-1).movedim(-1, dim)


def matrix_exp(input: torch.Tensor) -> torch.Tensor:
    """Taylor's polynomial of x / 2^s, squared s times, where s brings the norm of each matrix to at most 1."""
    x = input
    if 0 in x.shape:
        return x
    norm = x.detach().abs().sum(-2).amax(-1).clamp(min=1.0)[..., None, None]
    halvings = norm.log2().ceil().clamp(max=_SQUARINGS)
    part = x / torch.exp2(halvings)
    unit = torch.eye(x.shape[-1], dtype=x.dtype)
    made = unit + part / _TERMS
    for order in range(_TERMS - 1, 0, -1):
        made = unit + part @ made / order
    for turn in range(_SQUARINGS):
        made = torch.where(halvings > turn, made @ made, made)
    return made


_SQUARINGS, _TERMS = 12, 18  # for norms up to 4096; at a norm of 1 the first term left out is 1 / 19!


def gaussian_nll_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Without torch's refusal of negative variances, which depends on data."""
    variance = torch.as_tensor(var, dtype=input.dtype)
    if variance.dim() == input.dim() - 1 and variance.dim():
        variance = variance.unsqueeze(-1)
    with torch.no_grad():  # torch lets no gradient through the bound
        bound = (eps - variance).clamp(min=0)
    variance = variance + bound
    made = 0.5 * (variance.log() + (input - target) ** 2 / variance)
    if full:
        made = made + 0.5 * math.log(2 * math.pi)
    return {"mean": made.mean, "sum": made.sum}[reduction]() if reduction != "none" else made


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor | Sequence[int],
    target_lengths: torch.Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Graves et al. 2006, section 4.1, unrolled over time; targets padded to one length."""
    if log_probs.dim() != 3 or targets.dim() != 2:
        raise NotImplementedError(
            "ctc_loss but of log-probabilities (time, batch, classes) and targets (batch, length)"
        )
    (steps, batch, _), labels = log_probs.shape, 2 * targets.shape[1] + 1
    lengths, wanted = (torch.as_tensor(v).reshape([-1]).expand([batch]) for v in (input_lengths, target_lengths))
    # what lies beyond a target's length may be no class
    targets = torch.where(torch.arange(targets.shape[1]) < wanted.unsqueeze(1), targets, blank)
    # blanks around every label
    path = torch.stack([torch.full_like(targets, blank), targets], 2).flatten(1)
    path = torch.cat([path, torch.full_like(targets[:, :1], blank)], 1)
    apart = torch.cat([torch.zeros([batch, 2], dtype=torch.bool), path[:, 2:] != path[:, :-2]], 1)
    scores = log_probs.gather(2, path.unsqueeze(0).expand([steps, batch, labels]))
    # before the first step: at the first blank, from which a step may stay or go on to the first label
    reached = torch.where(torch.arange(labels) < 1, torch.zeros([batch, 1], dtype=scores.dtype), _NEVER)
    for step in range(steps):
        before = F.pad(reached, (2, 0), value=_NEVER)
        skipped = torch.where(apart, before[:, :-2], _NEVER)
        ways = torch.stack([reached, before[:, 1:-1], skipped], 0).logsumexp(0) + scores[step]
        reached = torch.where((lengths > step).unsqueeze(1), ways, reached)
    ends = 2 * wanted.unsqueeze(1) - torch.arange(2)  # in the last label or the blank after it
    last = torch.where(ends >= 0, reached.gather(1, ends.clamp(min=0)), _NEVER)
    made = -last.logsumexp(1)
    made = torch.where(made > -_NEVER / 2, 0.0 if zero_infinity else math.inf, made)
    if reduction == "mean":
        return (made / wanted.clamp(min=1)).mean()
    return made.sum() if reduction == "sum" else made


def linear_cross_entropy(*args: Any, options: Any = None, **named: Any) -> torch.Tensor:
    """Without chunks of torch's own: `passes.loss_in_parts` and the planner decide what exists at once."""
    made: torch.Tensor = F.linear_cross_entropy(*args, **named)
    return made


_NEVER = -1e30  # a logarithm of zero that can be computed with


COMPOSITES: dict[Any, Callable[..., Any]] = {
    F.bilinear: bilinear,
    torch.bilinear: bilinear,
    F.embedding_bag: embedding_bag,
    F.embedding: embedding,
    torch.cdist: cdist,
    torch.pdist: pdist,
    F.pdist: pdist,
    torch.logcumsumexp: logcumsumexp,
    torch.Tensor.logcumsumexp: logcumsumexp,
    F.affine_grid: affine_grid,
    F.ctc_loss: ctc_loss,
    F.gaussian_nll_loss: gaussian_nll_loss,
    F.grid_sample: grid_sample,
    F.interpolate: interpolate,
    torch.cumprod: cumprod,
    torch.Tensor.cumprod: cumprod,
    torch.matrix_exp: matrix_exp,
    torch.linalg.matrix_exp: matrix_exp,
    old_weight_norm: weight_norm,
    **CHECKED,
}
if hasattr(F, "linear_cross_entropy"):  # not in torch 2.9
    COMPOSITES[F.linear_cross_entropy] = linear_cross_entropy


def rrelu(
    input: torch.Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> torch.Tensor:
    """Slopes below zero are drawn, in training."""
    x = input
    if not training:
        return F.leaky_relu(x, (lower + upper) / 2, inplace)
    slope = torch.rand_like(x) * (upper - lower) + lower
    made = torch.where(x > 0, x, x * slope)
    return x.copy_(made) if inplace else made


DRAWING: dict[Any, Callable[..., Any]] = {F.rrelu: rrelu, torch.rrelu: rrelu}
"""Compositions that draw, and so stand on both sides, where `watch` sees them: torch's own take no draws."""


def torchs_cdist(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: Any = None) -> torch.Tensor:
    """torch's own, without its products of matrices for many rows: their distance of a row to itself is no zero."""
    return torch.cdist(x1, x2, p, "donot_use_mm_for_euclid_dist")


OWN: dict[Any, Callable[..., Any]] = {torch.cdist: torchs_cdist}
"""How torch's own are called where that is not as they are."""


def _replace(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """``tensor.data = value``, which a trace does not see."""
    if value.shape != tensor.shape or value.dtype != tensor.dtype:
        raise NotImplementedError("an assignment to .data of another shape or dtype")
    tensor.data.copy_(value)


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class Composites(TorchFunctionMode):
    """Calls of the functions above go to their compositions, or with `own` to torch's own, unseen by `watch`."""

    def __init__(self, watch: Any, own: bool = False) -> None:
        super().__init__()
        self._watch = watch
        self._own = own

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in DRAWING:
            return DRAWING[func](*args, **(kwargs or {}))
        if func == _SET_DATA and not self._own:
            return _replace(*args)
        if func not in COMPOSITES:
            return func(*args, **(kwargs or {}))
        with self._watch.paused():
            return (OWN.get(func, func) if self._own else COMPOSITES[func])(*args, **(kwargs or {}))
