"""The bytes that are live at each place of a step whose nodes move: merged into groups, joined, computed again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from onnx_remat.fuse.ordered import OrderedStep


class LiveBytes:
    """Nodes at places, and the live bytes at each: the first row counts small values, the second all others.

    `OrderedStep.apart` states which values are small. Subclasses move nodes: they subtract the bytes of the values that
    these make and read, add them again afterwards, and update the savings at all places where values begin or end.

    Parameters
    ----------
    ordered : OrderedStep
    maker : mapping of str to int
        The node that makes each value in memory of its own.
    users : mapping of str to list of int
        The nodes that read each value.
    count : int
        Number of nodes, each at the place of its number at first.
    more : int
        Bytes by which the peak of small values may grow.
    """

    def __init__(
        self, ordered: OrderedStep, maker: Mapping[str, int], users: dict[str, list[int]], count: int, more: int = 0
    ) -> None:
        self.ordered, self.maker, self.users, self.final = ordered, maker, users, ordered.uses.kept
        self.at = list(range(count))  # the place of each node
        self.sizes = {name: nbytes for name in maker if (nbytes := ordered.counted.get(name, 0))}
        self.row = {name: int(ordered.tensors[name].nbytes >= ordered.apart) for name in self.sizes}
        self.live_bytes = np.zeros((2, count), np.int64)
        for name in self.sizes:
            self.add_bytes(name, 1)
        self.saved = [(0, 0)] * count
        self.update_savings(range(count))
        self.peak = self.live_bytes.max(axis=1, initial=0) + np.array([more, 0])

    def span(self, name: str) -> tuple[int, int]:
        """Return the first and the last place at which a value is live."""
        start = self.at[self.maker[name]]
        if name in self.final:
            return start, len(self.at) - 1
        return start, max(map(self.at.__getitem__, self.users[name]), default=start)

    def add_bytes(self, name: str, sign: int) -> None:
        """Add (`sign` 1) or subtract (-1) the bytes of a value at the places where it is live."""
        if name in self.sizes:
            start, end = self.span(name)
            self.live_bytes[self.row[name], start : end + 1] += sign * self.sizes[name]

    def update_savings(self, places: Iterable[int]) -> None:
        """Update, at some places, the bytes of outputs that overwrite inputs which die there."""
        for place in places:
            bytes_by_row = [0, 0]
            for made in self._in_place(place):
                bytes_by_row[self.row[made]] += self.sizes[made]
            saved = bytes_by_row[0], bytes_by_row[1]
            if saved != self.saved[place]:
                self.live_bytes[:, place] += np.subtract(self.saved[place], saved)
                self.saved[place] = saved

    def _in_place(self, place: int) -> Iterator[str]:
        """Yield the outputs at a place that overwrite inputs."""
        running = self.running(place)
        for i, reads, makes in running:
            others = {name for j, read, _ in running if j != i for name in read}
            dying = [
                name for name in reads
                if name in self.sizes and name not in self.final and name not in others and self.span(name)[1] == place
            ]  # fmt: skip
            for made in makes if dying else ():
                over = next((name for name in dying if made in self.sizes and self.may_overwrite(i, made, name)), None)
                if over is not None:
                    dying.remove(over)
                    yield made

    def running(self, place: int) -> Sequence[tuple[int, Iterable[str], Iterable[str]]]:
        """Return what runs at a place: node, values in memory of their own that it reads, values that it makes."""
        step = self.ordered.steps[place]
        return [(place, dict.fromkeys(map(self.ordered.uses.root, step.reads)), step.writes)]

    def may_overwrite(self, node: int, made: str, read: str) -> bool:
        """Whether what runs may write one value over another that it reads."""
        return self.ordered.overwrites(node, made, read)

    def keeps_peak(self) -> bool:
        """Whether no more bytes are live than may be."""
        return bool((self.live_bytes.max(axis=1, initial=0) <= self.peak).all())


def live_bytes(ordered: OrderedStep) -> npt.NDArray[np.int64]:
    """Return the bytes of the slab that are live at each place of a step."""
    maker = {name: i for name, i in ordered.uses.maker.items() if name not in ordered.root}
    live = LiveBytes(ordered, maker, ordered.uses.users, len(ordered.steps))
    both: npt.NDArray[np.int64] = live.live_bytes.sum(axis=0)
    return both
