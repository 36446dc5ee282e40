"""A budgeted step without an example batch: `auto_checkpoint`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from onnx_remat.errors import UsageError

from .budgeted import budgeted
from .budgeted_step import Budgeted, StepLoss

if TYPE_CHECKING:
    import torch

    from onnx_remat.rewrite.report import Report

    from . import optimizer_facts
    from .step import Loss


class AutoCheckpoint:
    """A training step that its first batch makes.

    Attributes
    ----------
    step : Budgeted or None
        The step; None before the first batch.
    """

    def __init__(self, make: Callable[[Any], Budgeted]) -> None:
        self._make = make
        self.step: Budgeted | None = None

    def __call__(self, batch: Any) -> StepLoss:
        """Train on one batch and return the loss; the first call makes the step, which takes as long as `budgeted`.

        Raises
        ------
        ConversionError, OnnxRematError
            As by `budgeted`, and by `Budgeted`.
        """
        if self.step is None:
            self.step = self._make(batch)
        return self.step(batch)

    def _made(self) -> Budgeted:
        if self.step is None:
            raise UsageError("the first batch makes the step: train on one first")
        return self.step

    @property
    def summary(self) -> str:
        """Return `Budgeted.summary`; as the properties below, UsageError before the first batch."""
        return self._made().summary

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """Return `Budgeted.outputs`."""
        return self._made().outputs

    @property
    def extra(self) -> dict[str, torch.Tensor]:
        """Return `Budgeted.extra`."""
        return self._made().extra

    @property
    def report(self) -> Report | None:
        """Return `Budgeted.report`."""
        return self._made().report

    def close(self) -> None:
        """Free all memory except that of the module and the optimizer."""
        if self.step is not None:
            self.step.close()

    def __enter__(self) -> AutoCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def auto_checkpoint(
    model: torch.nn.Module,
    loss: Loss | None,
    optimizer: optimizer_facts.Optimizers,
    memory_budget: str | int = "auto",
    **options: Any,
) -> AutoCheckpoint:
    """Return a training step of a module within a memory budget; the planner decides what is recomputed.

    It is `budgeted` without an example: the first batch is the example. For example::

        step = auto_checkpoint(model, F.cross_entropy, optimizer, memory_budget="8GB")
        for x, target in loader:
            loss = step((x, target))

    Parameters
    ----------
    model, loss, optimizer
        As of `budgeted`.
    memory_budget : str or int
        As `budget` of `budgeted`. By default the least memory for which a step takes at most 10 % more time.
    **options
        Further arguments of `budgeted`.

    Returns
    -------
    AutoCheckpoint
        ``step(batch)`` trains and returns the loss.
    """
    return AutoCheckpoint(partial(budgeted, model, loss, optimizer, budget=memory_budget, **options))
