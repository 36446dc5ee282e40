"""Operations around the optimizer's step: clipping, accumulated micro-batches, loss scaling, averaged weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from onnx_remat.errors import UsageError

from .. import names

Tensors = dict[str, torch.Tensor]

SUM, AVERAGE = "accumulated", "average"
"""Pieces of a parameter's state: the sum of the gradients of micro-batches, and the average of its values."""

COUNT = names.state("accumulation", "count")
"""Input that counts the micro-batches since the last update."""

SCALE, GROWTH = names.state("scaler", "scale"), names.state("scaler", "growth")
"""Inputs: the loss scale, and the number of updates since it changed."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Settings of a `torch.amp.GradScaler`: current scale, factors of its changes, and updates between them."""

    scale: float
    growth: int
    growth_factor: float
    backoff_factor: float
    interval: int

    @staticmethod
    def of(scaler: torch.amp.GradScaler) -> Scaling:
        """Return the settings of the user's scaler, whose state is read but not changed."""
        if not scaler.is_enabled():
            raise UsageError("the GradScaler is disabled: leave scaler out")
        now = scaler.state_dict()
        return Scaling(
            float(now["scale"]), int(now["_growth_tracker"]), float(now["growth_factor"]),
            float(now["backoff_factor"]), int(now["growth_interval"]),
        )  # fmt: skip

    def after(self, finite: torch.Tensor, scale: torch.Tensor, lasted: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return scale and count after an update, as in ``torch._amp_update_scale_``."""
        grows = finite & (lasted + 1 >= self.interval)
        grown = scale * self.growth_factor
        kept = torch.where(grows & torch.isfinite(grown), grown, scale)
        return (
            torch.where(finite, kept, scale * self.backoff_factor),
            torch.where(finite & ~grows, lasted + 1, torch.zeros_like(lasted)),
        )


@dataclass(frozen=True, slots=True)
class Recipe:
    """Operations around the optimizer's step.

    Attributes
    ----------
    clip_norm, clip_value : float, optional
        Largest norm of all gradients together; largest magnitude of each element.
    accumulate : int
        Micro-batches whose gradients are averaged for one update.
    average : float, optional
        Decay of the moving average of the weights.
    scaling : Scaling, optional
        Loss scaling: the loss is multiplied by a scale, and an update is skipped if a gradient overflows.
    """

    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    average: float | None = None
    scaling: Scaling | None = None

    def check(self, optimizer: bool) -> None:
        """Raise UsageError if a setting is out of range, or needs an optimizer."""
        for name, limit in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if limit is not None and not limit >= 0:
                raise UsageError(f"{name}={limit}: give a limit of 0 or more")
        if self.accumulate < 1 or self.accumulate != int(self.accumulate):
            raise UsageError(f"accumulate={self.accumulate}: give the number of micro-batches, 1 or more")
        if self.average is not None and not 0 <= self.average < 1:
            raise UsageError(f"average={self.average}: give the decay of the average, from 0 to below 1")
        if not optimizer and (self.accumulate > 1 or self.average is not None or self.scaling):
            raise UsageError("accumulate, average and scaler change the update: pass the optimizer, too")

    def state(self, trained: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the initial state by input name."""
        made: Tensors = {}
        if self.accumulate > 1:
            made |= {names.state(n, SUM): torch.zeros_like(p, requires_grad=False) for n, p in trained.items()}
            made[COUNT] = torch.zeros(())
        if self.average is not None:
            made |= {names.state(name, AVERAGE): p.detach().clone() for name, p in trained.items()}
        if self.scaling is not None:
            made |= {SCALE: torch.tensor(self.scaling.scale), GROWTH: torch.tensor(float(self.scaling.growth))}
        return made

    def scaled(self, loss: torch.Tensor, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return what is differentiated: the scaled loss, a micro-batch's share of it."""
        if self.accumulate > 1:  # before hooks on gradients, which are not all linear
            loss = loss / self.accumulate
        return loss * values[SCALE].to(loss.dtype) if self.scaling is not None else loss

    def unscaled(self, gradients: Tensors, values: Mapping[str, torch.Tensor]) -> Tensors:
        """Return the gradients of the unscaled loss."""
        if self.scaling is None:
            return gradients
        inverse = values[SCALE].reciprocal()
        return {name: gradient * inverse.to(gradient.dtype) for name, gradient in gradients.items()}

    def clipped(self, gradients: Tensors) -> Tensors:
        """Return clipped gradients, as by `torch.nn.utils.clip_grad_value_` and then `clip_grad_norm_`."""
        if self.clip_value is not None:
            gradients = {name: g.clamp(-self.clip_value, self.clip_value) for name, g in gradients.items()}
        if self.clip_norm is None or not gradients:
            return gradients
        total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]))
        factor = (self.clip_norm / (total + 1e-6)).clamp(max=1.0)
        return {name: gradient * factor.to(gradient.dtype) for name, gradient in gradients.items()}

    def updated(
        self,
        values: Mapping[str, torch.Tensor],
        gradients: Tensors,
        update: Callable[[Tensors], Sequence[Tensors]],
        owned: Sequence[Collection[str]],
    ) -> Tensors:
        """Return new parameters and state by input name.

        Parameters
        ----------
        values
            Inputs of the step.
        gradients
            This micro-batch's shares of the gradients, by parameter.
        update
            Function from gradients by parameter to the new parameters and the state of each optimizer, by input name.
        owned
            Parameters of each optimizer: one that has a gradient which overflows does not update, and with `clip_norm`
            none does.
        """
        own: Tensors = {}  # changes in every step, even without an update of parameters
        due: torch.Tensor | None = None
        if self.accumulate > 1:
            gradients, due = self._accumulated(values, gradients, own)
        conditions = [due for _ in owned]
        if self.scaling is not None:
            finite = [torch.stack([gradients[n].isfinite().all() for n in each]).all() for each in owned if each]
            scale = self.scaling.after(torch.stack(finite).all(), values[SCALE], values[GROWTH])
            for name, value in zip((SCALE, GROWTH), scale, strict=True):
                own[name] = value if due is None else torch.where(due, value, values[name])
            if self.clip_norm is not None:  # one gradient that overflows is in the norm of all
                finite = [torch.stack(finite).all() for _ in finite]
            rest = iter(finite)
            conditions = [_both(due, next(rest)) if each else due for each in owned]
        made: Tensors = {}
        for new, each, condition in zip(update(self.clipped(gradients)), owned, conditions, strict=True):
            if self.average is not None:
                for name in each:
                    piece = names.state(name, AVERAGE)
                    new[piece] = values[piece].lerp(new[name], 1 - self.average)
            for name, value in new.items():
                made[name] = value if condition is None else torch.where(condition, value, values[name])
        return made | own

    def _accumulated(
        self, values: Mapping[str, torch.Tensor], gradients: Tensors, own: Tensors
    ) -> tuple[Tensors, torch.Tensor]:
        """Return the sums including this micro-batch's gradients, and whether they are complete."""
        count = values[COUNT] + 1
        due = count >= self.accumulate
        sums = {n: values[names.state(n, SUM)] + g for n, g in gradients.items()}
        for name, total in sums.items():
            own[names.state(name, SUM)] = torch.where(due, torch.zeros((), dtype=total.dtype), total)
        own[COUNT] = torch.where(due, torch.zeros_like(count), count)
        return sums, due


def _both(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    return second if first is None else first & second
