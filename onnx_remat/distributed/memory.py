"""Memory of one rank between steps: flat buffers, views of them, and separate arrays for all other inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_remat.distributed.collectives import Ranks
from onnx_remat.distributed.flat import Flat, lay_out
from onnx_remat.distributed.sharding import Piece, Shard
from onnx_remat.errors import ModelError, UsageError
from onnx_remat.ir.naming import GRADIENT, renewals
from onnx_remat.session import heap
from onnx_remat.session.interface import Formal, checked
from onnx_remat.session.session import Session
from onnx_remat.session.state_file import Kinds

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Taken:
    """Memory of one rank in bytes; `total` is the sum.

    Attributes
    ----------
    parameters, gradients : int
        The two flat buffers.
    optimizer : int
        The rank's optimizer state.
    others : int
        Running statistics, frozen parameters, the batch.
    slabs : int
        Intermediate values of the step and the update.
    weights, workspace : int
        See `Session`; the larger of the two parts' workspaces.
    """

    parameters: int
    gradients: int
    optimizer: int
    others: int
    slabs: int
    weights: int
    workspace: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


class Memory:
    """All inputs of this rank's step and of its update.

    Parameters
    ----------
    ranks : Ranks
    parameters : tuple of Flat
        Layout of parameters and of their gradients.
    whole : mapping
        Types and shapes of the unsharded update's inputs.
    renewed : iterable of str
        Inputs that the update renews.
    shards : tuple of Shard
        Pieces of every rank; empty where every rank has all of the state.
    step, update : Session
        Sessions of this rank; `update` is None where its share is empty.

    Attributes
    ----------
    step, update : dict of str to array
        Inputs by name. An input of both exists once; with shards, parameters and gradients of the update are slices.
    fed : dict of str to array
        Inputs of the unsharded update that batches may feed, such as a learning rate, whether or not this rank's share
        reads them.
    weights, sums, statistics : tuple of array
        The flat buffers of parameters, of their gradients, and of the state that the step itself renews.
    """

    def __init__(
        self,
        ranks: Ranks,
        parameters: tuple[Flat, ...],
        whole: Kinds,
        renewed: Iterable[str],
        shards: tuple[Shard, ...],
        step: Session,
        update: Session | None,
    ) -> None:
        self._ranks, self._parameters, self._whole, self._shards = ranks, parameters, whole, shards
        self._pieces: Mapping[str, Piece] = shards[ranks.rank].pieces if shards else {}
        self._kinds = {array.name: (array.dtype_name, array.shape) for array in step.inputs}
        inputs = (*step.inputs, *(update.inputs if update else ()))
        self._bits = frozenset(array.name for array in inputs if array.formal.bits)
        own = renewals(self._kinds, (array.name for array in step.outputs))
        names = [name for name in own.values() if not name.startswith(GRADIENT)]
        self._buffers = lay_out({name: self._kinds[name] for name in names})
        self.renewed = (*renewed, *(slot.name for each in self._buffers for slot in each.slots))
        self.weights = tuple(each.reserve() for each in parameters)
        self.sums = tuple(each.reserve() for each in parameters)
        self.statistics = tuple(each.reserve() for each in self._buffers)
        views = self._views()
        if odd := next((name for name in self._pieces if name in self._kinds and name not in views), None):
            raise ModelError(
                f"the update does not shard: the step reads all of {odd!r}, which is not a parameter; train "
                "without zero"
            )
        self.step = {name: views[name] if name in views else array_of(*kind) for name, kind in self._kinds.items()}
        slices = self._slices() if shards else views
        self.update: dict[str, Array] = {}
        for array in update.inputs if update else ():
            found = slices.get(array.name, self.step.get(array.name))
            self.update[array.name] = (
                array_of(array.dtype_name, array.shape) if found is None else found.reshape(array.shape)
            )
        divided = {*self.renewed, *(name for shard in shards for name in shard.pieces)}
        read = self.step | self.update
        self.fed: dict[str, Array] = {
            name: read[name] if name in read else array_of(*kind)
            for name, kind in whole.items()
            if name not in divided and not name.startswith(GRADIENT)
        }

    def _views(self) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for each, buffer in zip(self._buffers, self.statistics, strict=True):
            found |= each.views(buffer)
        for each, weights, sums in zip(self._parameters, self.weights, self.sums, strict=True):
            found |= each.views(weights) | {GRADIENT + name: view for name, view in each.views(sums).items()}
        return found

    def _slices(self) -> dict[str, Array]:
        """Return this rank's share of parameters and gradients, as slices of the flat buffers."""
        found: dict[str, Array] = {}
        for each, weights, sums in zip(self._parameters, self.weights, self.sums, strict=True):
            for slot, start, stop in each.owned(self._ranks.rank, self._ranks.count):
                found |= {slot.name: weights[start:stop], GRADIENT + slot.name: sums[start:stop]}
        return found

    def shares(self, arrays: tuple[Array, ...]) -> list[Array]:
        """Return this rank's share of each flat buffer of parameters or gradients; the whole buffer without shards."""
        if not self._shards:
            return list(arrays)
        owned = (each.share(self._ranks.rank, self._ranks.count) for each in self._parameters)
        return [array[share] for array, share in zip(arrays, owned, strict=True)]

    # State

    def adopt(self, state: Mapping[str, Array], filled: set[str]) -> set[str]:
        """Set all ranks to the first rank's state; return the inputs that batches must contain, except `filled` ones.

        Raises
        ------
        UsageError
            State is missing, unknown or of another shape.
        """
        state = dict(checked(self.formals({**self._whole, **self._kinds}), state))
        given = self._ranks.agree(lambda: sorted(state))
        if missing := sorted(set(self.renewed) - set(given)):
            raise UsageError(f"no value for input {missing[0]!r}")
        for name in [name for name in {**self._whole, **self.step} if name in given]:
            self.set(name, state.get(name))
        names = (*self.step, *self.update, *self.fed)
        return {n for n in names if n not in filled and n not in given and not n.startswith(GRADIENT)}

    def formals(self, kinds: Kinds) -> dict[str, Formal]:
        """Return what arrays for inputs of these types and shapes are checked against."""
        return {name: Formal(dtype, shape, name in self._bits) for name, (dtype, shape) in kinds.items()}

    def set(self, name: str, value: Array | None) -> None:
        """Set an input on every rank to the first rank's value."""
        mine, whole = self.update.get(name), (self.step | self.fed).get(name)
        if whole is None and name not in self._pieces:
            whole = mine
        if whole is None:
            whole = array_of(*self._whole[name])  # a large input of which this rank keeps a piece or nothing
        if self._ranks.rank == 0 and value is not None:
            np.copyto(whole, value)
        self._ranks.from_rank(whole)
        if mine is not None and name in self._pieces and name not in self.step:
            piece = self._pieces[name]
            np.copyto(mine.reshape(-1), whole.reshape(-1)[piece.start : piece.stop])

    def kinds(self) -> Kinds:
        """Return types and unsharded shapes of all state that steps renew."""
        found = {**self._whole, **self._kinds}
        return {name: found[name] for name in self.renewed}

    def each(self) -> Iterator[Array]:
        """Yield all state that steps renew, unsharded; ranks send their pieces one after the other."""
        for name in self.renewed:
            if name in self.step:
                yield self.step[name]
            elif not self._shards:
                yield self.update[name]
            else:
                yield self._collected(name)

    def _collected(self, name: str) -> Array:
        whole = array_of(*self._whole[name])
        flat = whole.reshape(-1)
        shards = enumerate(self._shards)
        pieces = {rank: shard.pieces[name] for rank, shard in shards if name in shard.pieces}
        if not pieces:  # a number, on the rank that renews it
            (owner,) = self._ranks.least(self._ranks.rank if name in self.update else self._ranks.count)
            pieces = {owner: Piece(0, flat.size, flat.size)}
        for rank, piece in pieces.items():
            if rank == self._ranks.rank:
                np.copyto(flat[piece.start : piece.stop], self.update[name].reshape(-1))
            self._ranks.from_rank(flat[piece.start : piece.stop], rank)
        return whole

    def taken(self, step: Session, update: Session | None) -> Taken:
        """Return the bytes of this rank by kind, including those of the two sessions."""
        parameters = {slot.name for each in self._parameters for slot in each.slots}
        own = {n: a.nbytes for n, a in self.update.items() if n not in self.step and not n.startswith(GRADIENT)}
        shared = {n: a.nbytes for n, a in self.step.items() if n not in parameters and not n.startswith(GRADIENT)}
        optimizer = sum(nbytes for name, nbytes in own.items() if name in self.renewed)
        others = sum(shared.values()) + sum(own.values()) - optimizer
        return Taken(
            sum(array.nbytes for array in self.weights), sum(array.nbytes for array in self.sums), optimizer, others,
            step.slab_bytes + (update.slab_bytes if update else 0),
            step.weight_bytes + (update.weight_bytes if update else 0),
            max(step.workspace_bytes, update.workspace_bytes if update else 0),
        )  # fmt: skip


def array_of(dtype: str, shape: tuple[int, ...]) -> Array:
    """Return an array of zeros in separate pages."""
    count = int(np.prod(shape, dtype=np.int64))
    return heap.reserve(count * np.dtype(dtype).itemsize).view(dtype).reshape(shape)
