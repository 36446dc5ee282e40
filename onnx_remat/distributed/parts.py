"""The models of every rank: the step that sums gradients, rewritten to a budget, and the update."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import onnx

from onnx_remat.distributed.flat import kind_of, layout_of
from onnx_remat.distributed.sharding import Piece, Shard, Sharding
from onnx_remat.errors import BudgetInfeasibleError, ModelError, UsageError
from onnx_remat.ir import model_io
from onnx_remat.messages import Message, Setting
from onnx_remat.process import child, worker
from onnx_remat.units import format_bytes

if TYPE_CHECKING:
    from onnx_remat.options import PlanningOptions


ENGINE_BYTES = 6_000_000
"""Memory of gloo's messages and of torch's ops that scale sums, from a rank's first use on.

Ranks of jobs of two and four took up to 4.9 MB more than predicted without it (``python -m scripts.distributed``).
"""


@dataclass(frozen=True, slots=True)
class Parts:
    """A training step as ranks run it.

    Attributes
    ----------
    gradients : bytes
        The step that adds its gradients to sums, an ONNX file.
    update : bytes
        The optimizer's update, an ONNX file.
    shards : tuple of Shard
        Each rank's part of the update, where the optimizer state is sharded.
    foreseen : int
        Predicted memory of training, in bytes, on the rank that takes most; 0 without a budget.
    recompute : float
        Extra compute of the step, as a fraction.
    loss : str
        The step's output that is the loss.
    """

    gradients: bytes
    update: bytes
    shards: tuple[Shard, ...] = ()
    foreseen: int = 0
    recompute: float = 0.0
    loss: str = "loss"


@worker.device_left()
def prepare(
    step: model_io.Model,
    budget: str | int | None = None,
    *,
    ranks: int = 1,
    zero: bool = False,
    **options: Unpack[PlanningOptions],
) -> Parts:
    """Split a whole step, and rewrite it so that each rank keeps a budget.

    Parameters
    ----------
    step : path, bytes or onnx.ModelProto
        Forward, loss, backward and update; weights are inputs.
    budget : str or int, optional
        Limit on the memory of training on each rank: parameters, gradients, the rank's optimizer state, the batch, the
        slabs and bookkeeping of both parts, and `ENGINE_BYTES`. A percentage is relative to a rank's memory with the
        original step. The budget excludes the interpreter and its libraries, including PyTorch.
    ranks : int
        Number of ranks of the job; it is fixed by, and only relevant with, `zero`.
    zero : bool
        Shard the optimizer state over the ranks, see `sharding`.
    **options
        Fields of `Options`, for the plan.

    Raises
    ------
    ModelError
        The step cannot be split, or its update does not shard.
    BudgetInfeasibleError
        No plan was found under the budget.
    """
    from onnx_remat.ir.state import with_state
    from onnx_remat.options import parse_options
    from onnx_remat.rewrite.original import begin
    from onnx_remat.rewrite.pipeline import rewrite_for
    from onnx_remat.rewrite.plans import TooLittleTime
    from onnx_remat.split import accumulating, split_step
    from onnx_remat.units import parse_budget

    if ranks < 1:
        raise UsageError(f"ranks must be at least 1, not {ranks}")
    if options.get("run_by") not in (None, "loop"):
        raise UsageError("ranks train by sessions of their own: leave {} out", Setting("run_by"))
    parse_options(options)
    source = model_io.load(step)
    if "state_outputs" in options:
        source = with_state(source, options.pop("state_outputs"))
    parts = split_step(source, loss=options.get("loss"), dims=options.get("dims"))
    if any(t.data_location == onnx.TensorProto.EXTERNAL for t in parts.gradients.graph.initializer):
        raise ModelError("the step's weights lie in other files: export it with its parameters as inputs")
    summing = accumulating(parts.gradients)
    sharding = Sharding.of(parts.update, layout_of(parts.update, ranks), ranks) if zero else None
    shards = tuple(map(sharding.shard, range(ranks))) if sharding else ()
    update = parts.update.SerializeToString()
    if budget is None:
        return Parts(summing.SerializeToString(), update, shards, loss=parts.loss)
    model = sharding.model(_busiest(sharding)) if sharding else parts.update
    rest = ENGINE_BYTES + (_of_the_update(model, summing) if model is not None else 0)
    planning: PlanningOptions = {**options, "run_by": "loop"}
    original = begin(summing, planning)
    allowed = parse_budget(budget).resolve(original.memory.original_bytes + rest)
    if allowed <= rest:
        raise BudgetInfeasibleError(
            f"no memory is left for the step: of a rank's {format_bytes(allowed)}, the update, its state and the "
            f"engine take {format_bytes(rest)}; pass a larger budget" + ("" if zero else ", or zero=True"),
            rest, rest,
        )  # fmt: skip
    try:
        result = rewrite_for(original, allowed - rest)
    except TooLittleTime:
        raise
    except BudgetInfeasibleError as error:
        raise _of_a_rank(error, allowed, rest, zero) from error
    after = result.report.loop_after
    assert after is not None
    gradients = result.model.SerializeToString()
    return Parts(gradients, update, shards, after.total + rest, result.report.extra_compute, parts.loss)


def _of_a_rank(error: BudgetInfeasibleError, allowed: int, rest: int, zero: bool) -> BudgetInfeasibleError:
    """Return the error of a step that has a rank's budget without `rest`, in bytes of the rank."""
    found, advised, larger = error.best_peak_bytes + rest, error.settings.get("budget"), ""
    if isinstance(advised, int):
        larger = Message("try {} ({}), ", Setting("budget", advised + rest), format_bytes(advised + rest))
    text = Message(
        "no plan found for a rank's {}, of which the update, its state and the engine take {}; {}accumulate over "
        "smaller batches{}",
        format_bytes(allowed), format_bytes(rest), larger, "" if zero else ", or pass zero=True",
    )  # fmt: skip
    return BudgetInfeasibleError(text, found, error.lower_bound_bytes + rest)


