"""Data parallel training: batches differ between ranks, parameters are bit-identical on all of them.

Every rank sums its gradients in one flat buffer, which is summed over all ranks. Each rank then applies the same update
to its own copy of the parameters, or, with `zero`, to its share, which it sends to the others::

    rank 0   batch 0 -> gradients --+                      +--> update of share 0 --+
    rank 1   batch 1 -> gradients --+-- sums over ranks -->+--> update of share 1 --+-- parameters
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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
from onnx_remat.ir import graph as graphs
from onnx_remat.ir.naming import GRADIENT, WEIGHT, renewals
from onnx_remat.ir.op_semantics import semantics
from onnx_remat.messages import Setting
from onnx_remat.session import heap, state_file
from onnx_remat.session.arrays import BY_BITS
from onnx_remat.session.interface import check_loss, checked
from onnx_remat.session.session import Session, seed_draws
from onnx_remat.units import check_threads

if TYPE_CHECKING:
    from onnx_remat.ir import model_io
    from onnx_remat.options import PlanningOptions

Array = npt.NDArray[Any]
Batch = Mapping[str, Array]

STEPS = "distributed.steps"
"""Entry of a checkpoint with the number of steps."""

_SEED = "seed"
"""Input that gets a different number on every rank, in every step and for every batch of it."""

_STEPS_BITS = 24  # of that number; those above count a rank's batches in a step


@dataclass(slots=True)
class Times:
    """Seconds of the last step: the model, communication with other ranks, and the update."""

    compute: float = 0.0
    communication: float = 0.0
    update: float = 0.0


class DataParallel:
    """A training step on all ranks of a job, each with its own batches.

    Parameters
    ----------
    step : path, bytes, onnx.ModelProto or Parts
        A whole training step, or the result of `prepare`.
    state : mapping of str to array
        Parameters, optimizer state, and all other inputs that are not part of a batch; all ranks use those of rank 0.
    budget : str or int, optional
        Memory budget of each rank, see `prepare`, which the first rank calls.
    threads : int
        Intra-op threads; 0 shares the cores among the ranks that ``torchrun`` started on this machine.
    zero : bool
        Shard the optimizer state over the ranks (ZeRO-1).
    clip_norm : float, optional
        Upper limit on the norm of the averaged gradients, as in `torch.nn.utils.clip_grad_norm_`.
    wire : str
        Type in which gradients are sent, for example ``"bfloat16"``; by default their own.
    buffers : str
        Running statistics after a step: those of the ``"first"`` rank, as in torch's DistributedDataParallel, or the
        ``"mean"``.
    bucket : int
        Bytes of gradients per message.
    seed : int, optional
        Seeds random ops without a seed of their own, by rank, and the integer input ``seed``, if there is one, by rank
        and step.
    **options
        Fields of `Options`, for the plan: `dims`, sizes of symbolic dimensions; `loss`, the output that `step` returns.

    Attributes
    ----------
    rank, ranks : int
        Rank of this process, and number of ranks.
    steps : int
        Number of steps so far, including those before a loaded checkpoint.
    times : Times
    parts : Parts

    Raises
    ------
    UsageError
        torch.distributed is not initialized, or state is missing, unknown or of another shape.
    RankLostError
        Another rank has ended or does not respond. Every method that communicates may raise it.
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
        threads = check_threads(threads)
        self._settings = Settings(zero, clip_norm, wire, buffers, bucket, seed)
        self._ranks = collectives.Ranks()
        self.rank, self.ranks = self._ranks.rank, self._ranks.count
        self._ranks.check_same("the settings of the job", asdict(self._settings) | {"seed": seed})
        if isinstance(step, Parts):
            _check_unplanned({"budget": budget, **options})
        self.parts = step if isinstance(step, Parts) else self._prepared(step, budget, options)
        if seed is not None:
            seed_draws(seed + self.rank)
        self._loss, self._threads = options.get("loss") or self.parts.loss, threads or _threads()
        self.steps, self.times, self._failed = 0, Times(), ""
        whole = onnx.ModelProto.FromString(self.parts.update)
        if self.ranks > 1:
            _check_same_draws(whole)
        parameters = layout_of(whole, self.ranks)
        collectives.check_wire(wire, {slot.name: flat.dtype for flat in parameters for slot in flat.slots})
        self._update = self._open_update(whole)
        self._session = self._open(options.get("dims") or {})
        self._formal = next(array for array in self._session.outputs if array.name == self._loss)
        self._dims = _sizes(self.parts.gradients, {array.name: array.shape for array in self._session.inputs})
        self._planned_dims = self._dims
        kinds = {value.name: kind_of(value) for value in whole.graph.input}
        renewed = renewals(kinds, [value.name for value in whole.graph.output]).values()
        shards = self.parts.shards if zero else ()
        self._memory = Memory(self._ranks, parameters, kinds, renewed, shards, self._session, self._update)
        formal = self._memory.step.get(_SEED)
        self._seeded = seed is not None and formal is not None and formal.dtype.kind in "iu"
        self._unfed = self._memory.adopt(state, {WEIGHT, _SEED} if self._seeded else {WEIGHT})
        self._optional = {*self._session.defaults, *(tensor.name for tensor in whole.graph.initializer)}

    # Opening

    def _prepared(self, step: model_io.Model, budget: str | int | None, options: PlanningOptions) -> Parts:
        """Plan on the first rank: all ranks must run the same file, and planning takes memory on one rank only."""

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
                "the step does not sum its gradients: create it with prepare, or onnx-remat split --accumulate"
            )
        check_loss({array.name: array.formal for array in session.outputs}, self._loss)
        if self._settings.buffers == "mean":
            _check_means(session)
        return session

    def _open_update(self, whole: onnx.ModelProto) -> Session | None:
        """Open this rank's update; return None where its share is empty."""
        if not self._settings.zero:
            return Session(whole, donate=True, threads=self._threads)
        if len(self.parts.shards) != self.ranks:
            raise UsageError(
                f"the parts have {len(self.parts.shards)} shards, but the job has {self.ranks} ranks: prepare them "
                f"with ranks={self.ranks}, zero=True"
            )
        mine = self.parts.shards[self.rank].model
        return Session(mine, donate=True, threads=self._threads) if mine else None

    # Training

    def step(self, batch: Batch | Sequence[Batch] | None, weight: float | Sequence[float] | None = None) -> float:
        """Make one update from one or several batches of every rank; return the average loss over all batches.

        Parameters
        ----------
        batch : mapping of str to array, or a sequence of such, or None
            Inputs by name; gradients of several batches are accumulated. None where this rank has no batch left. Inputs
            of the update alone, such as a learning rate, are those of the first rank that feeds them, and are kept.
        weight : float or sequence of float, optional
            Weight of each batch in the averages of gradients and losses, 1 by default: its number of rows, where
            batches differ in size. Required for batches of another size than `dims`, and then on all ranks.

        Raises
        ------
        UsageError
            A batch does not fit, no rank has a batch, or an earlier step failed.
        """
        self._check_whole()
        batches = [] if batch is None else [batch] if isinstance(batch, Mapping) else list(batch)
        weights = [1.0] * len(batches) if weight is None else np.asarray(weight, float).ravel().tolist()
        weights *= len(batches) if len(weights) == 1 else 1
        if len(weights) != len(batches):
            raise UsageError(f"{len(batches)} batches need as many weights, or one for all, not {len(weights)}")
        if not all(0 <= each < float("inf") for each in weights):
            raise UsageError(f"weights must be finite numbers of at least 0, not {weights}")
        self._ranks.doing = f"making step {self.steps + 1}"
        self._failed = "interrupted"
        try:
            start = time.perf_counter()
            loss = self._gradients(batches, weights, given=weight is not None)
            computed = time.perf_counter()
            loss = self._exchange(loss, sum(weights), batches, weighted=bool(batches) and weight is not None)
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
        """Sum the gradients of some batches; return the weighted sum of their losses."""
        memory, loss = self._memory, 0.0
        for sums in memory.sums:
            sums.fill(0)
        for number, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            self._feed(batch, given)
            memory.step[WEIGHT][...] = weight
            if self._seeded:
                assert self._settings.seed is not None
                draw = self.steps * self.ranks + self.rank + (number << _STEPS_BITS)
                memory.step[_SEED][...] = (self._settings.seed + draw) & np.iinfo(memory.step[_SEED].dtype).max
            unfed = self._unfed - set(batch)  # these have their defaults
            with self._session.lock:
                self._session.execute({name: array for name, array in memory.step.items() if name not in unfed})
                made = self._session.results(copy=False)
                loss += weight * self._formal.number(made[self._loss])
                _copy_renewed(self._session, made, memory.step)
        return loss

    def _feed(self, batch: Batch, given: bool) -> None:
        memory = self._memory
        dims = self._dims_of(batch)
        if dims != self._planned_dims and not given:
            raise UsageError(
                f"the batch has another size ({', '.join(f'{k}={v}' for k, v in dims.items())}): pass its number of "
                "rows as weight"
            )
        if dims != self._dims:
            self._resize(dims)
        arrays = memory.update | memory.fed | memory.step
        formals = memory.formals({name: (array.dtype.name, array.shape) for name, array in arrays.items()})
        for name, array in dict(checked(formals, batch)).items():  # all are checked before one is copied
            np.copyto(arrays[name], array)
        if unfed := self._unfed - self._optional - set(batch):
            raise UsageError(f"no value for input {min(unfed)!r}: pass it as state or in every batch")
        self._unfed -= set(batch) & memory.fed.keys()  # the update reads it once for all batches, and it is kept

    def _dims_of(self, batch: Batch) -> dict[str, int]:
        """Return the sizes of symbolic dimensions in a batch."""
        step = self._memory.step
        odd = {n: np.shape(a) for n, a in batch.items() if n in step and np.shape(a) != step[n].shape}
        return {**self._dims, **_sizes(self.parts.gradients, odd)} if odd else self._dims

    def _resize(self, dims: dict[str, int]) -> None:
        """Open the step for batches of another size, after closing the old session."""
        self._session.close()
        try:
            self._session = self._open(dims)
        except Exception:
            self._session = self._open(self._dims)
            raise
        self._dims = dims
        for array in self._session.inputs:
            if self._memory.step[array.name].shape != array.shape:
                if array.name in self._memory.renewed:
                    raise UsageError(
                        f"state {array.name!r}, which the step renews, varies with the batch: pass batches of one size"
                    )
                self._memory.step[array.name] = array_of(array.dtype_name, array.shape)
                self._unfed.add(array.name)  # a value from `state` is of the other size

    def _exchange(self, loss: float, weight: float, batches: Sequence[Batch], weighted: bool) -> float:
        """Average gradients over all batches of all ranks and clip them; return the mean loss.

        Gradients that are sent in another precision are divided by the mean weight of a rank before, so that their sums
        are of the size of a gradient.
        """
        settings, sums = self._settings, self._memory.sums
        fed = self._memory.fed.keys() & set(chain.from_iterable(batches))
        loss, weight, have, weigh, feed = self._ranks.totals(loss, weight, bool(batches), weighted, bool(fed))
        if not weight > 0:
            raise UsageError("no rank has a batch, or all weights are 0: end the epoch")
        if 0 < weigh < have:
            raise UsageError("some ranks weight their batches and others do not: pass weight on every rank")
        if feed:
            self._share_fed(fed)
        divided = bool(settings.wire)
        for each in sums if divided else ():
            collectives.scale(each, self.ranks / weight)
        waiting: list[Callable[[], None]] = []
        for each in sums:
            if settings.zero:
                self._ranks.sum_shares(each, settings.wire)
            else:
                waiting += self._ranks.sum(each, settings.wire, settings.bucket)
        for wait in waiting:
            wait()
        mine = self._memory.shares(sums)
        of_norm = float(self.ranks) if divided else weight
        factor = 1 / of_norm
        if settings.clip_norm is not None:
            squares = sum(map(collectives.square_sum, mine))
            squares = self._ranks.totals(squares)[0] if settings.zero else squares
            # NaN stays NaN, as in torch's clip_grad_norm_: Python's min would return 1
            factor *= float(np.minimum(1.0, settings.clip_norm / (squares**0.5 / of_norm + 1e-6)))
        for each in mine:
            collectives.scale(each, factor)
        return loss / weight

    def _share_fed(self, fed: Collection[str]) -> None:
        """Let an input of the update alone, such as a learning rate, be that of the first rank that feeds it.

        Every rank updates parameters by the same numbers, whether or not it has a batch.
        """
        names = sorted(self._memory.fed)
        sources = self._ranks.least(*(self.rank if name in fed else self.ranks for name in names))
        for name, source in zip(names, sources, strict=True):
            if source < self.ranks:
                self._ranks.from_rank(self._memory.fed[name], source)
                self._unfed.discard(name)

    def _renew(self) -> None:
        if self._update is not None:
            given = {name: array for name, array in self._memory.update.items() if name not in self._unfed}
            self._update.execute(given)
            _copy_renewed(self._update, self._update.results(copy=False), self._memory.update)

    def _join(self) -> None:
        """Exchange renewed parameters, and running statistics from the first rank or as a mean."""
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

    def _check_whole(self) -> None:
        """Raise UsageError after a step that renewed some state and not the rest."""
        if self._failed:
            raise UsageError(f"an earlier step failed midway ({self._failed}): load a checkpoint first")

    def state(self) -> dict[str, Array]:
        """Return copies of all state that steps renew, unsharded; every rank must call this.

        Raises
        ------
        UsageError
            An earlier step failed.
        """
        self._check_whole()
        return {name: array.copy() for name, array in zip(self._memory.renewed, self._memory.each(), strict=True)}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all state that steps renew to a safetensors file on the first rank; every rank must call this.

        With `zero`, pieces are collected and written one array at a time.
        """
        self._check_whole()
        self._ranks.doing = f"saving step {self.steps}"
        arrays = chain([np.array([self.steps])], self._memory.each())
        found = None
        try:
            if self.rank == 0:
                state_file.write_each(path, self._kinds(), arrays)
        except OnnxRematError as error:
            found = error
        for _ in arrays:  # the other ranks send their pieces even if the first cannot write them
            pass
        self._ranks.agree(partial(_raise, found))

    def _kinds(self) -> state_file.Kinds:
        return {STEPS: ("int64", (1,)), **self._memory.kinds()}

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load a checkpoint of `save`, from any number of ranks; the first rank reads it, all must call this."""
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
        """Return the memory of this rank."""
        return self._memory.taken(self._session, self._update)

    def close(self) -> None:
        """Free the memory of step and update."""
        self._session.close()
        if self._update is not None:
            self._update.close()
        heap.trim()


