"""Kernels that replace those of onnx's reference implementation.

The kernels of the reference implementation loop over entries (windows, scatters, Resize), compute in float32 (Erf,
Gelu, AffineGrid), or are wrong: LRN confuses batch and channels, grouped ConvTranspose its weights, LpNormalization its
axes; Pad does not support negative pads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx.reference.op_run import OpRun

from ..resizing import axis_matrix

Index: TypeAlias = tuple[Any, ...]


class _Op(OpRun):
    op_domain = ""
    _run: Any  # each op has a signature of its own


class Conv(_Op):
    def _run(self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, **how: Any) -> tuple[np.ndarray]:
        windows = _Windows(x, w.shape[2:], how)
        group = how["group"] or 1
        n, wide = x.shape[0], windows.padded
        split = wide.reshape(n, group, -1, *wide.shape[2:])
        kernels = w.reshape(group, w.shape[0] // group, *w.shape[1:])
        y = np.zeros((n, group, kernels.shape[1], *windows.out), x.dtype)
        flat = y.reshape(n, group, kernels.shape[1], -1)
        if math.prod(windows.kernel) <= math.prod(windows.out):
            for offset, where in windows.by_offset():
                part = split[where].reshape(n, group, -1, flat.shape[-1])
                flat += np.ascontiguousarray(kernels[offset]) @ part  # BLAS needs it contiguous
        else:  # few large windows, as in the gradient of weights: one window at a time
            columns = kernels.reshape(group, kernels.shape[1], -1)
            for place, where in windows.by_place():
                part = split[where].reshape(n, group, -1, 1)
                y[place] = (columns @ part)[..., 0]
        y = y.reshape(n, -1, *windows.out)
        return (y if b is None else y + b.reshape(-1, *(1,) * len(windows.out)),)


class ConvTranspose(_Op):
    def _run(self, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None, **how: Any) -> tuple[np.ndarray]:
        rank, group = w.ndim - 2, how["group"] or 1
        ones, zeros = [1] * rank, [0] * rank
        strides, dilations = how["strides"] or ones, how["dilations"] or ones
        extra, lengths = how["output_padding"] or zeros, x.shape[2:]
        whole = [(m - 1) * s + (k - 1) * d + 1 + e for m, s, k, d, e in
                 zip(lengths, strides, w.shape[2:], dilations, extra, strict=True)]  # fmt: skip
        pads = list(how["pads"] or zeros * 2)
        automatic = how["auto_pad"] in ("SAME_UPPER", "SAME_LOWER")
        if how["output_shape"] or automatic:
            wanted = how["output_shape"] or [m * s for m, s in zip(lengths, strides, strict=True)]
            total = [max(0, a - b) for a, b in zip(whole, wanted[-rank:], strict=True)]
            small = [t // 2 for t in total]
            large = [t - s for t, s in zip(total, small, strict=True)]
            pads = small + large if how["auto_pad"] == "SAME_UPPER" else large + small
        n = x.shape[0]
        kernels = w.reshape(group, w.shape[0] // group, *w.shape[1:]).swapaxes(1, 2)
        flat = x.reshape(n, group, x.shape[1] // group, -1)
        y = np.zeros((n, group, w.shape[1], *whole), x.dtype)
        for offset in np.ndindex(*w.shape[2:]):
            where = _reads(offset, lengths, strides, dilations)
            y[where] += (np.ascontiguousarray(kernels[_within(*offset)]) @ flat).reshape(n, group, w.shape[1], *lengths)
        inside = [slice(low, size - high) for low, high, size in zip(pads[:rank], pads[rank:], whole, strict=True)]
        y = y.reshape(n, -1, *whole)[_within(*inside)]
        return (y if b is None else y + b.reshape(-1, *(1,) * rank),)


class MaxPool(_Op):
    def _run(self, x: np.ndarray, **how: Any) -> tuple[np.ndarray, ...]:
        windows = _Windows(x, how["kernel_shape"], how, fill=-np.inf)
        numbers = np.arange(x.size).reshape(x.shape)
        places = _Windows(numbers, how["kernel_shape"], how, fill=-1).padded
        best, first = np.full((*x.shape[:2], *windows.out), -np.inf, x.dtype), None
        for _, where in windows.by_offset():
            part, at = windows.padded[where], places[where]
            first = at.copy() if first is None else np.where((part > best) | (first < 0), at, first)
            best = np.maximum(best, part)
        assert first is not None
        return (best, first)[: len(self.onnx_node.output)]


class AveragePool(_Op):
    def _run(self, x: np.ndarray, **how: Any) -> tuple[np.ndarray]:
        windows = _Windows(x, how["kernel_shape"], how)
        # Windows count entries of the input, and its padding with count_include_pad, but not the rest that ceil_mode
        # adds.
        counted = np.zeros((1, 1, *windows.padded.shape[2:]), x.dtype)
        padding = bool(how["count_include_pad"])
        inside = [slice(0, low + n + high) if padding else slice(low, low + n)
                  for n, (low, high) in zip(x.shape[2:], windows.pads, strict=True)]  # fmt: skip
        counted[_within(*inside)] = 1
        sums, total = np.zeros((*x.shape[:2], *windows.out), x.dtype), np.zeros((1, 1, *windows.out), x.dtype)
        for _, where in windows.by_offset():
            sums += windows.padded[where]
            total += counted[where]
        return (sums / total,)


class LRN(_Op):
    def _run(self, x: np.ndarray, alpha: float, beta: float, bias: float, size: int) -> tuple[np.ndarray]:
        before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
        squares = np.pad(x * x, [(0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)])
        total = sum(squares[:, i : i + x.shape[1]] for i in range(size))
        return (x / (bias + alpha / size * total) ** beta,)


class LogSoftmax(_Op):
    def _run(self, x: np.ndarray, axis: int = -1) -> tuple[np.ndarray]:
        """LogSoftmax without underflow: the reference takes the logarithm of Softmax."""
        low = x - x.max(axis, keepdims=True)
        return (low - np.log(np.exp(low).sum(axis, keepdims=True)),)


class MeanVarianceNormalization(_Op):
    def _run(self, x: np.ndarray, axes: list[int] | None = None) -> tuple[np.ndarray]:
        over = tuple(axes or (0, 2, 3))
        deviation = np.sqrt((x * x).mean(over, keepdims=True) - x.mean(over, keepdims=True) ** 2)
        return ((x - x.mean(over, keepdims=True)) / (deviation + 1e-9),)


class LpNormalization(_Op):
    def _run(self, x: np.ndarray, axis: int, p: int) -> tuple[np.ndarray]:
        return (x / np.linalg.norm(x, p, axis, keepdims=True),)


class Erf(_Op):
    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (_erf(x),)


class Gelu(_Op):
    def _run(self, x: np.ndarray, approximate: str | None = None) -> tuple[np.ndarray]:
        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + _erf(x * math.sqrt(0.5))),)


def _erf(x: np.ndarray) -> np.ndarray:
    return np.fromiter(map(math.erf, x.ravel().tolist()), x.dtype, x.size).reshape(x.shape)


class AffineGrid(_Op):
    def _run(self, theta: np.ndarray, size: np.ndarray, align_corners: int = 0) -> tuple[np.ndarray]:
        points = affine_points([int(n) for n in size[2:]], align_corners)
        flat = points.reshape(-1, points.shape[-1]) @ theta.swapaxes(1, 2)
        return (flat.reshape(len(theta), *points.shape[:-1], -1).astype(theta.dtype),)


def affine_points(lengths: Sequence[int], align_corners: int) -> np.ndarray:
    """Return the points that AffineGrid multiplies its parameters by: coordinates from the last axis to the first, then
    1."""
    axes = []
    for n in lengths:
        step = 2 / (n if not align_corners else max(n - 1, 1))
        axes.append(np.arange(n) * step - 1 + (0 if align_corners else step / 2))
    return np.stack([*reversed(np.meshgrid(*axes, indexing="ij")), np.ones(lengths)], -1)


class Einsum(_Op):
    def _run(self, *x: np.ndarray, equation: str) -> tuple[np.ndarray]:
        return (np.asarray(np.einsum(equation, *x, optimize=True)),)


class GatherElements(_Op):
    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
        return (data[_along(indices, axis)],)


class ScatterElements(_Op):
    def _run(
        self, data: np.ndarray, indices: np.ndarray, updates: np.ndarray, axis: int = 0, reduction: str = "none"
    ) -> tuple[np.ndarray]:
        return (_scatter(data, _along(indices, axis), updates, reduction),)


class ScatterND(_Op):
    def _run(
        self, data: np.ndarray, indices: np.ndarray, updates: np.ndarray, reduction: str = "none"
    ) -> tuple[np.ndarray]:
        return (_scatter(data, tuple(np.moveaxis(indices, -1, 0)), updates, reduction),)


def _along(indices: np.ndarray, axis: int) -> Index:
    """Return an index that takes `indices` along one axis and each entry's own position along the others."""
    where: list[Any] = list(np.ogrid[tuple(slice(n) for n in indices.shape)])
    where[axis] = indices
    return tuple(where)


_REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


def _scatter(data: np.ndarray, where: Index, updates: np.ndarray, reduction: str) -> np.ndarray:
    made = data.copy()
    if reduction in _REDUCTIONS:
        _REDUCTIONS[reduction].at(made, where, updates)
    else:
        made[where] = updates
    return made


class Pad(_Op):
    def _run(
        self, x: np.ndarray, pads: np.ndarray, value: np.ndarray | None = None, axes: Any = None, mode: str = "constant"
    ) -> tuple[np.ndarray]:
        """Pad an array; negative pads remove entries."""
        chosen = list(range(x.ndim)) if axes is None else [int(a) for a in axes]
        pairs = [(0, 0)] * x.ndim
        for axis, low, high in zip(chosen, pads[: len(chosen)], pads[len(chosen) :], strict=True):
            pairs[axis] = (int(low), int(high))
        x = x[tuple(slice(max(0, -low), n - max(0, -high)) for n, (low, high) in zip(x.shape, pairs, strict=True))]
        pairs = [(max(0, low), max(0, high)) for low, high in pairs]
        if mode == "constant":
            return (np.pad(x, pairs, constant_values=0 if value is None else value.item()),)
        return (np.pad(x, pairs, mode=mode),)  # type: ignore[call-overload]


class Resize(_Op):
    """Resize one axis after the other, by products with matrices."""

    def _run(self, x: np.ndarray, *given: np.ndarray | None, **how: Any) -> tuple[np.ndarray]:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in self.onnx_node.attribute}
        _, scales, sizes = (*given, None, None, None)[:3]
        listed = attributes.pop("axes", None) or range(x.ndim)
        if attributes.get("coordinate_transformation_mode") == b"tf_crop_and_resize" or (
            attributes.pop("keep_aspect_ratio_policy", b"stretch") != b"stretch"
        ):
            raise NotImplementedError("Resize with cropping or a kept aspect ratio")
        for index, axis in enumerate(listed):
            old = x.shape[axis]
            scale = float(scales[index]) if scales is not None and scales.size else None
            new = int(old * scale) if scale is not None else int(sizes[index])  # type: ignore[index]
            if (old, scale) != (new, None) and scale != 1.0:
                matrix = axis_matrix(attributes, self.run_params["opsets"][""], old, new, scale)
                x = np.moveaxis(np.moveaxis(x, axis, -1) @ matrix.T.astype(x.dtype), -1, axis)
        return (x,)


