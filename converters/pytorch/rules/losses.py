"""Loss functions whose backward passes ONNX lacks."""

from __future__ import annotations

import torch

from ..private_torch import get_decompositions
from .registry import RULES, rule

aten = torch.ops.aten

# torch's exporter makes the total weight of this one up, which scales every gradient
RULES.update(get_decompositions([aten.nll_loss_forward, aten.nll_loss2d_forward]))


@rule(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(
    gradient: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: int
) -> torch.Tensor:
    """Without the difference of a sigmoid from 1, in which torch's decomposition loses small gradients."""
    made = -gradient * target / (1 + torch.exp(target * x))
    return made / x.numel() if reduction == 1 else made
