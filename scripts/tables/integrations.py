"""Losses of each integration over fifty steps, against those of the framework by itself.

Both sides begin with the same numbers and take the same batches: a network of six layers, AdamW (SGD with momentum for
BatchNorm) and a schedule, or a small BERT. Ours keeps a budget of 75 % of the exported step. *difference* is the
largest of all steps' losses, relative to the framework's.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from scripts.child import call

STEPS, WIDTH, ROWS, CLASSES, SHARE = 50, 64, 2048, 10, "75% of the step"
PLANNING = {"effort": 1}
HEADS = ("integration", "steps", "first loss", "last, framework", "last, ours", "difference", "budget")

Losses = list[float]


def _module(name: str) -> Any:
    """A package whose types are not looked at."""
    return importlib.import_module(name)


def _rows() -> Iterator[tuple[Any, Any]]:
    """A batch for each step: which of ten sums of inputs is the largest."""
    rng = np.random.default_rng(0)
    asked = rng.standard_normal((WIDTH, CLASSES))
    for _ in range(STEPS):
        x = rng.standard_normal((ROWS, WIDTH)).astype(np.float32)
        yield x, (x @ asked).argmax(1)


def _torch_network() -> tuple[Any, Any, Any]:
    import torch

    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)


def _torch_rows() -> list[tuple[Any, Any]]:
    import torch

    return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in _rows()]


def _in_torch() -> Losses:
    import torch

    model, optimizer, schedule = _torch_network()
    losses = []
    for x, y in _torch_rows():
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def budgeted() -> tuple[Losses, Losses, str]:
    """``budgeted`` in a loop."""
    import torch
    from onnx_remat.converters.pytorch import budgeted

    model, optimizer, schedule = _torch_network()
    rows = _torch_rows()
    ours = []
    with budgeted(model, torch.nn.functional.cross_entropy, optimizer, rows[0], SHARE, planning=PLANNING) as step:
        for batch in rows:
            ours.append(float(step(batch)))
            schedule.step()
        return _in_torch(), ours, step.summary


def auto_checkpoint() -> tuple[Losses, Losses, str]:
    """``auto_checkpoint``, whose step the first batch makes."""
    import torch
    from onnx_remat.converters.pytorch import auto_checkpoint

    model, optimizer, schedule = _torch_network()
    ours = []
    given = {"memory_budget": SHARE, "planning": PLANNING}
    with auto_checkpoint(model, torch.nn.functional.cross_entropy, optimizer, **given) as step:
        for batch in _torch_rows():
            ours.append(float(step(batch)))
            schedule.step()
        return _in_torch(), ours, step.step.summary


def accelerate() -> tuple[Losses, Losses, str]:
    """Model, optimizer and schedule that Accelerate has prepared."""
    import torch
    from onnx_remat.converters.pytorch import budgeted

    model, optimizer, schedule = _module("accelerate").Accelerator(cpu=True).prepare(*_torch_network())
    rows = _torch_rows()
    ours = []
    with budgeted(model, torch.nn.functional.cross_entropy, optimizer, rows[0], SHARE, planning=PLANNING) as step:
        for batch in rows:
            ours.append(float(step(batch)))
            optimizer.step()  # without gradients it changes nothing, and Accelerate counts it
            schedule.step()
        return _in_torch(), ours, step.summary


def lightning() -> tuple[Losses, Losses, str]:
    """A LightningModule with manual optimization, against the same with Lightning's own."""
    import torch
    from onnx_remat.converters.pytorch import budgeted

    pl = _module("lightning")

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, within: str | None) -> None:
            super().__init__()
            self.network, self.made, self.schedule = _torch_network()
            self.automatic_optimization = within is None
            self.within = within
            self.step: Any = None
            self.losses: Losses = []

        def configure_optimizers(self) -> Any:
            return [self.made], [{"scheduler": self.schedule, "interval": "step"}]

        def training_step(self, batch: Any, _: int) -> Any:
            if self.within is None:
                loss = torch.nn.functional.cross_entropy(self.network(batch[0]), batch[1])
                self.losses.append(loss.item())
                return loss
            optimizer: Any = self.optimizers()
            if self.step is None:
                loss_fn = torch.nn.functional.cross_entropy
                self.step = budgeted(self.network, loss_fn, optimizer, batch, self.within, planning=PLANNING)
            self.losses.append(float(self.step(batch)))
            optimizer.step()
            schedule: Any = self.lr_schedulers()
            schedule.step()
            return None

    modules = Module(None), Module(SHARE)
    for module in modules:
        with tempfile.TemporaryDirectory() as folder:
            trainer = pl.Trainer(
                accelerator="cpu", max_steps=STEPS, default_root_dir=folder, logger=False, enable_progress_bar=False,
                enable_model_summary=False, enable_checkpointing=False,
            )  # fmt: skip
            trainer.fit(module, _module("torch.utils.data").DataLoader(_torch_rows(), batch_size=None))
    return modules[0].losses, modules[1].losses, modules[1].step.summary


