"""One training on many ranks: batches differ, parameters are the same everywhere, to the last bit.

Every rank sums its gradients in one flat buffer, which all ranks add up; then each makes the same update of its own
copy, or, with `zero`, of its share, and hands that to the others::

    rank 0   batch 0 -> gradients --+                      +--> update of share 0 --+
    rank 1   batch 1 -> gradients --+-- sums over ranks -->+--> update of share 1 --+-- parameters
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import numpy.typing as npt
import onnx

from onnx_remat.distributed import collectives
from onnx_remat.distributed.flat import kind_of, layout_of
from onnx_remat.distributed.memory import Memory, Taken, array_of
from onnx_remat.distributed.parts import Parts, prepare_apart
from onnx_remat.distributed.settings import Settings
from onnx_remat.errors import ModelError, OnnxRematError, UsageError
from onnx_remat.ir.naming import GRADIENT, WEIGHT, renewals
from onnx_remat.session import heap, state_file
from onnx_remat.session.interface import Formal, check_state
from onnx_remat.session.session import Session, seed_draws

if TYPE_CHECKING:
    from onnx_remat.ir import model_io
    from onnx_remat.options import PlanningOptions

Array = npt.NDArray[Any]
Batch = Mapping[str, Array]

STEPS = "distributed.steps"
"""Entry of a checkpoint: how many steps were made."""

_SEED = "seed"
"""Input that is fed another number on every rank and in every step."""


@dataclass(slots=True)
class Times:
    """Seconds of the last step: the model, waiting for other ranks, and the update."""

    compute: float = 0.0
    communication: float = 0.0
    update: float = 0.0


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
        whole = onnx.ModelProto.FromString(self.parts.update)
        parameters = layout_of(whole, self.ranks)
        collectives.check_wire(wire, {slot.name: flat.dtype for flat in parameters for slot in flat.slots})
        self._update = self._open_update(whole)
        self._session = self._open(self._dims)
        kinds = {value.name: kind_of(value) for value in whole.graph.input}
        renewed = renewals(kinds, [value.name for value in whole.graph.output]).values()
        shards = self.parts.shards if zero else ()
        self._memory = Memory(self._ranks, parameters, kinds, renewed, shards, self._session, self._update)
        self._unfed = self._memory.adopt(state, fed={WEIGHT, _SEED})

    # Opening

    def _prepared(self, step: model_io.Model, budget: str | int | None, options: PlanningOptions) -> Parts:
        """By the first rank: all are to run the same file, and the others have no memory to spare for a plan."""

        def plan() -> Parts:
            return prepare_apart(step, budget, ranks=self.ranks, zero=self._settings.zero, **options)

        found: Parts = self._ranks.agree(plan, patient=True)
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

    def _open_update(self, whole: onnx.ModelProto) -> Session | None:
        """This rank's update; None where its share is empty."""
        if not self._settings.zero:
            return Session(whole, donate=True, threads=self._threads)
        if len(self.parts.shards) != self.ranks:
            raise UsageError(
                f"the parts are made for {len(self.parts.shards)} shards, and there are {self.ranks} ranks: prepare "
                f"them with ranks={self.ranks}, zero=True"
            )
        mine = self.parts.shards[self.rank].model
        return Session(mine, donate=True, threads=self._threads) if mine else None

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
        for sums in memory.sums:
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
                self._memory.step[array.name] = array_of(array.dtype_name, array.shape)

    def _exchange(self, loss: float, weight: float) -> float:
        """Make gradients the mean over all batches of all ranks, clipped; returns the mean loss."""
        settings, sums = self._settings, self._memory.sums
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
        mine = self._memory.shares(sums)
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
            for parameters in self._memory.weights:
                self._ranks.join_shares(parameters)
        for each in self._memory.statistics:
            if self._settings.buffers == "mean" and each.dtype.kind == "f":
                for wait in self._ranks.sum(each, "", self._settings.bucket):
                    wait()
                collectives.scale(each, 1 / self.ranks)
            else:
                self._ranks.from_rank(each)

    # State

    def state(self) -> dict[str, Array]:
        """Copies of all that steps renew, whole, on every rank; every rank must call it."""
        return {name: array.copy() for name, array in zip(self._memory.renewed, self._memory.each(), strict=True)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all that steps renew to a safetensors file, from the first rank; every rank must call it.

        With `zero`, pieces are collected and written one array at a time.
        """
        if self._failed:
            raise UsageError(f"an earlier step failed midway ({self._failed}): this state is not worth saving")
        self._ranks.doing = f"saving step {self.steps}"
        arrays = chain([np.array([self.steps])], self._memory.each())
        found = None
        try:
            if self.rank == 0:
                state_file.write_each(path, self._kinds(), arrays)
        except OnnxRematError as error:
            found = error
        for _ in arrays:  # the other ranks send their pieces, whether they can be written or not
            pass
        self._ranks.agree(partial(_raise, found))

    def _kinds(self) -> state_file.Kinds:
        return {STEPS: ("int64", (1,)), **self._memory.kinds()}

    def load(self, path: str | os.PathLike[str]) -> None:
        """Go on from what `save` wrote, with any number of ranks; the first reads the file, every rank must call it."""
        self._ranks.doing = f"loading {path}"
        kinds = self._kinds()
        self._ranks.agree(lambda: state_file.check(path, kinds))
        self._failed = "interrupted"
        for name, kind in kinds.items():
            value = array_of(*kind) if self.rank == 0 or name == STEPS else np.empty(0, kind[0])
            self._ranks.agree(partial(state_file.read_one, path, name, value))
            if name == STEPS:
                self._ranks.from_rank(value)
                self.steps = int(value[0])
            else:
                self._memory.set(name, value)
        self._failed = ""

    def taken(self) -> Taken:
        """What this rank has in memory."""
        return self._memory.taken(self._session, self._update)

    def close(self) -> None:
        """Give back both parts' memory."""
        self._session.close()
        if self._update is not None:
            self._update.close()
        heap.trim()


def _threads() -> int:
    """This rank's share of the machine's cores."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _raise(error: OnnxRematError | None) -> None:
    if error is not None:
        raise error


def _copy_renewed(session: Session, made: Mapping[str, Array], arrays: Mapping[str, Array]) -> None:
    """Copy new state that could not be written in place."""
    for output, name in renewals(arrays, made).items():
        if output not in session.donated:
            np.copyto(arrays[name], made[output])
