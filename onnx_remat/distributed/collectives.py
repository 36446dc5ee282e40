"""Communication between ranks by torch.distributed; the only module that imports PyTorch.

Arrays are reduced in place: a tensor is a view of numpy's memory. When a rank has ended, or does not respond within the
engine's timeout, the others raise `RankLostError`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt

from onnx_remat.converters.extras import require

require("torch", "torch")

import torch
from torch import distributed as engine

from onnx_remat.errors import OnnxRematError, RankLostError, UsageError

Array = npt.NDArray[Any]

WIRE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types in which ranks can send gradients."""

_SECONDS = 1.0  # between two messages of a rank during a long call

_STAND_INS = {"uint16": torch.bfloat16}  # types of gradients: numpy has no bfloat16, and no gradient is an integer


def run(main: Callable[[], object], timeout: float = 300.0) -> int:
    """Join the job that ``torchrun`` started, call a function, and leave; print errors as one line on standard error.

    Without ``torchrun`` the job has one rank.

    Parameters
    ----------
    main : callable
        The training script.
    timeout : float
        Seconds after which a rank that does not respond counts as lost.

    Returns
    -------
    int
        0, or the exit code of the error, for `sys.exit`. When a rank is lost, the process exits with 7 instead.
    """
    rank = os.environ.get("RANK", "0")
    try:
        with _lost("joining the job"):
            one = {} if "RANK" in os.environ else _job_of_one()
            engine.init_process_group("gloo", timeout=timedelta(seconds=timeout), **one)
        main()
    except OnnxRematError as error:
        print(f"onnx-remat: rank {rank}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        if isinstance(error, RankLostError):  # the engine's threads still wait for that rank: a normal exit would abort
            sys.stdout.flush()
            os._exit(error.exit_code)
        return error.exit_code
    engine.destroy_process_group()
    return 0


def _job_of_one() -> dict[str, Any]:
    store: Any = engine.HashStore()  # type: ignore[attr-defined]  # torch documents it, and does not list it
    return {"store": store, "rank": 0, "world_size": 1}


@contextmanager
def _lost(doing: str) -> Iterator[None]:
    """Convert errors of the engine to `RankLostError`."""
    try:
        yield
    except RuntimeError as error:  # DistBackendError and its kin are subclasses
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]
        raise RankLostError(
            f"another rank has ended or does not respond, noticed while {doing} ({why}): start the job again and load "
            "its last checkpoint"
        ) from error


