"""What both tree searches of `layout` share: sections, the answer, restarts.

Steps at which a subset of a neighbour's buffers is live add no constraint. The remaining steps are the *sections*, the
maximal cliques of the interval graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnx_remat.memory.problem import Longs
from onnx_remat.process.compiled import compiled


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a search: offsets, a proof that there are none, or neither."""

    offsets: Longs | None
    impossible: bool


def sections(lower: Longs, upper: Longs, size: Longs) -> tuple[Longs, Longs, Longs]:
    """Compress lifetimes to sections; the same buffers overlap.

    Returns
    -------
    first, last : int64 (n_buffers,)
        Buffer b lives in the sections first[b] .. last[b] - 1.
    live : int64 (n_sections,)
        Sum of the sizes that live in each.
    """
    n = len(lower)
    when = np.concatenate([upper, lower])
    begins = np.repeat([False, True], n)
    order = np.lexsort((begins, when))  # at the same step, ends precede begins
    begins = begins[order]
    # A section ends at the first end after a begin.
    closes = np.append(False, begins[:-1]) & ~begins
    number = np.empty(2 * n, np.int64)
    number[order] = np.cumsum(closes)
    last, first = number[:n], number[n:]
    live = np.zeros(int(last.max()) + 1, np.int64)
    np.add.at(live, first, size)
    np.subtract.at(live, last, size)
    return first, last, np.cumsum(live)[:-1]


def members(first: Longs, last: Longs, numbers: Longs) -> Longs:
    """Return the numbers of the buffers of each section, one section after the other, in the order of the arguments."""
    lasts = last - first
    ends = np.cumsum(lasts)
    section = np.arange(ends[-1]) + np.repeat(first - ends + lasts, lasts)
    small = section.astype(np.min_scalar_type(int(last.max())))  # NumPy uses a radix sort for 16 bits or fewer
    return np.repeat(numbers, lasts)[np.argsort(small, kind="stable")]


@compiled
def highest(first, last, live):  # type: ignore[no-untyped-def]
    """Return the largest of `live` within each lifetime."""
    out = np.zeros(len(first), np.int64)
    for b in range(len(first)):
        for s in range(first[b], last[b]):
            out[b] = max(out[b], live[s])
    return out


def luby(i: int) -> int:
    """Return the i-th term (from 1) of Luby's sequence 1, 1, 2, 1, 1, 2, 4, ..."""
    while (i + 1) & i:
        i -= (1 << (i.bit_length() - 1)) - 1
    return (i + 1) // 2
