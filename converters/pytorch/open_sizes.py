"""Sizes of open dimensions for which a step is another than the traced one.

Python code that decides by a size (``if x.shape[0] > 8``) is traced for the example's. torch notes each such decision
as a condition on symbols; those of torch's own kernels, which give the same results either way, do not count. A size of
one is never traced, since torch takes it as fixed: the forward pass runs once with it, without data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch

from .private_torch import ShapeEnv
from .refusals import line_of

OtherSizes: TypeAlias = dict[str, dict[int, str]]
"""For each dimension, the sizes of another step, and why, in words."""

_INSIDE = tuple(f"{Path(torch.__file__).parent}/{name}" for name in ("_", "autograd", "fx", "utils", "functional"))
"""Torch's code that decides by sizes without an effect on results."""


def decided(
    env: ShapeEnv,
    traced: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
    dynamic: Mapping[str, Mapping[int, str]],
) -> OtherSizes:
    """Return the sizes up to the example's for which a condition of the trace is false.

    A condition on several dimensions is tried with the example's sizes of the others.

    Parameters
    ----------
    env
        The conditions of the trace.
    traced
        Inputs of the trace by name, whose sizes are symbols.
    sizes
        The example's size of each dimension.
    dynamic
        Names of dimensions by input name and axis.
    """
    symbols: dict[Any, str] = {}
    for name, axes in dynamic.items():
        for axis, dim in axes.items():
            size = traced[name].shape[axis]
            if isinstance(size, torch.SymInt):
                symbols[size.node.expr] = dim
    found: OtherSizes = {}
    for condition, place in _conditions(env):
        inside = [symbol for symbol in condition.free_symbols if symbol in symbols]
        if len(inside) < len(condition.free_symbols):
            continue
        for dim in {symbols[symbol] for symbol in inside}:
            for size in range(1, sizes[dim] + 1):
                tried = {s: size if symbols[s] == dim else sizes[symbols[s]] for s in inside}
                if str(condition.subs(tried)) == "False":
                    found.setdefault(dim, {}).setdefault(size, f"its code decides by the size{place}")
    return found


def _conditions(env: ShapeEnv) -> Iterator[tuple[Any, str]]:
    """Yield the conditions that count, and the lines of code that made them, in words."""
    for guard in env.guards:
        frame: Any = guard.sloc.framework_loc
        condition = env.replace(guard.expr)
        if getattr(frame, "filename", "").startswith(_INSIDE) or not condition.free_symbols:
            continue
        yield condition, line_of(frame.filename, frame.lineno) if hasattr(frame, "filename") else ""


def of_one(dims: Mapping[str, int], forward: Callable[[str | None], list[int]]) -> OtherSizes:
    """Return the dimensions for which a size of one is another step.

    Parameters
    ----------
    dims
        Dimensions, and the example's sizes.
    forward
        Function that runs the forward pass with a size of one for a dimension, and returns the ranks of squeezed
        tensors.
    """
    found: OtherSizes = {}
    squeezed = forward(None) if dims else []
    for dim in dims:
        try:
            if forward(dim) != squeezed:
                found[dim] = {1: "its code removes dimensions of size one (squeeze)"}
        except Exception as error:
            found[dim] = {1: f"its code fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return found