def _busiest(sharding: Sharding) -> int:
    """Return the rank whose update has the most nodes: shares of the state are equal except at their borders."""
    return max(range(sharding.ranks), key=lambda rank: (len(sharding.pieces(rank)), -rank))


def _of_the_update(update: onnx.ModelProto, summing: onnx.ModelProto) -> int:
    """Predict the memory that the update adds to the step: optimizer state, its slab, and ONNX Runtime's bookkeeping.

    Parameters and gradients are inputs of the step, or slices of them.
    """
    from onnx_remat.rewrite.original import begin

    found = begin(update, {"run_by": "loop"}).memory.original_bytes
    shared = {value.name for value in summing.graph.input}
    both = [value for value in update.graph.input if value.name in shared]
    return found - sum(_nbytes(value) for value in both)


def _nbytes(value: onnx.ValueInfoProto) -> int:
    dtype, shape = kind_of(value)
    return int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))


def prepare_apart(step: model_io.Model, budget: str | int | None, **options: Any) -> Parts:
    """Call `prepare` in a separate process, so that the memory of planning is freed before training."""
    if "progress" in options:
        raise UsageError("progress is not available here: leave it out, or call prepare and pass its result as step")
    given = os.fspath(step) if isinstance(step, str | os.PathLike) else model_io.load(step).model.SerializeToString()
    try:
        made = child.call(
            "onnx_remat.distributed.parts:prepared", {"step": given, "budget": budget, "options": options}
        )
    except child.Failed as failed:
        raise failed.error() or ModelError(f"the step could not be prepared: {failed}") from None
    shards = tuple(
        Shard(shard["model"], {name: Piece(**piece) for name, piece in shard["pieces"].items()})
        for shard in made["shards"]
    )
    return Parts(**made | {"shards": shards})


def prepared(step: str | bytes, budget: str | int | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Call `prepare` and return its result as JSON data; runs in a child process."""
    return asdict(prepare(step, budget, **options))
