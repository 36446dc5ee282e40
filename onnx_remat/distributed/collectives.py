"""What ranks say to one another, by torch.distributed; the only module that imports PyTorch.

Arrays are reduced where they lie: a tensor is a view of numpy's memory. A rank that has ended, or hangs for longer than
the engine's timeout, makes the others raise `RankLostError`.
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

from onnx_remat import errors
from onnx_remat.errors import OnnxRematError, RankLostError, UsageError

Array = npt.NDArray[Any]

WIRE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types in which gradients can be sent."""

_SECONDS = 1.0  # between two words of a rank that is at something long

_STAND_INS = {"uint16": torch.bfloat16}  # of gradients: numpy has no bfloat16, and no gradient is an integer


def run(main: Callable[[], object], timeout: float = 300.0) -> int:
    """Join the job that ``torchrun`` started, call a function, and leave; refusals are one line on standard error.

    Without ``torchrun`` the job is of one rank.

    Parameters
    ----------
    main : callable
        The training script.
    timeout : float
        Seconds after which a rank that does not answer counts as lost.

    Returns
    -------
    int
        0, or the exit code of the error, for `sys.exit`. Of a lost rank it does not return: the process ends with 7.
    """
    rank = os.environ.get("RANK", "0")
    try:
        with _lost("joining the job"):
            one = {} if "RANK" in os.environ else _job_of_one()
            engine.init_process_group("gloo", timeout=timedelta(seconds=timeout), **one)
        main()
    except OnnxRematError as error:
        print(f"onnx-remat: rank {rank}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        if isinstance(error, RankLostError):  # the engine's threads wait for it still: leaving them would abort
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
    """Turn what the engine raises into `RankLostError`."""
    try:
        yield
    except RuntimeError as error:  # DistBackendError and its kin are subclasses
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)[:160]
        raise RankLostError(
            f"another rank has ended or does not answer, noticed while {doing} ({why}); start the job again and load "
            "its last checkpoint"
        ) from error


class Ranks:
    """The ranks of a job.

    Attributes
    ----------
    rank, count : int
        Which one this is, of how many.
    doing : str
        What the job is at, for the message of a failure.

    Raises
    ------
    UsageError
        There is no job.
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
        """Start to add up an array over all ranks, in place, in buckets of some bytes; returns what waits for each."""
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
        """Add up an array over all ranks; each has its own share of the sums then, in place, and no other."""
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
        """Give every rank all shares of an array of which it has its own."""
        tensor = _tensor(array)
        with _lost(self.doing):
            for rank, part in enumerate(tensor.split(len(tensor) // self.count)) if self.count > 1 else ():
                engine.broadcast(part, src=rank)

    def totals(self, *numbers: float) -> list[float]:
        """Sums of some numbers over all ranks."""
        tensor = torch.tensor(numbers, dtype=torch.float64)
        with _lost(self.doing):
            engine.all_reduce(tensor)
        return [float(number) for number in tensor]

    def least(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        tensor = torch.tensor([number])
        with _lost(self.doing):
            engine.all_reduce(tensor, op=engine.ReduceOp.MIN)
        return int(tensor.item())

    def from_rank(self, array: Array, rank: int = 0) -> None:
        """Copy an array of one rank to all of them."""
        if array.nbytes and self.count > 1:
            with _lost(self.doing):
                engine.broadcast(torch.from_numpy(array.reshape(-1).view(np.uint8)), src=rank)

    def agree(self, find: Callable[[], Any], patient: bool = False) -> Any:
        """What a function returns, or raises, on the first rank, where alone it is called.

        If it may take longer than the engine's timeout, the first rank, being `patient`, tells the others that it is
        at it still.
        """
        answer: list[Any] = [None, "", ""]
        if patient and self.count > 1:
            find = self._told(find)
        if self.rank == 0:
            try:
                answer[0] = find()
            except OnnxRematError as error:
                answer[1:] = [type(error).__name__, str(error)]
        if self.count > 1:
            with _lost(self.doing):
                engine.broadcast_object_list(answer, src=0)
        if answer[1]:
            kind = getattr(errors, answer[1], OnnxRematError)
            raise (OnnxRematError if kind is errors.BudgetInfeasibleError else kind)(answer[2])
        return answer[0]

    def _told(self, find: Callable[[], Any]) -> Callable[[], Any]:
        """Call a function on the first rank, which says every second if it has ended; returns what gives its answer."""
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(find) if self.rank == 0 else None
            ended = False
            while not ended:
                if running is not None:
                    wait([running], timeout=_SECONDS)
                with _lost(self.doing):
                    said = torch.tensor([running is not None and running.done()])
                    engine.broadcast(said, src=0)
                ended = bool(said.item())
        return running.result if running is not None else find

    def check_same(self, what: str, value: object) -> None:
        """UsageError unless all ranks have the same."""
        if (found := self.agree(lambda: value)) != value:
            raise UsageError(f"{what} differs between ranks: {found!r} on rank 0, {value!r} on rank {self.rank}")


def scale(array: Array, factor: float) -> None:
    """Multiply an array in place."""
    if factor != 1:
        _tensor(array).mul_(factor)


def square_sum(array: Array) -> float:
    """Sum of squares, added up in double precision by the megabyte."""
    return float(sum(part.double().square().sum().item() for part in _tensor(array).split(1 << 18)))


def _tensor(array: Array) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(_STAND_INS[array.dtype.name]) if array.dtype.name in _STAND_INS else tensor


def check_wire(name: str, dtypes: Mapping[str, str]) -> None:
    """UsageError where gradients cannot be sent in a type."""
    if name and name not in WIRE:
        raise UsageError(f"gradients can be sent in {', '.join(WIRE)}, not in {name!r}")
    if odd := next(
        (p for p, dtype in dtypes.items() if dtype not in ("float32", "float64", "float16", "uint16")), None
    ):
        raise UsageError(f"the gradient of {odd!r} is of type {dtypes[odd]}: no rank can add that up")
