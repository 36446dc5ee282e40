"""Conditions on open dimensions, under which a step is the traced one.

Python code that decides by a size (``if x.shape[0] > 8``) is traced for the example's. torch notes each such decision
as a condition on symbols; those of torch's own kernels, which give the same results either way, do not count. A size of
one is never traced, since torch takes it as fixed: the forward pass runs once with it, without data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .conditions import Condition
from .private_torch import Mod, PythonPrinter, ShapeEnv
from .refusals import line_of
from .repeated import Listing

_INSIDE = tuple(f"{Path(torch.__file__).parent}/{name}" for name in ("_", "autograd", "fx", "utils", "functional"))
"""Torch's code that decides by sizes without an effect on results."""


def decided(
    env: ShapeEnv, traced: Mapping[str, torch.Tensor], dynamic: Mapping[str, Mapping[int, str]]
) -> list[Condition]:
    """Return the conditions of a trace.

    Parameters
    ----------
    env
        The conditions of the trace.
    traced
        Inputs of the trace by name, whose sizes are symbols.
    dynamic
        Names of dimensions by input name and axis.
    """
    symbols: dict[Any, str] = {}
    for name, axes in dynamic.items():
        for axis, dim in axes.items():
            size = traced[name].shape[axis]
            if isinstance(size, torch.SymInt):
                symbols[size.node.expr] = dim
    of_dim = {dim: symbol for symbol, dim in symbols.items()}
    found = []
    for condition, place in _conditions(env, {symbol: of_dim[dim] for symbol, dim in symbols.items()}):
        inside = {str(symbol): dim for symbol, dim in symbols.items() if symbol in condition.free_symbols}
        if len(inside) == len(condition.free_symbols):
            sizes = "size" if len(inside) == 1 else "sizes"
            reason = f"its code decides by the {sizes}{place}"
            found.append(Condition(PythonPrinter().doprint(condition), inside, reason))
    return found


def _conditions(env: ShapeEnv, merged: Mapping[Any, Any]) -> Iterator[tuple[Any, str]]:
    """Yield the different conditions that count, and the lines of code that made them, in words.

    `merged` has one symbol for each dimension. What must divide a size counts in torch's code, too: a view needs it.
    """
    seen = set()
    for guard in env.guards:
        frame: Any = guard.sloc.framework_loc
        condition = env.replace(guard.expr).xreplace(dict(merged))
        is_torchs = getattr(frame, "filename", _INSIDE[0]).startswith(_INSIDE)
        if (is_torchs and not condition.has(Mod)) or condition in seen:
            continue
        seen.add(condition)
        if condition.free_symbols:
            yield condition, "" if is_torchs else line_of(frame.filename, frame.lineno)


def of_one(dims: Collection[str], forward: Callable[[str | None], Listing]) -> list[Condition]:
    """Return a condition for each dimension for which a size of one is another step.

    Parameters
    ----------
    dims
        Names of dimensions.
    forward
        Function that runs the forward pass with a size of one for a dimension, and returns its calls.
    """
    reasons: dict[str, str] = {}
    usual = forward(None) if dims else None
    for dim in dims:
        try:
            other = forward(dim)
        except Exception as error:
            reasons[dim] = f"its code fails: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        assert usual is not None
        if other.squeezed != usual.squeezed:
            reasons[dim] = "its code removes dimensions of size one (squeeze)"
        elif (line := _differs(_by_line(usual), _by_line(other))) is not None:
            reasons[dim] = f"its code decides by the size{line}"
    return [Condition("size != 1", {"size": dim}, reason) for dim, reason in reasons.items()]


_PRODUCTS = {"addmm", "baddbmm", "bmm", "dot", "mm", "mv"}
"""Products of matrices, among which torch's code chooses by the sizes, with the same results."""

_MOVES = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "clone", "detach", "empty", "empty_strided", "expand",
    "permute", "reshape", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind",
    "unsqueeze", "view",
}  # fmt: skip
"""Operators that move data alone, some of them not at all for a size of one."""


def _by_line(listing: Listing) -> dict[tuple[str, str], Counter[str]]:
    """Return the operators that compute, by module and line of the user's code."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for name, _, module, line in listing.calls:
        space, operator, _ = name.split(".", 2)
        if operator not in _MOVES and space != "prim":
            found.setdefault((module, line), Counter())[operator] += 1
    return found


def _differs(
    usual: Mapping[tuple[str, str], Counter[str]], other: Mapping[tuple[str, str], Counter[str]]
) -> str | None:
    """Return the first line that one run alone has, or at which other operators run; None if there is none."""
    for module, line in {**usual, **other}:
        one, two = (each.get((module, line), Counter()) for each in (usual, other))
        if not one or not two or (one != two and not _PRODUCTS & (one | two).keys()):
            return line or f" in module {module!r}"
    return None
