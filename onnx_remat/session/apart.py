"""Do arrays share memory? A step writes new state over the old: any other array there would change with it."""

from __future__ import annotations

from collections.abc import Container, Iterable

from onnx_remat.errors import UsageError


def check_apart(spans: Iterable[tuple[int, int, str]], renewed: Container[str], instead: str) -> None:
    """Raise UsageError if an array that is to be renewed shares memory with another.

    Parameters
    ----------
    spans : iterable of (int, int, str)
        Address, bytes and name of each array.
    renewed : container of str
        Names of those that are to be renewed.
    instead : str
        What to do instead, for the message.

    Examples
    --------
    >>> check_apart([(0, 100, "a"), (10, 10, "b"), (100, 30, "c")], {"c"}, "")
    >>> check_apart([(0, 100, "a"), (10, 10, "b"), (30, 10, "c")], {"c"}, "pass a copy")
    Traceback (most recent call last):
    onnx_remat.errors.UsageError: the arrays of 'a' and 'c' share memory: pass a copy
    """
    if pair := sharing(spans, renewed):
        raise UsageError(f"the arrays of {pair[0]!r} and {pair[1]!r} share memory: {instead}")


def sharing(spans: Iterable[tuple[int, int, str]], renewed: Container[str]) -> tuple[str, str] | None:
    """Return the first two arrays, by address, that share memory of which at least one is to be renewed.

    The other is the array of those before it that ends last: had an earlier one that is renewed overlapped with that,
    they would have been the first.
    """
    end, last = 0, ""
    for address, nbytes, name in sorted(spans):
        if not nbytes:
            continue
        if address < end and (name in renewed or last in renewed):
            return last, name
        if address + nbytes > end:
            end, last = address + nbytes, name
    return None
