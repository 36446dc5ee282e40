"""Sessions of one step for batches of several sizes, side by side in the slab of the largest."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from onnx_remat.errors import UsageError
from onnx_remat.session.session import Session

from .. import shares
from .batch import Batch
from .conditions import failed
from .preparation import Prepared

OPEN = 4
"""Sessions of other sizes than the example's that stay open: each has ONNX Runtime's bookkeeping of its own."""


@dataclass(frozen=True, slots=True)
class Written:
    """The step as a file, in a temporary folder of its own, and its open dimensions."""

    folder: tempfile.TemporaryDirectory[str]
    dynamic: Mapping[str, Mapping[int, str]]

    @property
    def path(self) -> Path:
        return Path(self.folder.name) / "step.onnx"

    def sizes(self, batch: Batch) -> dict[str, int]:
        """Return the size of each open dimension in a batch."""
        found: dict[str, int] = {}
        for name, tensor in zip(batch.names, batch.tensors, strict=True):
            for axis, dim in self.dynamic.get(name, {}).items():
                size = tensor.shape[axis] if axis < tensor.dim() else 0
                if found.setdefault(dim, size) != size:
                    raise UsageError(f"axis {axis} of {name} is {size}, where {dim} is {found[dim]} elsewhere")
        return found


class Sessions:
    """The sessions of a written step; `current` is that of the sizes that were asked for last.

    Parameters
    ----------
    written : Written
    most : dict of str to int
        Size of each open dimension in the example, the largest that a batch may have.
    threads : int
    provider : str
    prepared : Prepared
        For the memory that a session on a device may take, and the conditions on sizes.
    """

    def __init__(self, written: Written, most: dict[str, int], threads: int, provider: str, prepared: Prepared) -> None:
        self._written, self._most, self._threads = written, most, threads
        self._provider, self._limit = provider, 0 if provider == "cpu" else prepared.limit
        self._conditions = prepared.conditions
        self._largest = self.current = self._opened(most, None)
        self._others: dict[tuple[int, ...], Session] = {}

    def use(self, sizes: dict[str, int]) -> Session:
        """Return the session for these sizes, which has the slab of the largest; open it first if it is not.

        Raises
        ------
        UsageError
            A size is above the example's, or the model's code makes another step for these sizes.
        """
        if large := [name for name, size in sizes.items() if size > self._most[name]]:
            name = large[0]
            raise UsageError(f"{name} is {sizes[name]}, above the example's {self._most[name]}: make a new step")
        if condition := failed(self._conditions, sizes):
            given = " and ".join(f"{dim} is {sizes[dim]}" for dim in condition.dims.values())
            example = " and ".join(str(self._most[dim]) for dim in condition.dims.values())
            raise UsageError(
                f"{given}, for which the model's step is another than for the example's {example} "
                f"({condition.reason}): leave such batches out (drop_last=True), or make a new step"
            )
        if sizes == self._most:
            self.current = self._largest
            return self.current
        key = tuple(sizes[name] for name in self._most)
        session = self._others.pop(key, None) or self._opened(sizes, self._largest)
        self.current = self._others[key] = session  # the last in order
        if len(self._others) > OPEN:
            self._others.pop(next(iter(self._others))).close()
        return session

    def close(self) -> None:
        """Free the memory of all of them."""
        for session in (self._largest, *self._others.values()):
            session.close()

    def _opened(self, sizes: Mapping[str, int], slab_of: Session | None) -> Session:
        try:
            return Session(
                self._written.path, self._provider, dims=sizes, donate=True, threads=self._threads, slab_of=slab_of,
                memory_limit=self._limit,
            )  # fmt: skip
        except UsageError as error:
            raise UsageError(shares.in_budgeted(error.message)) from None
