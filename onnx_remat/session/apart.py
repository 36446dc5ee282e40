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
    furthest, furthest_renewed = (0, ""), (0, "")  # ends of the arrays so far, with their names
    for address, nbytes, name in sorted(spans):
        if not nbytes:
            continue
        end, other = furthest if name in renewed else furthest_renewed
        if address < end:
            raise UsageError(f"the arrays of {other!r} and {name!r} share memory: {instead}")
        furthest = max(furthest, (address + nbytes, name))
        if name in renewed:
            furthest_renewed = max(furthest_renewed, (address + nbytes, name))
