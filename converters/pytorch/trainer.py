"""Hugging Face's `Trainer` within a memory budget: `BudgetedTrainer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers import Trainer, TrainerState
from transformers.trainer_utils import has_length

from onnx_remat.errors import UsageError
from onnx_remat.messages import Setting

from .budgeted import budgeted
from .budgeted_step import Budgeted

if TYPE_CHECKING:
    from onnx_remat.options import PlanningOptions

_ITEMS = "num_items_in_batch"
"""Argument of `compute_loss` that counts the labels of all batches of an update; here a tensor of the batch."""


class _Loss(torch.nn.Module):
    """A model with the trainer's loss, which a subclass of it may override."""

    def __init__(self, trainer: BudgetedTrainer, model: torch.nn.Module, factor: int) -> None:
        super().__init__()
        self.model, self._of, self._factor = model, trainer.compute_loss, factor
        self._trainer = trainer

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        items, state = inputs.pop(_ITEMS, None), self._trainer.state
        self._trainer.state = cast(TrainerState, _Unread())
        try:
            return cast(torch.Tensor, self._of(self.model, inputs, num_items_in_batch=items)) * self._factor
        finally:
            self._trainer.state = state


class _Unread:
    """Stands for the trainer's state while the loss is traced: the step would keep what is read."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            f"compute_loss reads state.{name}, which would keep its first value: the step is traced once; give what "
            "changes as a tensor of the batch"
        )


class BudgetedTrainer(Trainer):
    """transformers' `Trainer`, whose training steps stay within a memory budget, on the CPU or on one CUDA device.

    The first batch makes a step by `budgeted` of the model, its loss (`compute_loss`, which may be overridden) and the
    optimizer; it and all later batches train with that step. Evaluation, prediction, checkpoints, resuming, schedules,
    callbacks and logs are the trainer's own. For example::

        trainer = BudgetedTrainer(model, TrainingArguments("out", use_cpu=True), train_dataset=texts, budget="60%")
        trainer.train()

    All batches have the sizes of the first, except along `dynamic_dims`: pad texts to one length, and set
    ``dataloader_drop_last=True``. Clipping (``max_grad_norm``) and ``gradient_accumulation_steps`` are part of the
    step, so that callbacks see no gradients, and their norm is not logged. `compute_loss` runs only when a step is
    made, once in each call of `train`: numbers of Python that it reads keep their values. Dropout draws from ONNX
    Runtime, which no seed sets.

    Parameters
    ----------
    args, kwargs
        Those of `transformers.Trainer`.
    budget, dynamic_dims, loss_parts, attention_parts, check, planning, progress
        As of `budgeted`.

    Attributes
    ----------
    step : Budgeted or None
        The step, once the first batch has come.

    Raises
    ------
    UsageError
        In training: the trainer does not train on the CPU or on one CUDA device, in float32 and in one process, an
        update would have fewer batches than ``gradient_accumulation_steps``, or a batch is no mapping of tensors.
    ConversionError, OnnxRematError
        In training: see `budgeted`.
    """

    def __init__(
        self,
        *args: Any,
        budget: str | int | None = None,
        dynamic_dims: Mapping[str, Mapping[int, str]] | None = None,
        loss_parts: int | None = None,
        attention_parts: int | None = None,
        check: bool = True,
        planning: PlanningOptions | None = None,
        progress: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.step: Budgeted | None = None
        self._micro = 0  # batches since the last update
        self._given: dict[str, Any] = {
            "budget": budget, "dynamic_dims": dynamic_dims, "loss_parts": loss_parts,
            "attention_parts": attention_parts, "check": check, "planning": planning, "progress": progress,
        }  # fmt: skip

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`; arguments that have changed since the last call count."""
        self.close()
        return super().train(*args, **kwargs)

    def training_step(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Train on one batch, the optimizer's update included, and return the loss as `Trainer` does."""
        micro = self.args.gradient_accumulation_steps
        if self.current_gradient_accumulation_steps != micro:  # the data have no length, else `_check` would know
            raise UsageError(
                "an epoch ends within an update: give data whose batches gradient_accumulation_steps divides"
            )
        if self.accelerator.sync_gradients != (self._micro + 1 == micro):
            raise UsageError("an update was left before its last batch, whose gradients the step keeps: train again")
        model.train()
        batch = _tensors(self._prepare_inputs(inputs))
        if num_items_in_batch is not None:
            batch[_ITEMS] = torch.as_tensor(num_items_in_batch)
        if self.step is None:
            self.step = self._made(model, batch)
        loss = self.step(batch)
        self._micro = (self._micro + 1) % micro
        return torch.tensor(loss / micro, device=self.args.device)

    def close(self) -> None:
        """Free the memory of the step."""
        if self.step is not None:
            self.step.close()
            self.step, self._micro = None, 0

    def _made(self, model: torch.nn.Module, batch: dict[str, Any]) -> Budgeted:
        self._check()
        micro = self.args.gradient_accumulation_steps
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        known = {id(parameter) for group in groups for parameter in group["params"]}
        for name, parameter in model.named_parameters():
            if self.args.max_grad_norm and parameter.requires_grad and id(parameter) not in known:
                raise UsageError(
                    f"max_grad_norm is of all gradients, and the optimizer does not have {name}: freeze it, "
                    "requires_grad_(False), or give it to the optimizer"
                )
        return budgeted(
            _Loss(self, model, micro if self._sums(batch) else 1), None, self.optimizer, batch,
            clip_norm=self.args.max_grad_norm or None, accumulate=micro, **self._given,
        )  # fmt: skip

    def _check(self) -> None:
        """Raise UsageError if the step could not train as the arguments say."""
        arguments = self.args
        if arguments.n_gpu > 1:
            raise UsageError("a budget is for one CUDA device: start Python with CUDA_VISIBLE_DEVICES=0")
        if arguments.device.type not in ("cpu", "cuda") or arguments.world_size > 1:
            use_cpu = Setting("use_cpu", True)
            raise UsageError("a budget is for one process on a CPU or on one CUDA device: pass {}", use_cpu)
        if arguments.fp16 or arguments.bf16:
            raise UsageError("a budget is for float32: leave fp16 and bf16 out")
        if arguments.neftune_noise_alpha:
            raise UsageError("noise in embeddings depends on the lengths of texts: leave neftune_noise_alpha out")
        micro, data = arguments.gradient_accumulation_steps, self.callback_handler.train_dataloader
        if has_length(data) and len(data) % micro and self.state.max_steps * micro > len(data):
            raise UsageError(
                f"an epoch has {len(data)} batches, which gradient_accumulation_steps={micro} does not divide: leave "
                "samples out, or stop before the end of the first epoch by max_steps"
            )

    def _sums(self, batch: Mapping[str, Any]) -> bool:
        """Return whether the loss is a share of all batches of an update, so that their gradients add up."""
        known = getattr(self, "loss_is_scaled_for_ga", None)
        if known is not None:
            return bool(known)
        return (self.model_accepts_loss_kwargs and _ITEMS in batch) or self.compute_loss_func is not None

    def _clip_grad_norm(self, model: torch.nn.Module) -> None:
        """Do nothing: the step clips."""

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: float | None = None) -> None:
        """Return None: the step keeps its gradients to itself."""


def _tensors(batch: Any) -> dict[str, Any]:
    """Return a batch in the order of its keys; numpy's arrays become tensors."""
    if not isinstance(batch, Mapping):
        raise UsageError(f"the batch is a {type(batch).__name__}: let the collator return a mapping of tensors")
    made = {
        str(key): torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in batch.items()
    }
    for key, value in made.items():
        if isinstance(value, str | list | tuple) and not all(isinstance(one, torch.Tensor) for one in value):
            raise UsageError(f"batch[{key!r}] is a {type(value).__name__}, no tensor: leave it out in the collator")
    return dict(sorted(made.items()))
