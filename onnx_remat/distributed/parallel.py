"""One training on many ranks: batches differ, parameters are the same everywhere, to the last bit.

Every rank sums its gradients in one flat buffer, which all ranks add up; then each makes the same update of its own
copy, or, with `zero`, of its share, and hands that to the others::

    rank 0   batch 0 -> gradients --+                      +--> update of share 0 --+
    rank 1   batch 1 -> gradients --+-- sums over ranks -->+--> update of share 1 --+-- parameters
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import numpy.typing as npt
import onnx

from onnx_remat.distributed import collectives
from onnx_remat.distributed.flat import Flat, kind_of, lay_out, layout_of
from onnx_remat.distributed.parts import Parts, prepare_apart
from onnx_remat.distributed.sharding import Piece
from onnx_remat.errors import ModelError, OnnxRematError, UsageError
from onnx_remat.ir.naming import GRADIENT, WEIGHT, renewals
from onnx_remat.run import heap, state_file
from onnx_remat.run.interface import Formal, check_state
from onnx_remat.run.session import Session, seed_draws

if TYPE_CHECKING:
    from onnx_remat.ir import model_io
    from onnx_remat.options import PlanningOptions

Array = npt.NDArray[Any]
Batch = Mapping[str, Array]

STEPS = "distributed.steps"
"""Entry of a checkpoint: how many steps were made."""

_SEED = "seed"
"""Input that is fed another number on every rank and in every step."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How ranks work together; see `DataParallel`."""

    zero: bool = False
    clip_norm: float | None = None
    wire: str = ""
    buffers: str = "first"
    bucket: int = 25 * 2**20
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.buffers not in ("first", "mean"):
            raise UsageError(f"buffers are those of the 'first' rank or the 'mean', not {self.buffers!r}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UsageError(f"clip_norm must be above 0, not {self.clip_norm}")
        if self.seed is not None and not isinstance(self.seed, Integral):
            raise UsageError(f"seed is a whole number, not {self.seed!r}")
        if self.bucket < 1:
            raise UsageError(f"bucket is a number of bytes above 0, not {self.bucket}")


@dataclass(frozen=True, slots=True)
class Taken:
    """What one rank has in memory, in bytes; `total` is the sum.

    Attributes
    ----------
    parameters, gradients : int
        The two flat buffers.
    optimizer : int
        The rank's own state of the optimizer.
    others : int
        Running statistics, frozen parameters, the batch.
    slabs : int
        Intermediate values of the step and the update.
    weights, workspace : int
        As of `Session`; the larger one of the two parts' workspaces.
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


@dataclass(slots=True)
class Times:
    """Seconds of the last step: the model, waiting for other ranks, and the update."""

    compute: float = 0.0
    communication: float = 0.0
    update: float = 0.0


@dataclass(frozen=True, slots=True)
class _Memory:
    """Everything that lies in this rank's memory between steps, by name."""

    parameters: tuple[Flat, ...]
    buffers: tuple[Flat, ...]
    flat: Mapping[str, tuple[Array, ...]] = field(default_factory=dict)
    step: dict[str, Array] = field(default_factory=dict)
    update: dict[str, Array] = field(default_factory=dict)


class DataParallel:
    """A training step on all ranks of a job, each with batches of its own.

    Parameters
    ----------
    step : path, bytes, onnx.ModelProto or Parts
        A whole training step; or what `prepare` made of it.
    state : mapping of str to array
        Parameters, optimizer state, and all else that is no batch. Those of rank 0 are everybody's.
    budget : str or int, optional
        Of each rank, see `prepare`, which the first rank calls.
    threads : int
        Of one op; 0 shares the cores among the ranks that ``torchrun`` started on this machine.
    zero : bool
        Keep of the optimizer's state a share on every rank (ZeRO-1).
    clip_norm : float, optional
        Scale gradients, averaged over all, to this norm at most, as `torch.nn.utils.clip_grad_norm_`.
    wire : str
        Type in which gradients are sent, ``"bfloat16"`` for instance; their own by default.
    buffers : str
        Running statistics after a step: those of the ``"first"`` rank, as torch's DistributedDataParallel has it, or
        the ``"mean"``.
    bucket : int
        Bytes of gradients that are sent at once.
    seed : int, optional
        Seeds random ops without a seed of their own, by rank, and the integer input ``seed``, if there is one, by rank
        and step.
    **options
        Fields of `Options`, for the plan: `dims`, sizes of symbolic dimensions; `loss`, the output that `step` returns.

    Attributes
    ----------
    rank, ranks : int
    steps : int
        Made so far, those before a checkpoint among them.
    times : Times
    parts : Parts

    Raises
    ------
    UsageError
        There is no job, or state is missing, unknown or of another shape.
    RankLostError
        Another rank has ended or does not answer. Any method that talks to others raises it.
    """

    def __init__(
        self,
        step: model_io.Model | Parts,
        state: Mapping[str, Array],
        *,
        budget: str | int | None = None,
        threads: int = 0,
        zero: bool = False,
        clip_norm: float | None = None,
        wire: str = "",
        buffers: str = "first",
        bucket: int = 25 * 2**20,
        seed: int | None = None,
        **options: Unpack[PlanningOptions],
    ) -> None:
        self._settings = Settings(zero, clip_norm, wire, buffers, bucket, seed)
        self._ranks = collectives.Ranks()
        self.rank, self.ranks = self._ranks.rank, self._ranks.count
        self._ranks.check_same("how ranks work together", asdict(self._settings) | {"seed": seed})
        self.parts = step if isinstance(step, Parts) else self._prepared(step, budget, options)
        if seed is not None:
            seed_draws(seed + self.rank)
        self._loss, self._threads = options.get("loss") or "loss", threads or _threads()
        self._dims = dict(options.get("dims") or {})
        self.steps, self.times, self._failed = 0, Times(), ""
        self._update, self._pieces = self._open_update()
        self._session = self._open(self._dims)
        self._memory = self._reserve(state)
        self._adopt(state)

    # Opening

    def _prepared(self, step: model_io.Model, budget: str | int | None, options: PlanningOptions) -> Parts:
        """By the first rank: all are to run the same file, and the others have no memory to spare for a plan."""

        def plan() -> Parts:
            return prepare_apart(step, budget, ranks=self.ranks, zero=self._settings.zero, **options)

        found: Parts = self._ranks.agree(plan)
        return found

    def _open(self, dims: Mapping[str, int]) -> Session:
        session = Session(self.parts.gradients, dims=dims, donate=True, threads=self._threads)
        if lacking := next((o for o, why in session.not_donated.items() if o.startswith("new." + GRADIENT)), None):
            raise ModelError(f"{lacking!r} is not summed in place: {session.not_donated[lacking]}")
        if WEIGHT not in (array.name for array in session.inputs):
            raise UsageError(
                "the step does not sum its gradients: make it with prepare, or onnx-remat split --accumulate"
            )
        return session

    def _open_update(self) -> tuple[Session | None, Mapping[str, Piece]]:
        """This rank's update, and which pieces it has of what."""
        update = onnx.ModelProto.FromString(self.parts.update)
        self._parameters = layout_of(update, self.ranks)
        collectives.check_wire(self._settings.wire, {s.name: f.dtype for f in self._parameters for s in f.slots})
        self._whole = {value.name: kind_of(value) for value in update.graph.input}
        self._renewed = renewals(self._whole, [value.name for value in update.graph.output])
        if not self._settings.zero:
            return Session(update, donate=True, threads=self._threads), {}
        if len(self.parts.shards) != self.ranks:
            raise UsageError(
                f"the parts are made for {len(self.parts.shards)} shards, and there are {self.ranks} ranks: prepare "
                f"them with ranks={self.ranks}, zero=True"
            )
        mine = self.parts.shards[self.rank]
        session = Session(mine.model, donate=True, threads=self._threads) if mine.model else None
        return session, mine.pieces

    def _reserve(self, state: Mapping[str, Array]) -> _Memory:
        """Memory for everything: flat buffers, and an array of its own for whatever else is an input."""
        kinds = {array.name: (array.dtype_name, array.shape) for array in self._session.inputs}
        own = renewals(kinds, (array.name for array in self._session.outputs))
        names = [name for name in own.values() if not name.startswith(GRADIENT)]
        memory = _Memory(self._parameters, lay_out({name: kinds[name] for name in names}))
        flat = {
            "parameters": tuple(each.reserve() for each in memory.parameters),
            "gradients": tuple(each.reserve() for each in memory.parameters),
            "buffers": tuple(each.reserve() for each in memory.buffers),
        }
        arrays: dict[str, Array] = {}
        for each, buffer in zip(memory.buffers, flat["buffers"], strict=True):
            arrays |= each.views(buffer)
        for each, weights, sums in zip(memory.parameters, flat["parameters"], flat["gradients"], strict=True):
            arrays |= each.views(weights) | {GRADIENT + name: view for name, view in each.views(sums).items()}
        if odd := next((name for name in self._pieces if name in kinds and name not in arrays), None):
            raise ModelError(f"the update does not shard: the step reads {odd!r}, which is no parameter, as a whole")
        formals = {name: Formal(*kind) for name, kind in (self._whole | kinds).items()}
        check_state(formals, state)
        step = {name: arrays[name] if name in arrays else _array(*kind) for name, kind in kinds.items()}
        slices = self._slices(memory, flat) if self._settings.zero else arrays
        update: dict[str, Array] = {}
        for array in self._update.inputs if self._update else ():
            found = slices.get(array.name, step.get(array.name))
            update[array.name] = _array(array.dtype_name, array.shape) if found is None else found.reshape(array.shape)
        return _Memory(memory.parameters, memory.buffers, flat, step, update)

    def _slices(self, memory: _Memory, flat: Mapping[str, tuple[Array, ...]]) -> dict[str, Array]:
        """This rank's share of parameters and gradients, as slices of the flat buffers."""
        found: dict[str, Array] = {}
        for each, weights, sums in zip(memory.parameters, flat["parameters"], flat["gradients"], strict=True):
            for slot, start, stop in each.owned(self.rank, self.ranks):
                found |= {slot.name: weights[start:stop], GRADIENT + slot.name: sums[start:stop]}
        return found

    def _adopt(self, state: Mapping[str, Array]) -> None:
        """Take over the first rank's state; what is not given must be part of every batch."""
        given = self._ranks.agree(lambda: sorted(state))
        needed = {*self._renewed.values(), *(slot.name for each in self._memory.buffers for slot in each.slots)}
        if missing := sorted(needed - set(given)):
            raise UsageError(f"no value for input {missing[0]!r}")
        for name in [name for name in self._whole | self._memory.step if name in given]:
            self._set(name, state.get(name))
        fed = {*given, WEIGHT, _SEED, *(name for name in self._memory.step if name.startswith(GRADIENT))}
        self._unfed = {name for name in (*self._memory.step, *self._memory.update) if name not in fed} - {
            name for name in self._memory.update if name.startswith(GRADIENT)
        }

    def _set(self, name: str, value: Array | None) -> None:
        """Set an input on every rank to what the first one has."""
        whole = self._memory.step.get(name)
        mine = self._memory.update.get(name)
        if whole is None and name not in self._pieces and mine is not None:
            whole = mine
        kind = self._whole.get(name)
        if whole is None:
            assert kind is not None
            whole = _array(*kind)  # a large one of which this rank keeps a piece, or nothing
        if self.rank == 0 and value is not None:
            np.copyto(whole, value)
        self._ranks.from_rank(whole)
        if mine is not None and name in self._pieces and name not in self._memory.step:
            piece = self._pieces[name]
            np.copyto(mine.reshape(-1), whole.reshape(-1)[piece.start : piece.stop])

    # Training

    def step(self, batch: Batch | Sequence[Batch] | None, weight: float | Sequence[float] | None = None) -> float:
        """One update, from one batch of every rank or several; returns the loss, averaged over all of them.

        Parameters
        ----------
        batch : mapping of str to array, or a sequence of such, or None
            Inputs by name; of several, gradients are summed. None where this rank has none left.
        weight : float or sequence of float, optional
            What each batch counts in the averages of gradients and losses, 1 by default: the number of its rows, where
            ranks or batches differ in that. It must be given for batches of another size than `dims`.

        Raises
        ------
        UsageError
            A batch does not fit, no rank has any, or an earlier step failed.
        """
        if self._failed:
            raise UsageError(f"an earlier step failed midway ({self._failed}): load a checkpoint first")
        batches = [] if batch is None else [batch] if isinstance(batch, Mapping) else list(batch)
        weights = [1.0] * len(batches) if weight is None else np.broadcast_to(weight, len(batches)).tolist()
        if not all(0 <= each < float("inf") for each in weights):
            raise UsageError(f"weights must be numbers from 0 on, not {weights}")
        self._ranks.doing = f"making step {self.steps + 1}"
        self._failed = "interrupted"
        try:
            start = time.perf_counter()
            loss = self._gradients(batches, weights, given=weight is not None)
            computed = time.perf_counter()
            loss = self._exchange(loss, sum(weights))
            exchanged = time.perf_counter()
            self._renew()
            updated = time.perf_counter()
            self._join()
        except Exception as error:
            unchanged = isinstance(error, UsageError) and not batches
            self._failed = "" if unchanged else (str(error).splitlines() or [type(error).__name__])[0][:200]
            raise
        self._failed, self.steps = "", self.steps + 1
        communication = exchanged - computed + time.perf_counter() - updated
        self.times = Times(computed - start, communication, updated - exchanged)
        return loss

    def _gradients(self, batches: Sequence[Batch], weights: Sequence[float], given: bool) -> float:
        """Sum the gradients of some batches; returns the sum of their losses, weighed."""
        memory, loss = self._memory, 0.0
        for sums in memory.flat["gradients"]:
            sums.fill(0)
        for number, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            self._feed(batch, given)
            memory.step[WEIGHT][...] = weight
            if self._settings.seed is not None and _SEED in memory.step:
                draw = (self.steps * self.ranks + self.rank) * len(batches) + number
                memory.step[_SEED][...] = self._settings.seed + draw
            self._session.execute(memory.step)
            made = self._session.results(copy=False)
            loss += weight * float(made[self._loss].item())
            _copy_renewed(self._session, made, memory.step)
        return loss

    def _feed(self, batch: Batch, given: bool) -> None:
        memory = self._memory
        dims = self._dims_of(batch)
        if dims != self._dims:
            if not given:
                raise UsageError(
                    f"a batch of another size ({', '.join(f'{k}={v}' for k, v in dims.items())}): pass weight, the "
                    "number of its rows"
                )
            self._resize(dims)
        kinds = {name: Formal(array.dtype.name, array.shape) for name, array in (memory.update | memory.step).items()}
        check_state(kinds, batch)
        for name, array in batch.items():
            np.copyto(memory.step[name] if name in memory.step else memory.update[name], array)
        if unfed := self._unfed - set(batch):
            raise UsageError(f"no value for input {min(unfed)!r}: what is no state is part of every batch")
        self._unfed -= set(batch) - set(memory.step)  # what the update alone reads, a learning rate say, stays

    def _dims_of(self, batch: Batch) -> dict[str, int]:
        """Sizes of symbolic dimensions that a batch has."""
        odd = [n for n, a in batch.items() if n in self._memory.step and np.shape(a) != self._memory.step[n].shape]
        if not odd:
            return self._dims
        found = dict(self._dims)
        model = onnx.ModelProto.FromString(self.parts.gradients)
        for value in model.graph.input:
            sizes = np.shape(batch[value.name]) if value.name in odd else ()
            for dim, size in zip(value.type.tensor_type.shape.dim, sizes, strict=False):
                if dim.HasField("dim_param"):
                    found[dim.dim_param] = size
        return found

    def _resize(self, dims: dict[str, int]) -> None:
        """Open the step for batches of another size; the old one is given back first."""
        self._session.close()
        self._session, self._dims = self._open(dims), dims
        for array in self._session.inputs:
            if self._memory.step[array.name].shape != array.shape:
                self._memory.step[array.name] = _array(array.dtype_name, array.shape)

    def _exchange(self, loss: float, weight: float) -> float:
        """Make gradients the mean over all batches of all ranks, clipped; returns the mean loss."""
        settings, sums = self._settings, self._memory.flat["gradients"]
        waiting: list[Callable[[], None]] = []
        for each in sums:
            if settings.zero:
                self._ranks.sum_shares(each, settings.wire)
            else:
                waiting += self._ranks.sum(each, settings.wire, settings.bucket)
        loss, weight = self._ranks.totals(loss, weight)
        for wait in waiting:
            wait()
        if not weight > 0:
            raise UsageError("no rank has a batch left, or the weights add up to nothing: the epoch is over")
        mine = [
            each[flat.share(self.rank, self.ranks)] if settings.zero else each
            for each, flat in zip(sums, self._parameters, strict=True)
        ]
        factor = 1 / weight
        if settings.clip_norm is not None:
            squares = sum(map(collectives.square_sum, mine))
            squares = self._ranks.totals(squares)[0] if settings.zero else squares
            factor *= min(1.0, settings.clip_norm / (squares**0.5 / weight + 1e-6))
        for each in mine:
            collectives.scale(each, factor)
        return loss / weight

    def _renew(self) -> None:
        if self._update is not None:
            self._update.execute(self._memory.update)
            _copy_renewed(self._update, self._update.results(copy=False), self._memory.update)

    def _join(self) -> None:
        """Parameters from those who renewed them, running statistics from the first rank or as a mean."""
        if self._settings.zero:
            for parameters in self._memory.flat["parameters"]:
                self._ranks.join_shares(parameters)
        for each in self._memory.flat["buffers"]:
            if self._settings.buffers == "mean" and each.dtype.kind == "f":
                for wait in self._ranks.sum(each, "", self._settings.bucket):
                    wait()
                collectives.scale(each, 1 / self.ranks)
            else:
                self._ranks.from_rank(each)

    # State

    def state(self) -> dict[str, Array]:
        """Copies of all that steps renew, whole, on every rank; every rank must call it."""
        return {name: array.copy() for name, array in self._each()}

    def _names(self) -> list[str]:
        buffers = [slot.name for each in self._memory.buffers for slot in each.slots]
        return [*self._renewed.values(), *buffers]

    def _each(self) -> Iterator[tuple[str, Array]]:
        """Name and value of each piece of state, whole; with `zero`, sent by those who have it, one after the other."""
        for name in self._names():
            if name in self._memory.step:
                yield name, self._memory.step[name]
            elif not self._settings.zero:
                yield name, self._memory.update[name]
            else:
                yield name, self._collected(name)

    def _collected(self, name: str) -> Array:
        dtype, shape = self._whole[name]
        whole = _array(dtype, shape)
        flat = whole.reshape(-1)
        shards = enumerate(self.parts.shards)
        pieces = {rank: shard.pieces[name] for rank, shard in shards if name in shard.pieces}
        if not pieces:  # a number: whoever renews it has it
            owner = int(self._ranks.least(self.rank if name in self._memory.update else self.ranks))
            pieces = {owner: Piece(0, flat.size, flat.size)}
        for rank, piece in pieces.items():
            if rank == self.rank:
                np.copyto(flat[piece.start : piece.stop], self._memory.update[name].reshape(-1))
            self._ranks.from_rank(flat[piece.start : piece.stop], rank)
        return whole

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all that steps renew to a safetensors file, from the first rank; every rank must call it.

        With `zero`, pieces are collected and written one array at a time.
        """
        if self._failed:
            raise UsageError(f"an earlier step failed midway ({self._failed}): this state is not worth saving")
        self._ranks.doing = f"saving step {self.steps}"
        arrays = self._all()
        found = None
        try:
            if self.rank == 0:
                state_file.write(path, _Streamed(self._kinds(), arrays))
        except OnnxRematError as error:
            found = error
        for _ in arrays:  # the other ranks send their pieces, whether they can be written or not
            pass
        self._ranks.agree(partial(_raise, found))

    def _all(self) -> Iterator[Array]:
        yield np.array([self.steps])
        for _, array in self._each():
            yield array

    def _kinds(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        step = {name: (array.dtype.name, array.shape) for name, array in self._memory.step.items()}
        return {STEPS: ("int64", (1,))} | {name: (self._whole | step)[name] for name in self._names()}

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from what `save` wrote, with any number of ranks; the first reads the file, every rank must call it."""
        self._ranks.doing = f"loading {path}"
        kinds = self._kinds()
        self._ranks.agree(lambda: state_file.check(path, _Streamed(kinds, iter(()))))
        self._failed = "interrupted"
        for name, kind in kinds.items():
            value = _array(*kind) if self.rank == 0 or name == STEPS else np.empty(0, kind[0])
            self._ranks.agree(partial(state_file.read_one, path, name, value))
            if name == STEPS:
                self._ranks.from_rank(value)
                self.steps = int(value[0])
            else:
                self._set(name, value)
        self._failed = ""

    def taken(self) -> Taken:
        """What this rank has in memory."""
        memory, step, update = self._memory, self._session, self._update
        flat = {kind: sum(array.nbytes for array in arrays) for kind, arrays in memory.flat.items()}
        parameters = {slot.name for each in memory.parameters for slot in each.slots}
        renewed = set(self._renewed.values())
        own = {n: a.nbytes for n, a in memory.update.items() if n not in memory.step and not n.startswith(GRADIENT)}
        shared = {n: a.nbytes for n, a in memory.step.items() if n not in parameters and not n.startswith(GRADIENT)}
        optimizer = sum(nbytes for name, nbytes in own.items() if name in renewed)
        others = sum(shared.values()) + sum(own.values()) - optimizer
        return Taken(
            flat["parameters"], flat["gradients"], optimizer, others,
            step.slab_bytes + (update.slab_bytes if update else 0),
            step.weight_bytes + (update.weight_bytes if update else 0),
            max(step.workspace_bytes, update.workspace_bytes if update else 0),
        )  # fmt: skip

    def close(self) -> None:
        """Give back both parts' memory."""
        self._session.close()
        if self._update is not None:
            self._update.close()
        heap.trim()


def _threads() -> int:
    """This rank's share of the machine's cores."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _array(dtype: str, shape: tuple[int, ...]) -> Array:
    """Zeros in pages of their own."""
    count = int(np.prod(shape, dtype=np.int64))
    return heap.reserve(count * np.dtype(dtype).itemsize).view(dtype).reshape(shape)


def _raise(error: OnnxRematError | None) -> None:
    if error is not None:
        raise error


def _copy_renewed(session: Session, made: Mapping[str, Array], arrays: Mapping[str, Array]) -> None:
    """Copy new state that could not be written in place."""
    for output, name in renewals(arrays, made).items():
        if output not in session.donated:
            np.copyto(arrays[name], made[output])


class _Streamed(dict[str, Array]):
    """Arrays for a file: types and shapes at once, values one by one when they are written."""

    def __init__(self, kinds: Mapping[str, tuple[str, tuple[int, ...]]], values: Iterator[Array]) -> None:
        zero = {name: np.zeros((), dtype) for name, (dtype, _) in kinds.items()}
        super().__init__({name: np.broadcast_to(zero[name], shape) for name, (_, shape) in kinds.items()})
        self._values = values

    def values(self) -> Iterator[Array]:  # type: ignore[override]
        return self._values
