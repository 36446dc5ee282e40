"""Fine-tune a classifier of texts with Hugging Face's Trainer, within 70 % of the memory of PyTorch's own step.

A BERT from a config, on texts that are made here: warm-up, evaluation and checkpoints are the trainer's own. Needs
onnx-remat[torch], transformers and accelerate.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass

import torch
from onnx_remat.converters.pytorch.trainer import BudgetedTrainer
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments


@dataclass(frozen=True)
class Config:
    words: int = 64
    length: int = 64
    width: int = 128
    layers: int = 4
    batch: int = 32
    steps: int = 40


def texts(config: Config, number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Random texts of one length; those of each label leave out a quarter of the words."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(0, 2, (number,), generator=generator)
    quarter = config.words // 4
    made = torch.randint(0, 3 * quarter, (number, config.length), generator=generator) + quarter * label[:, None]
    return [{"input_ids": text, "labels": of} for text, of in zip(made, label, strict=True)]


def main() -> None:
    config = Config()
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=config.words, hidden_size=config.width, num_hidden_layers=config.layers, num_attention_heads=4,
            intermediate_size=4 * config.width, max_position_embeddings=config.length, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, use_cpu=True, per_device_train_batch_size=config.batch, max_steps=config.steps, learning_rate=1e-3,
            warmup_steps=5, dataloader_drop_last=True, eval_strategy="steps", eval_steps=20, save_steps=20,
            logging_steps=10, report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = BudgetedTrainer(
            model, arguments, train_dataset=texts(config, 2048, 0), eval_dataset=texts(config, 128, 1), budget="70%",
            planning={"effort": 4},
        )  # fmt: skip
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        print(trainer.step.summary)
        print(f"evaluated: {before:.3f} before, {trainer.evaluate()['eval_loss']:.3f} after")


if __name__ == "__main__":
    main()