def _check_unplanned(given: Mapping[str, object]) -> None:
    """Raise UsageError where parts, which are prepared, are given with options for their plan."""
    planned = [name for name, value in given.items() if value is not None and name not in ("dims", "loss")]
    if planned:
        raise UsageError("{} has no effect on parts: pass it to prepare", Setting(planned[0]))


def _check_same_draws(update: onnx.ModelProto) -> None:
    """Raise UsageError where ranks would renew parameters by random numbers of their own."""
    for op in graphs.build(update).ops:
        seeded = any(attribute.name == "seed" for attribute in op.node.attribute)
        if semantics(op.node.domain, op.node.op_type).random and not seeded:
            raise UsageError(
                f"node {op.label!r} ({op.node.op_type}) of the update would draw other numbers on every rank: give it "
                "a seed, or make its output an input"
            )


def _check_means(session: Session) -> None:
    """Raise UsageError for running statistics of which numpy has only the bits."""
    renewed = renewals((array.name for array in session.inputs), (array.name for array in session.outputs))
    for array in session.outputs:
        if array.dtype in BY_BITS and not renewed.get(array.name, GRADIENT).startswith(GRADIENT):
            raise UsageError(
                "{!r} is of a type that numpy cannot compute with: keep it in float32, or pass {}",
                renewed[array.name], Setting("buffers", "first"),
            )  # fmt: skip


def _sizes(step: bytes, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Return the sizes of symbolic dimensions, where some inputs of a step have these shapes."""
    return {
        dim.dim_param: size
        for value in onnx.ModelProto.FromString(step).graph.input
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ()), strict=False)
        if dim.HasField("dim_param")
    }


def _threads() -> int:
    """Return this rank's share of the machine's cores."""
    return max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _raise(error: OnnxRematError | None) -> None:
    if error is not None:
        raise error


def _copy_renewed(session: Session, made: Mapping[str, Array], arrays: Mapping[str, Array]) -> None:
    """Copy renewed state that was not written in place."""
    for output, name in renewals(arrays, made).items():
        if output not in session.donated:
            np.copyto(arrays[name], made[output])