class Ranks:
    """The ranks of a job.

    Attributes
    ----------
    rank, count : int
        Rank of this process, and number of ranks.
    doing : str
        Current activity of the job, for messages of failures.

    Raises
    ------
    UsageError
        torch.distributed is not initialized.
    """

    def __init__(self) -> None:
        if not engine.is_initialized():
            raise UsageError(
                "torch.distributed is not initialized: wrap the script in onnx_remat.distributed.run, and start it "
                "with torchrun"
            )
        self.rank, self.count = engine.get_rank(), engine.get_world_size()
        self.doing = "starting"

    def sum(self, array: Array, wire: str, bucket: int) -> list[Callable[[], None]]:
        """Start to sum an array over all ranks, in place, in buckets of `bucket` bytes; return a wait call for each."""
        tensor = _tensor(array)
        each = max(1, bucket // tensor.element_size())
        return [self._sum(part, wire) for part in tensor.split(each)] if self.count > 1 else []

    def _sum(self, part: torch.Tensor, wire: str) -> Callable[[], None]:
        sent = part if not wire else part.to(WIRE[wire])
        with _lost(self.doing):
            work: Any = engine.all_reduce(sent, async_op=True)

        def wait() -> None:
            with _lost(self.doing):
                work.wait()
            if sent is not part:
                part.copy_(sent)

        return wait

    def sum_shares(self, array: Array, wire: str) -> None:
        """Sum an array over all ranks in place, so that each rank has the sums of its own share only."""
        tensor = _tensor(array)
        sent = tensor if not wire else tensor.to(WIRE[wire])
        each = len(tensor) // self.count
        mine = slice(self.rank * each, (self.rank + 1) * each)
        with _lost(self.doing):
            for rank, part in enumerate(sent.split(each)) if self.count > 1 else ():
                engine.reduce(part, dst=rank)  # gloo's own reduce_scatter copies the whole buffer
        if sent is not tensor:
            tensor[mine].copy_(sent[mine])

    def join_shares(self, array: Array) -> None:
        """Gather an array in place on all ranks, each of which has its own share."""
        tensor = _tensor(array)
        with _lost(self.doing):
            for rank, part in enumerate(tensor.split(len(tensor) // self.count)) if self.count > 1 else ():
                engine.broadcast(part, src=rank)

    def totals(self, *numbers: float) -> list[float]:
        """Return the sums of some numbers over all ranks."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        with _lost(self.doing):
            engine.all_reduce(tensor)
        return [float(number) for number in tensor]

    def least(self, *numbers: int) -> list[int]:
        """Return the minima of some numbers over all ranks."""
        tensor = torch.tensor(numbers)
        with _lost(self.doing):
            engine.all_reduce(tensor, op=engine.ReduceOp.MIN)
        return [int(number) for number in tensor]

    def from_rank(self, array: Array, rank: int = 0) -> None:
        """Copy an array from one rank to all others."""
        if array.nbytes and self.count > 1:
            with _lost(self.doing):
                engine.broadcast(torch.from_numpy(array.reshape(-1).view(np.uint8)), src=rank)

    def agree(self, find: Callable[[], Any], patient: bool = False) -> Any:
        """Call a function on the first rank only, and return its result, or raise its error, on all ranks.

        With `patient`, for a call that may take longer than the engine's timeout, the first rank keeps the others
        informed that it is still running.
        """
        answer: list[Any] = [None, None]
        if patient and self.count > 1:
            find = self._with_heartbeat(find)
        if self.rank == 0:
            try:
                answer[0] = find()
            except OnnxRematError as error:
                answer[1] = error
        if self.count > 1:
            with _lost(self.doing):
                engine.broadcast_object_list(answer, src=0)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def _with_heartbeat(self, find: Callable[[], Any]) -> Callable[[], Any]:
        """Call a function on the first rank, which broadcasts every second whether it has ended; return a getter."""
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(find) if self.rank == 0 else None
            ended = False
            while not ended:
                if running is not None:
                    wait([running], timeout=_SECONDS)
                with _lost(self.doing):
                    status = torch.tensor([running is not None and running.done()])
                    engine.broadcast(status, src=0)
                ended = bool(status.item())
        return running.result if running is not None else find

    def check_same(self, what: str, value: object) -> None:
        """Raise UsageError unless all ranks have the same value."""
        if (found := self.agree(lambda: value)) != value:
            raise UsageError(f"{what} differs between ranks: {found!r} on rank 0, {value!r} on rank {self.rank}")


def scale(array: Array, factor: float) -> None:
    """Multiply an array in place."""
    if factor != 1:
        _tensor(array).mul_(factor)


def square_sum(array: Array) -> float:
    """Return the sum of squares in double precision, a megabyte at a time."""
    return float(sum(part.double().square().sum().item() for part in _tensor(array).split(1 << 18)))


def _tensor(array: Array) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(_STAND_INS[array.dtype.name]) if array.dtype.name in _STAND_INS else tensor


def check_wire(name: str, dtypes: Mapping[str, str]) -> None:
    """Raise UsageError where gradients cannot be sent in a type."""
    if name and name not in WIRE:
        raise UsageError(f"gradients can be sent in {', '.join(WIRE)}, not in {name!r}")
    if odd := next(
        (p for p, dtype in dtypes.items() if dtype not in ("float32", "float64", "float16", "uint16")), None
    ):
        raise UsageError(f"the gradient of {odd!r} has type {dtypes[odd]}, which ranks cannot sum: use a float type")
