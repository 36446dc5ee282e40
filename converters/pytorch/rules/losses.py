"""Loss functions whose backward passes ONNX lacks."""

from __future__ import annotations

import torch

from ..private_torch import get_decompositions
from .registry import RULES

aten = torch.ops.aten

# torch's exporter makes the total weight of this one up, which scales every gradient
RULES.update(get_decompositions([aten.nll_loss_forward, aten.nll_loss2d_forward]))