def trainer() -> tuple[Losses, Losses, str]:
    """``BudgetedTrainer`` against transformers' ``Trainer``, two batches an update."""
    from onnx_remat.converters.pytorch.trainer import BudgetedTrainer

    transformers = _module("transformers")

    def train(kind: Any, **given: Any) -> Any:
        model, texts = _bert(), _texts(2 * STEPS)
        with tempfile.TemporaryDirectory() as folder:
            arguments = transformers.TrainingArguments(
                folder, use_cpu=True, per_device_train_batch_size=_BATCH, max_steps=STEPS, logging_steps=1,
                learning_rate=1e-3, warmup_steps=5, weight_decay=0.1, dataloader_drop_last=True, report_to=[],
                gradient_accumulation_steps=2, disable_tqdm=True, save_strategy="no",
            )  # fmt: skip
            made = kind(model, arguments, train_dataset=texts, **given)
            made.train()
        return made

    theirs, ours = train(transformers.Trainer), train(BudgetedTrainer, budget=SHARE, planning=PLANNING)
    losses = [[line["loss"] for line in each.state.log_history if "loss" in line] for each in (theirs, ours)]
    return losses[0], losses[1], ours.step.summary


def transformers_loop() -> tuple[Losses, Losses, str]:
    """A loop of one's own with a model of transformers: ``loss=None``, batches are dicts."""
    import torch
    from onnx_remat.converters.pytorch import budgeted

    batches = list(_module("torch.utils.data").DataLoader(_texts(STEPS), _BATCH))
    model, other = _bert(), _bert()
    mine, theirs = (torch.optim.AdamW(each.parameters(), 1e-3) for each in (model, other))
    expected, ours = [], []
    with budgeted(model, None, mine, batches[0], SHARE, planning=PLANNING) as step:
        for batch in batches:
            theirs.zero_grad()
            loss = other(**batch).loss
            loss.backward()
            theirs.step()
            expected.append(loss.item())
            ours.append(float(step(batch)))
        return expected, ours, step.summary


_BATCH, _LENGTH, _WORDS = 16, 32, 256


