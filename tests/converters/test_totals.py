"""Sums and means of whole tensors, which ONNX Runtime takes one entry after another."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
import torch.nn.functional as F
from onnx_remat.converters.pytorch import export_training_step
from torch import nn

from tests.support.slow import few


@pytest.mark.parametrize("free", few([False, True], [True]))
@pytest.mark.parametrize("loss", [F.mse_loss, lambda y, t: F.mse_loss(y, t, reduction="sum")])
def test_a_loss_over_millions_of_entries_is_as_exact_as_torchs(loss, free):
    """ONNX Runtime adds one after another: of four million squares it loses 2e-4, which the converter refuses."""
    torch.manual_seed(0)
    model, x = nn.Conv2d(1, 16, 1), torch.randn(16, 1, 128, 128)
    options = {"dynamic_dims": {f"input.{i}": {0: "batch"} for i in range(2)}} if free else {}
    made = export_training_step(model, (x, torch.randn(16, 16, 128, 128)), loss, **options)
    assert float({p.key: p.value for p in made.metadata_props}["check.error"]) < 1e-5


def test_the_mean_of_a_few_is_taken_at_once():
    made = export_training_step(nn.Linear(4, 4), (torch.randn(3, 4), torch.randn(3, 4)), F.mse_loss)
    assert sum(node.op_type == "ReduceMean" for node in made.graph.node) == 1
