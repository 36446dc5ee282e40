"""Random draws and near ties of a step, recorded and replayed so that torch's reference decides the same.

Random masks differ from run to run. At the kink of a function (ReLU at zero, the winner of a max-pool), rounding may
choose either side, which changes single gradients by far more than rounding itself. During the trace, a `Recorder`
makes the draws, and the inputs of operators with kinks, extra outputs. While torch computes the reference, a `Replay`
substitutes the values of the exported step, after it has checked that they equal torch's except for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from onnx_remat.errors import ConversionError

from . import refusals
from .arrays import tensor
from .private_torch import TorchDispatchMode

aten = torch.ops.aten

_KINKED = (
    "relu", "relu_", "hardtanh", "hardtanh_", "relu6", "leaky_relu", "leaky_relu_", "threshold", "threshold_",
    "hardswish", "hardswish_", "hardsigmoid", "hardsigmoid_", "_prelu_kernel", "hardshrink", "softshrink", "abs",
    "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "max", "min", "amax", "amin", "argmax", "argmin", "sort",
    "topk", "median", "kthvalue", "cummax", "cummin", "sign", "floor", "ceil", "round", "trunc", "gt", "lt", "ge", "le",
    "searchsorted", "bucketize",
    "max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "smooth_l1_loss", "huber_loss", "hinge_embedding_loss", "margin_ranking_loss",
)  # fmt: skip
KINKED = {
    overload
    for name in _KINKED
    if hasattr(aten, name)
    for overload in (getattr(getattr(aten, name), o) for o in getattr(aten, name).overloads())
}
"""Operators whose value or derivative jumps, and the place of the jump."""

_SHARED_AMONG_EQUALS = {
    aten.amax.default, aten.amin.default, aten.max.default, aten.min.default, aten.median.default,
}  # fmt: skip
"""Operators with kinks whose gradient goes to all elements of the input that equal the result."""

Moments = Callable[..., tuple[float, float]]


def _uniform(_: Any = None, low: float = 0.0, high: float = 1.0, **__: Any) -> tuple[float, float]:
    return (low + high) / 2, (high - low) / math.sqrt(12)


def _normal(_: Any = None, mean: float = 0.0, std: float = 1.0, **__: Any) -> tuple[float, float]:
    return mean, std


def _normals(mean: torch.Tensor | float, std: torch.Tensor | float = 1.0, **_: Any) -> tuple[float, float]:
    means, deviations = torch.broadcast_tensors(*(torch.as_tensor(each, dtype=torch.float64) for each in (mean, std)))
    return float(means.mean()), float(deviations.square().mean().sqrt())


def _exponential(_: Any, rate: float = 1.0, **__: Any) -> tuple[float, float]:
    return 1 / rate, 1 / rate


def _coin(_: Any, p: float = 0.5, **__: Any) -> tuple[float, float]:
    return p, math.sqrt(p * (1 - p))


def _coins(p: torch.Tensor, **_: Any) -> tuple[float, float]:
    return float(p.double().mean()), float((p * (1 - p)).double().mean().sqrt())


def _integers(*ends: Any, **_: Any) -> tuple[float, float]:
    *low, high = ends[:-1]  # the last is the shape
    span = high - sum(low)
    return sum(low) + (span - 1) / 2, math.sqrt((span * span - 1) / 12)


def _kept(_: Any, p: float, __: Any = True) -> tuple[float, float]:
    return 1 - p, math.sqrt(p * (1 - p))


def _order(n: int, **_: Any) -> tuple[float, float]:
    return (n - 1) / 2, math.sqrt((n * n - 1) / 12)


def _places(weights: torch.Tensor, *_: Any, **__: Any) -> tuple[float, float]:
    shares = weights.double() / weights.double().sum(-1, keepdim=True)
    places = torch.arange(weights.shape[-1], dtype=torch.float64)
    mean = shares @ places
    spread = shares @ places.square() - mean.square()
    return float(mean.mean()), float(spread.mean().sqrt())


DRAWS: dict[Any, Moments] = {
    aten.native_dropout.default: _kept,
    aten.bernoulli.p: _coin,
    aten.bernoulli_.float: _coin,
    aten.bernoulli.default: _coins,
    aten.randint.default: _integers,
    aten.randint.low: _integers,
    aten.rand.default: lambda *_, **__: _uniform(),
    aten.rand_like.default: lambda *_, **__: _uniform(),
    aten.randn.default: lambda *_, **__: _normal(),
    aten.randn_like.default: lambda *_, **__: _normal(),
    aten.uniform.default: _uniform,
    aten.uniform_.default: _uniform,
    aten.normal_.default: _normal,
    aten.normal_functional.default: _normal,
    aten.normal.Tensor_float: _normals,
    aten.normal.float_Tensor: _normals,
    aten.normal.Tensor_Tensor: _normals,
    aten.normal.float_float: lambda mean, std, *_, **__: (mean, std),
    aten.exponential_.default: _exponential,
    aten.randperm.default: _order,
    aten.multinomial.default: _places,
}
"""Random operators: mean and standard deviation of an element, from the operator's arguments."""