def _bert() -> Any:
    import torch

    transformers = _module("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=_WORDS, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=_LENGTH, num_labels=2, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).train()


def _texts(batches: int) -> list[dict[str, Any]]:
    """Random texts; the class is whether the first word is in the upper half."""
    import torch

    made = torch.from_numpy(np.random.default_rng(0).integers(0, _WORDS, (batches * _BATCH, _LENGTH)))
    return [{"input_ids": text, "labels": int(text[0] >= _WORDS // 2)} for text in made]


def _in_jax(loss_fn: Any, params: Any, rest: Any = None, optimizer: Any = None) -> tuple[Losses, Losses, str]:
    """Steps of a loss with parameters, and buffers if there are any, in JAX and within a budget."""
    import jax
    import optax
    from onnx_remat.converters.jax import budgeted

    optimizer = optimizer or optax.adamw(optax.cosine_decay_schedule(3e-3, STEPS))
    grow = jax.value_and_grad(loss_fn, has_aux=rest is not None)

    @jax.jit
    def step(params: Any, rest: Any, state: Any, x: Any, y: Any) -> Any:
        made, gradients = grow(params, x, y) if rest is None else grow(params, rest, x, y)
        loss, rest = (made, None) if rest is None else made
        changes, state = optimizer.update(gradients, state, params)
        return loss, optax.apply_updates(params, changes), rest, state

    rows = list(_rows())
    more = {} if rest is None else {"buffers": rest}
    expected, ours = [], []
    with budgeted(loss_fn, params, *rows[0], optimizer=optimizer, budget=SHARE, planning=PLANNING, **more) as within:
        state = optimizer.init(params)
        for x, y in rows:
            loss, params, rest, state = step(params, rest, state, x, y)
            expected.append(float(loss))
            ours.append(float(within(x, y)))
        return expected, ours, within.summary


def linen() -> tuple[Losses, Losses, str]:
    """A linen module."""
    import flax.linen as nn
    import jax
    import optax

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(6):
                x = nn.gelu(nn.Dense(WIDTH)(x))
            return nn.Dense(CLASSES)(x)

    network = Network()
    params = network.init(jax.random.key(0), next(_rows())[0])

    def loss(params: Any, x: Any, y: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(network.apply(params, x), y).mean()

    return _in_jax(loss, params)


def nnx() -> tuple[Losses, Losses, str]:
    """An nnx module, split, with running statistics."""
    import optax

    nnx = _module("flax.nnx")
    rngs = nnx.Rngs(0)
    layers = [
        x for _ in range(8) for x in (nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs), nnx.gelu)
    ]
    graph, params, rest = nnx.split(nnx.Sequential(*layers, nnx.Linear(WIDTH, CLASSES, rngs=rngs)), nnx.Param, ...)

    def loss(params: Any, rest: Any, x: Any, y: Any) -> Any:
        model = nnx.merge(graph, params, rest, copy=True)
        made = optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
        return made, nnx.split(model, nnx.Param, ...)[2]

    return _in_jax(loss, params, rest, optax.sgd(0.03, momentum=0.9))


def keras() -> tuple[Losses, Losses, str]:
    """A Keras 3 model on JAX, with BatchNormalization and dropout."""
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import optax

    keras, layers = _module("keras"), _module("keras.layers")
    keras.utils.set_random_seed(0)
    blocks = [
        x
        for _ in range(4)
        for x in (layers.Dense(WIDTH), layers.BatchNormalization(), layers.ReLU(), layers.Dropout(0.1))
    ]
    model = keras.Sequential([keras.Input((WIDTH,)), *blocks, layers.Dense(CLASSES)])
    cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loss(trained: Any, kept: Any, x: Any, y: Any) -> Any:
        logits, kept = model.stateless_call(trained, kept, x, training=True)
        return cross_entropy(y, logits), kept

    trained, kept = ([v.value for v in each] for each in (model.trainable_variables, model.non_trainable_variables))
    return _in_jax(loss, trained, kept, optax.sgd(0.03, momentum=0.9))


_CASES: dict[str, Callable[[], tuple[Losses, Losses, str]]] = {
    "PyTorch, `budgeted`": budgeted,
    "PyTorch, `auto_checkpoint`": auto_checkpoint,
    "Accelerate": accelerate,
    "Lightning": lightning,
    "transformers, `BudgetedTrainer`": trainer,
    "transformers, a loop of one's own": transformers_loop,
    "Flax linen": linen,
    "Flax nnx, BatchNorm": nnx,
    "Keras 3, BatchNormalization, dropout": keras,
}
ITEMS = tuple(_CASES)


def compared(name: str) -> tuple[Losses, Losses, str]:
    """The framework's losses, ours, and the summary of the step; in the process that trains."""
    return _CASES[name]()


def rows(name: str) -> Iterator[tuple[str, ...]]:
    """The row of one integration."""
    theirs, ours, summary = call(compared, name).answer
    if len(theirs) != STEPS or len(ours) != STEPS:
        raise ValueError(f"{name}: {len(theirs)} and {len(ours)} losses")
    difference = float(np.max(np.abs(np.subtract(ours, theirs)) / np.abs(theirs)))
    kept = "kept" if " kept" in summary else summary.splitlines()[-1]
    yield name, str(STEPS), f"{theirs[0]:.4f}", f"{theirs[-1]:.4f}", f"{ours[-1]:.4f}", f"{difference:.0e}", kept
