"""Train a LightningModule by hand ("manual optimization") within 70 % of the memory of PyTorch's own step.

Schedules, logs, validation, checkpoints and callbacks are Lightning's own. Needs onnx-remat[torch] and lightning.
"""

from __future__ import annotations

import tempfile
from typing import Any

import lightning
import torch
from onnx_remat.converters.pytorch import Budgeted, budgeted
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH, DEPTH, BATCH, STEPS = 128, 12, 1024, 40


class Regression(lightning.LightningModule):
    """A deep network; `training_step` hands each batch to a step that `budgeted` has made of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())]
        self.network = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
        self.step: Budgeted | None = None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)]

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        optimizer = self.optimizers()
        if self.step is None:
            loss = nn.functional.mse_loss
            self.step = budgeted(self.network, loss, optimizer, batch, "70%", planning={"effort": 4})
            print(self.step.summary)
        self.log("loss", self.step(batch))
        optimizer.step()  # counts for Lightning; without gradients it changes nothing
        self.lr_schedulers().step()

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        x, y = batch
        self.log("validated", nn.functional.mse_loss(self.network(x), y))


def loader(number: int, seed: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """The sum of the first three inputs, to be found among all."""
    x = torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x[:, :3].sum(1, keepdim=True)), BATCH, drop_last=True)


def main() -> None:
    torch.manual_seed(0)
    module = Regression()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=STEPS, default_root_dir=folder, logger=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0,
        )  # fmt: skip
        check = loader(BATCH, 1)
        before = trainer.validate(module, check, verbose=False)[0]["validated"]
        trainer.fit(module, loader(STEPS * BATCH, 0), check)
        after = trainer.validate(module, check, verbose=False)[0]["validated"]
        print(f"evaluated: {before:.4f} before, {after:.4f} after; {trainer.global_step} steps")


if __name__ == "__main__":
    main()