class _Windows:
    """The windows of a convolution or pooling on an input [N, C, ...], and the padded input.

    Attributes
    ----------
    padded : array
    kernel, out : tuple of int
        Spatial shape of a window, and of all windows.
    pads : list of pair of int
        Padding by axis, without the rest that ceil_mode adds.
    """

    def __init__(
        self,
        x: np.ndarray,
        kernel: Sequence[int],
        how: Mapping[str, Any],
        fill: float = 0.0,
    ) -> None:
        self.kernel, rank = tuple(kernel), len(kernel)
        self._strides, self._dilations = (list(how.get(k) or [1] * rank) for k in ("strides", "dilations"))
        extents = [d * (k - 1) + 1 for d, k in zip(self._dilations, self.kernel, strict=True)]
        self.pads, out, rounded = [], [], []
        for axis, (length, stride, extent) in enumerate(zip(x.shape[2:], self._strides, extents, strict=True)):
            low, high = _pads(how, axis, rank, length, stride, extent)
            count = (length + low + high - extent) // stride + 1
            more = count * stride + extent - length - low - high
            if how.get("ceil_mode") and more < stride and count * stride < length + low:
                count += 1
            self.pads.append((low, high))
            out.append(count)
            rounded.append((low, max(high, (count - 1) * stride + extent - length - low)))
        self.out = tuple(out)
        self.padded = np.pad(x, [(0, 0), (0, 0), *rounded], constant_values=fill) if any(map(any, rounded)) else x

    def by_offset(self) -> Iterator[tuple[Index, Index]]:
        """Yield, for each entry of a window, the index of the entries that all windows read there."""
        for offset in np.ndindex(*self.kernel):
            yield _within(*offset), _reads(offset, self.out, self._strides, self._dilations)

    def by_place(self) -> Iterator[tuple[Index, Index]]:
        """Yield, for each window, the index of the entries that it reads."""
        for place in np.ndindex(*self.out):
            yield _within(*place), _reads(place, self.kernel, self._dilations, self._strides)


def _reads(start: Sequence[int], count: Sequence[int], step: Sequence[int], unit: Sequence[int]) -> Index:
    """Return an index of `count` entries by spatial axis, `step` apart, from ``start * unit`` on."""
    every = zip(start, count, step, unit, strict=True)
    return _within(*(slice(a * u, a * u + (n - 1) * s + 1, s) for a, n, s, u in every))


def _within(*spatial: int | slice) -> Index:
    return (..., *spatial)


def _pads(how: Mapping[str, Any], axis: int, rank: int, length: int, stride: int, extent: int) -> tuple[int, int]:
    mode = how.get("auto_pad") or "NOTSET"
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        total = max(0, (-(-length // stride) - 1) * stride + extent - length)
        small, large = total // 2, total - total // 2
        return (small, large) if mode == "SAME_UPPER" else (large, small)
    given = list(how.get("pads") or []) if mode == "NOTSET" else []
    return (given[axis], given[axis + rank]) if given else (0, 0)


OPS: list[type[OpRun]] = [
    Conv, ConvTranspose, MaxPool, AveragePool, LRN, LogSoftmax, MeanVarianceNormalization, LpNormalization, Erf,
    Gelu, AffineGrid, Einsum, GatherElements, ScatterElements, ScatterND, Pad, Resize,
]  # fmt: skip
