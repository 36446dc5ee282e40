"""Numbers in an optimizer's step that stay tensors in a trace: those that it reads from tensors, and settings."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from onnx_remat.errors import ConversionError

_CASTS = ("__bool__", "__int__", "__float__", "__index__")
"""Methods that make Python values of tensors, some of them through ``item``."""


@contextmanager
def numbers_stay_tensors(
    optimizer: torch.optim.Optimizer,
    settings: Iterable[torch.Tensor] = (),
    stored: Iterable[tuple[torch.Tensor, torch.dtype]] = (),
) -> Iterator[None]:
    """Let ``min``, ``max`` and ``math`` take tensors in the module of the optimizer's step; see `_Scalars`."""
    space = inspect.unwrap(type(optimizer).step).__globals__
    stand_ins = {"min": _choice(min, torch.minimum), "max": _choice(max, torch.maximum), "math": _Math()}
    before = {name: space[name] for name in stand_ins if name in space}
    usable = {n: v for n, v in stand_ins.items() if before.get(n, math) is math}  # keeps the user's own functions
    space.update(usable)
    try:
        with without_bfloat16(optimizer.state.values()), _Scalars(type(optimizer).__qualname__, settings, stored):
            yield
    finally:
        for name in usable:
            if name in before:
                space[name] = before[name]
            else:
                del space[name]


def _choice(builtin: Callable[..., Any], of_tensors: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return a ``min`` or ``max`` that also takes zero-dimensional tensors."""

    def choose(*values: Any, **options: Any) -> Any:
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if len(values) < 2 or not tensors:
            return builtin(*values, **options)
        chosen, *others = (torch.as_tensor(value, dtype=tensors[0].dtype) for value in values)
        for value in others:
            chosen = of_tensors(chosen, value)
        return chosen

    return choose


class _Math:
    """Stand-in for ``math`` whose functions also take tensors if torch has a function of that name."""

    def __getattr__(self, name: str) -> Any:
        plain = getattr(math, name)
        of_tensors = getattr(torch, name, None)
        if not callable(plain) or of_tensors is None:
            return plain

        def function(*values: Any) -> Any:
            return (of_tensors if isinstance(values[0], torch.Tensor) else plain)(*values)

        return function


def without_bfloat16(state: Iterable[Mapping[str, Any]]) -> AbstractContextManager[Any]:
    """Return a context in which an optimizer's step uses float32 for bfloat16, unless it keeps state in bfloat16."""
    pieces = [value for slots in state for value in slots.values()]
    keeps = any(isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 for value in pieces)
    return nullcontext() if keeps else _WithoutBfloat16()


class _WithoutBfloat16(TorchFunctionMode):
    """Replace bfloat16 that a step uses for speed (Muon) by float32, since few CPU kernels support it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        requested = func.__name__ == "bfloat16" or (
            func.__name__ == "to" and any(value is torch.bfloat16 for value in (*args, *(kwargs or {}).values()))
        )  # traced tensors have a separate method for each
        if requested and args[0].dtype == torch.float32:
            return args[0].clone()
        return func(*args, **(kwargs or {}))


_IN_PLACE = {f"{name}_" for name in ("add", "sub", "mul", "div")} | {
    f"__i{n}__" for n in ("add", "sub", "mul", "truediv")
}
"""Names of torch's methods that change a number in place."""


class _Scalars(TorchFunctionMode):
    """A mode in which tensors replace Python numbers in an optimizer's step.

    Numbers read from tensors stay tensors. Settings that are inputs count as nonzero: torch's optimizers test them for
    zero only to skip work that has no effect at zero. In-place changes of `stored` tensors, which are wider than the
    user's, keep the user's precision: the product of NAdam's momenta is float32 in a float64 step.
    """

    def __init__(
        self, kind: str, settings: Iterable[torch.Tensor], stored: Iterable[tuple[torch.Tensor, torch.dtype]]
    ) -> None:
        super().__init__()
        self._kind = kind
        self._settings = list(settings)
        self._stored = {id(tensor): (tensor, dtype) for tensor, dtype in stored}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.__name__ in ("ne", "__ne__") and any(args[0] is known for known in self._settings):
            return True
        if func is torch.Tensor.item and sys._getframe(1).f_code.co_name not in _CASTS:
            return args[0].reshape(())
        if func.__name__ in ("item", *_CASTS):
            raise ConversionError(
                f"the step of optimizer {self._kind} decides by the value of a tensor ({_line()}): a graph cannot; "
                "write it with torch.where, or export without an optimizer and update the parameters yourself"
            )
        if func.__name__ in ("pow", "__pow__") and args[1:] == (0.5,):
            return args[0].sqrt()  # kernels compute it, and no other power of a single number
        wide = bool(args) and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64
        kinds = (torch.Tensor, float) if wide else torch.Tensor  # torch's exporter would round a number to float32
        factor = next((kwargs.pop(k) for k in ("value", "alpha") if isinstance(kwargs.get(k), kinds)), None)
        if factor is None:
            if func.__name__ in _IN_PLACE and id(args[0]) in self._stored:
                return self._changed(func, args)
            return func(*args, **kwargs)
        first, *rest = args
        change = rest[0] / rest[1] if "addcdiv" in func.__name__ else rest[0] * rest[1] if len(rest) > 1 else rest[0]
        by = change * factor
        sign = -1 if "sub" in func.__name__ else 1
        return first.add_(sign * by) if func.__name__.endswith("_") else first + sign * by

    def _changed(self, func: Any, args: tuple[Any, ...]) -> torch.Tensor:
        """Return the result of an in-place change of a number, which torch computes in the number's dtype."""
        tensor, dtype = self._stored[id(args[0])]
        rest = (value.to(dtype) if isinstance(value, torch.Tensor) else value for value in args[1:])
        return tensor.copy_(func(tensor.to(dtype), *rest))


def _line() -> str:
    """Return the current line of the optimizer."""
    frames = [frame for frame in inspect.stack()[2:] if not frame.filename.endswith(("overrides.py", "_tensor.py"))]
    frame = next(frame for frame in frames if "torch/" not in frame.filename or "torch/optim" in frame.filename)
    return f"{frame.filename}:{frame.lineno}"
