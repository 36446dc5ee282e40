"""Arrays of one type in one flat buffer, one after the other, and the equal slices that ranks own::

    | w ......... | b . | u ....................... | v .... | (padding)
    |      rank 0       |      rank 1       |      rank 2          ...

Offsets of parameters and of slices are multiples of 64 bytes, so that ONNX Runtime reads every part without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx

from onnx_remat.errors import UsageError
from onnx_remat.ir.naming import GRADIENT, NEW
from onnx_remat.session.arrays import BY_BITS, NUMPY
from onnx_remat.session.heap import ALIGNMENT, reserve

Arrays = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Slot:
    """Range of an array in a flat buffer, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Flat:
    """Layout of arrays of one type in a flat buffer.

    Attributes
    ----------
    dtype : str
        numpy's name.
    slots : tuple of Slot
        In ascending order.
    size : int
        Total number of elements; the slice of each rank is a multiple of 64 bytes.
    """

    dtype: str
    slots: tuple[Slot, ...]
    size: int

    @property
    def nbytes(self) -> int:
        return self.size * np.dtype(self.dtype).itemsize

    def reserve(self) -> npt.NDArray[np.generic]:
        """Return a buffer of zeros."""
        return reserve(self.nbytes).view(self.dtype)

    def views(self, buffer: npt.NDArray[np.generic]) -> Arrays:
        """Return views of the arrays in a buffer, by name."""
        return {slot.name: buffer[slot.start : slot.stop].reshape(slot.shape) for slot in self.slots}

    def share(self, rank: int, ranks: int) -> slice:
        """Return the slice of elements that a rank owns."""
        each = self.size // ranks
        return slice(rank * each, (rank + 1) * each)

    def owned(self, rank: int, ranks: int) -> Iterator[tuple[Slot, int, int]]:
        """Yield each array that a rank owns a part of, and the range of this part in the buffer."""
        mine = self.share(rank, ranks)
        for slot in self.slots:
            start, stop = max(slot.start, mine.start), min(slot.stop, mine.stop)
            if start < stop:
                yield slot, start, stop


def lay_out(kinds: Mapping[str, tuple[str, tuple[int, ...]]], ranks: int = 1) -> tuple[Flat, ...]:
    """Lay out arrays in their order, in one flat buffer for each type.

    Parameters
    ----------
    kinds : mapping of str to (str, tuple of int)
        Type and shape by name.
    ranks : int
        Number of slices of each buffer.

    Examples
    --------
    >>> (flat,) = lay_out({"w": ("float32", (3, 5)), "b": ("float32", (3,))}, ranks=2)
    >>> [(slot.name, slot.start, slot.stop) for slot in flat.slots], flat.size
    ([('w', 0, 15), ('b', 16, 19)], 32)
    >>> [(slot.name, start, stop) for slot, start, stop in flat.owned(1, 2)]
    [('b', 16, 19)]
    """
    flats = []
    for dtype in dict.fromkeys(dtype for dtype, _ in kinds.values()):
        unit = ALIGNMENT // np.dtype(dtype).itemsize
        slots, at = [], 0
        for name, (kind, shape) in kinds.items():
            if kind == dtype:
                count = int(np.prod(shape, dtype=np.int64))
                slots.append(Slot(name, shape, at, at + count))
                at += -(-count // unit) * unit
        flats.append(Flat(dtype, tuple(slots), -(-at // (unit * ranks)) * unit * ranks))
    return tuple(flats)


def kind_of(value: onnx.ValueInfoProto) -> tuple[str, tuple[int, ...]]:
    """Return numpy's name of a value's type, and its shape; UsageError for symbolic dimensions."""
    kind = value.type.tensor_type
    if any(not dim.HasField("dim_value") for dim in kind.shape.dim):
        raise UsageError(f"{value.name!r} has symbolic dimensions: state must have a fixed shape")
    name = NUMPY.get(kind.elem_type) or BY_BITS.get(kind.elem_type, "")
    return name, tuple(dim.dim_value for dim in kind.shape.dim)


def layout_of(update: onnx.ModelProto, ranks: int) -> tuple[Flat, ...]:
    """Lay out the parameters whose gradients the update reads, for `ranks` ranks; gradients have the same layout."""
    kinds = {value.name: kind_of(value) for value in update.graph.input}
    renewed = {value.name.removeprefix(NEW) for value in update.graph.output}
    names = [name for name in kinds if name in renewed and GRADIENT + name in kinds]
    return lay_out({name: kinds[name] for name in names}, ranks)