class Watch(TorchDispatchMode):
    """A mode that sees every operator, except inside `paused`."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore the operators inside the context."""
        outer, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = outer


class Recorder(Watch):
    """Collect copies of random draws and of the inputs of operators with kinks, in order.

    Attributes
    ----------
    seen : list of torch.Tensor
    lines : dict of str to str
        For each operator, the line of the user's code that first ran it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []
        self.lines: dict[str, str] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._paused:
            return func(*args, **(kwargs or {}))
        if str(func) not in self.lines:
            self.lines[str(func)] = refusals.here()
        if func in KINKED:
            self.seen.extend(tensor.clone() for tensor in _floats(args))
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.is_complex():
            raise refusals.ComplexNumbers(func)
        if func in DRAWS:
            self.seen.append((made[1] if isinstance(made, tuple) else made).clone())
        elif torch.Tag.nondeterministic_seeded in func.tags:
            raise ConversionError(
                f"{func} draws random numbers as no graph can{refusals.here()}: draw with torch.rand, torch.randn, "
                "torch.bernoulli, torch.randint or a Dropout"
            )
        return made


class Replay(Watch):
    """Replace random draws and inputs of operators with kinks by the values of the exported step."""

    def __init__(self, values: Iterable[np.ndarray], tolerance: Mapping[str, float]) -> None:
        super().__init__()
        self._values: Iterator[np.ndarray] = iter(values)
        self._tolerance = tolerance

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func in KINKED:
            args = self._replaced(func, args)
        if func not in DRAWS:
            return func(*args, **kwargs)
        drawn, _ = self._next()
        _plausible(func, drawn, DRAWS[func](*args, **kwargs))
        if func is aten.native_dropout.default:
            x, p = args[0], args[1]
            return x * drawn * (1 / (1 - p) if p < 1 else 0.0), drawn
        if func._schema.name.endswith("_"):
            return args[0].copy_(drawn)
        return drawn.to(func(*args, **kwargs).dtype)

    def _next(self) -> tuple[torch.Tensor, float]:
        """Return the next value of the exported step, and the largest difference allowed from torch's."""
        value = next(self._values, None)
        if value is None:
            raise ConversionError("torch decides or draws more often than the converted step: they cannot be compared")
        return tensor(value), self._tolerance.get(value.dtype.name, 0.0)

    def _replaced(self, func: Any, args: Sequence[Any]) -> list[Any]:
        made = list(args)
        in_place = func._schema.name.endswith("_")
        for index, own in enumerate(args):
            if isinstance(own, torch.Tensor) and own.is_floating_point():
                theirs, allowed = self._next()
                if torch.float64 in (own.dtype, theirs.dtype):  # the reference may have a wider dtype than the step
                    theirs = theirs.to(own.dtype)
                _compare(func, own, theirs, allowed)
                if func in _SHARED_AMONG_EQUALS:  # torch keeps its own input for the gradient: both must be equal
                    made[index] = own.copy_(theirs) if 0 not in own.stride() else own
                else:
                    made[index] = own.copy_(theirs) if in_place and index == 0 else theirs
        return made


def _compare(func: Any, own: torch.Tensor, theirs: torch.Tensor, allowed: float) -> None:
    if own.shape != theirs.shape or own.dtype != theirs.dtype:
        raise ConversionError(f"the converted step is wrong: {func} reads another tensor than in torch")
    if own.numel():
        scale, error = own.abs().max(), (own - theirs).abs().nan_to_num(0, 0, 0).max()
        if error > allowed * scale:
            by = f"{float(error / scale):.2g} relative" if scale else f"{float(error):.2g} where torch has zeros"
            raise ConversionError(
                f"the converted step is wrong: what {func} reads differs from torch's by {by}; nothing was written"
            )


def _floats(args: Sequence[Any]) -> list[torch.Tensor]:
    return [x for x in args if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _plausible(func: Any, drawn: torch.Tensor, moments: tuple[float, float]) -> None:
    """Raise ConversionError unless the sample mean is within six standard errors of the distribution's."""
    mean, deviation = moments
    if drawn.numel() and abs(float(drawn.double().mean()) - mean) > 6 * deviation / math.sqrt(drawn.numel()) + 1e-6:
        raise ConversionError(f"the converted step is wrong: {func} draws from another distribution than in torch")
