"""A request to prepare a step, and its result, see `prepare`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from onnx_remat.app.progress import Progress
from onnx_remat.units import Budget

from .conditions import Condition
from .living import Place
from .outside import Outside
from .recipe import Recipe
from .unchanged import SettingPlace

if TYPE_CHECKING:
    from onnx_remat.options import PlanningOptions

    from .step import Loss


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments of `budgeted`, checked as far as that takes no memory.

    Attributes
    ----------
    model, loss, recipe
    users : tuple of torch.optim.Optimizer
        The user's optimizers.
    batch : object
        The example.
    budget : Budget, optional
    of_step : bool
        Is a fraction as budget one of the exported step, not of PyTorch's own?
    dynamic : mapping of str to mapping of int to str
        Open dimensions, by input name and axis.
    sizes : mapping of str to int
        Their sizes in the example.
    loss_parts, attention_parts : int, optional
    outputs : tuple of str
        Parts of the model's output that the step also outputs.
    check : bool
    planning : mapping
    path : Path
        File to write.
    progress : Progress
        Line on a terminal that shows the stage.
    provider : str
        What runs the step: ``"cpu"`` or ``"cuda"``.
    """

    model: torch.nn.Module
    loss: Loss | None
    recipe: Recipe
    users: tuple[torch.optim.Optimizer, ...]
    batch: Any
    budget: Budget | None
    of_step: bool
    dynamic: Mapping[str, Mapping[int, str]]
    sizes: Mapping[str, int]
    loss_parts: int | None
    attention_parts: int | None
    outputs: tuple[str, ...]
    check: bool
    planning: PlanningOptions
    path: Path
    progress: Progress
    provider: str = "cpu"

    @property
    def is_share(self) -> bool:
        """Return whether the budget is a share of what PyTorch's own step takes."""
        return self.budget is not None and self.budget.fraction is not None and not self.of_step

    @property
    def compares(self) -> bool:
        """Return whether memory of PyTorch's own step is of interest: on a device only where the budget needs it."""
        return self.budget is not None and ((self.check and self.provider == "cpu") or self.is_share)


@dataclass(frozen=True, slots=True)
class Own:
    """PyTorch's own step.

    Attributes
    ----------
    bytes : int
        Memory that training with it takes; 0 if that was not measured.
    error : str
        The error with which it failed.
    """

    bytes: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Facts about a prepared step, all picklable except for `outside`.

    Attributes
    ----------
    trained : tuple of str
        Parameters that it updates.
    settings : mapping of str to SettingPlace
        Settings of the optimizers that are inputs, by input name.
    started : mapping of str to mapping of str to torch.Tensor
        State of the optimizers before the first step, by parameter and slot, of parameters with a gradient
        and without state.
    own : mapping of str to torch.Tensor
        Initial values of the state that is in neither the module nor an optimizer, by input name.
    outside : mapping of str to Outside or Place
        Tensors outside the step, by input name.
    report : bytes
        The pickled `Report` of the rewrite, whose classes take memory; empty without a budget.
    summary : str
        What the step takes, and PyTorch's own if it was measured.
    outputs : tuple of str
        Parts of the model's output that it outputs.
    torch_bytes : int
        Memory that training with PyTorch's own step takes; 0 if that was not measured.
    limit : int
        The budget in bytes; 0 without one.
    conditions : tuple of Condition
        Conditions on open dimensions, under which the step is this one, see `open_sizes`.
    """

    trained: tuple[str, ...]
    settings: Mapping[str, SettingPlace]
    started: Mapping[str, Mapping[str, torch.Tensor]]
    own: Mapping[str, torch.Tensor]
    outside: Mapping[str, Outside | Place]
    report: bytes = b""
    summary: str = ""
    outputs: tuple[str, ...] = ()
    torch_bytes: int = 0
    limit: int = 0
    conditions: tuple[Condition, ...] = ()
