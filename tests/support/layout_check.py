"""Validator of a finished slab layout; it shares no code with the layout search."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import ArrayLike


def check_layout(lower: ArrayLike, upper: ArrayLike, size: ArrayLike, offsets: ArrayLike) -> None:
    """Sweep over time and compare every buffer that starts with its neighbours in memory.

    Parameters
    ----------
    lower, upper : int (n_buffers,)
        A buffer lives in [lower, upper).
    size, offsets : int (n_buffers,)
        It occupies the bytes [offset, offset + size).

    Raises
    ------
    ValueError
        If the arrays differ in length, an offset is negative, or two live buffers share a byte; the message names them.
    """
    columns = (lower, upper, size, offsets)
    lowers, uppers, sizes, places = (np.asarray(column, np.int64).tolist() for column in columns)
    if not len(lowers) == len(uppers) == len(sizes) == len(places):
        raise ValueError(f"{len(places)} offsets for {len(lowers)} lifetimes")
    events = [(lowers[b], 1, b) for b in range(len(places)) if sizes[b] > 0]
    events += [(uppers[b], 0, b) for b in range(len(places)) if sizes[b] > 0]
    alive: list[tuple[int, int]] = []  # (offset, buffer) of the live buffers, sorted by offset
    for when, begins, b in sorted(events):
        if not begins:
            alive.pop(bisect_left(alive, (places[b], b)))
            continue
        if places[b] < 0:
            raise ValueError(f"buffer {b} has the negative offset {places[b]}")
        at = bisect_left(alive, (places[b], b))
        for _, other in alive[max(0, at - 1) : at + 1]:
            if places[other] < places[b] + sizes[b] and places[b] < places[other] + sizes[other]:
                raise ValueError(f"buffers {min(b, other)} and {max(b, other)} share memory at step {when}")
        insort(alive, (places[b], b))
