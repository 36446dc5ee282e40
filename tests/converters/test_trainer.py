"""`BudgetedTrainer` alongside transformers' own `Trainer`: losses, weights, checkpoints, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytest.importorskip("transformers")

import torch
import transformers
from onnx_remat.converters.pytorch import budgeted
from onnx_remat.converters.pytorch.trainer import BudgetedTrainer

from onnx_remat.errors import UsageError
from tests.support.slow import few

WORDS, LENGTH, BATCH, CLASSES = 90, 16, 8, 3


def language(lora=False, layers=2):
    """GPT-2, or adapters of its attention."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=layers, n_head=2, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    if not lora:
        return model
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))


def classifier():
    """BERT with a head."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH, num_labels=CLASSES, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def texts(number, labels=False):
    """Random texts, of which GPT-2 learns the next token and BERT a class."""
    rng = np.random.default_rng(0)
    made = torch.from_numpy(rng.integers(0, WORDS // 2, (number, LENGTH)))  # half of the words are never read
    return [{"input_ids": text, "labels": int(text.sum() % CLASSES) if labels else text} for text in made]


def trained(kind, model, folder, data, resume=None, steps=6, options=None, **budgeted):
    """Train, with a warm-up from a rate of zero, decay and clipping; return the trainer."""
    given = {
        "use_cpu": True, "per_device_train_batch_size": BATCH, "max_steps": steps, "logging_steps": 1,
        "learning_rate": 1e-2, "warmup_steps": 2, "weight_decay": 0.1, "dataloader_drop_last": True, "report_to": [],
        "save_steps": 3, "disable_tqdm": True,
    }  # fmt: skip
    arguments = transformers.TrainingArguments(folder, **given | (options or {}))
    trainer = kind(model, arguments, train_dataset=data, eval_dataset=data[:BATCH], **budgeted)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer):
    """The logged losses."""
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


CASES = {
    "GPT-2, three batches an update": (lambda: language(layers=1), {}, {"gradient_accumulation_steps": 3}),
    "GPT-2, LoRA": (lambda: language(lora=True), {}, {}),
    "BERT, smoothed labels, two batches an update": (
        classifier, {"labels": True}, {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", few(CASES, ["GPT-2, three batches an update"]))
def test_trains_as_the_trainer_does(name, tmp_path):
    """Every loss and every weight, with evaluation between the steps."""
    make, kinds, options = CASES[name]
    options = options | {"eval_strategy": "steps", "eval_steps": 2}
    data = texts(BATCH * 12, **kinds)
    theirs = trained(transformers.Trainer, make(), tmp_path / "theirs", data, options=options)
    ours = trained(BudgetedTrainer, make(), tmp_path / "ours", data, options=options)
    assert len(losses(ours)) == 6
    np.testing.assert_allclose(losses(ours), losses(theirs), rtol=1e-5)
    evaluated = [[e["eval_loss"] for e in t.state.log_history if "eval_loss" in e] for t in (ours, theirs)]
    np.testing.assert_allclose(*evaluated, rtol=1e-5)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        np.testing.assert_allclose(mine.detach(), other.detach(), rtol=1e-3, atol=2e-5)
    ours.close()


@pytest.mark.slow
def test_goes_on_from_a_checkpoint(tmp_path):
    """Weights, state of the optimizer and schedule come back; the step is built again, within the budget."""
    data, given = texts(128 * 6), {"budget": "80% of the step", "planning": {"effort": 1}, "check": False}
    size = {"per_device_train_batch_size": 128}
    through = trained(BudgetedTrainer, language(), tmp_path, data, options=size, **given)
    assert " kept" in through.step.summary
    middle = str(tmp_path / "checkpoint-3")
    again = trained(BudgetedTrainer, language(), tmp_path, data, resume=middle, options=size, **given)
    np.testing.assert_allclose(losses(again)[-3:], losses(through)[-3:], rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "samples", "said"),
    [
        ({"bf16": True}, BATCH, "float32"),
        pytest.param(
            {"gradient_accumulation_steps": 2},
            3 * BATCH,
            "3 batches, which gradient_accumulation_steps=2",
            marks=pytest.mark.slow,
        ),
        pytest.param({"dataloader_drop_last": False}, BATCH + 3, "drop_last", marks=pytest.mark.slow),
        pytest.param({"neftune_noise_alpha": 5}, BATCH, "neftune_noise_alpha", marks=pytest.mark.slow),
    ],
)
def test_refusals_say_what_to_do(options, samples, said, tmp_path):
    """The second before the first step: at the end of an epoch it would come late."""
    with pytest.raises(UsageError, match=said):
        trained(BudgetedTrainer, language(layers=1), tmp_path, texts(samples), options=options, check=False)


@pytest.mark.slow
def test_wrapped_optimizers_count_as_those_in_them():
    """As `Accelerator.prepare` returns them; schedules change the rate inside."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    prepared = accelerate.Accelerator(cpu=True).prepare(optimizer)
    batch = torch.randn(8, 4), torch.randn(8, 1)
    before = torch.nn.functional.mse_loss(model(batch[0]), batch[1]).item()
    with budgeted(model, torch.nn.functional.mse_loss, prepared, batch, check=False) as step:
        assert step(batch) == pytest.approx(before)
    assert torch.nn.functional.mse_loss(model(batch[0]), batch[1]).item() < before


class Stops(transformers.TrainerCallback):
    """Stops once, between the two batches of an update."""

    def __init__(self):
        self.left = True

    def on_substep_end(self, args, state, control, **_):
        if self.left and state.global_step == 1:
            self.left, control.should_training_stop = False, True


@pytest.mark.slow
def test_every_call_of_train_begins_with_its_arguments_and_no_gradients(tmp_path):
    """A run that stopped inside an update leaves its sum of gradients; arguments change between runs."""
    made = []
    for kind in (transformers.Trainer, BudgetedTrainer):
        options = {"gradient_accumulation_steps": 2, "save_strategy": "no", "max_steps": 3}
        arguments = transformers.TrainingArguments(
            tmp_path, use_cpu=True, per_device_train_batch_size=BATCH, logging_steps=1, learning_rate=1e-2,
            report_to=[], disable_tqdm=True, **options,
        )  # fmt: skip
        check = {} if kind is transformers.Trainer else {"check": False}
        trainer = kind(language(), arguments, train_dataset=texts(12 * BATCH), callbacks=[Stops()], **check)
        trainer.train()
        trainer.args.max_grad_norm = 0.01
        trainer.train()
        made.append(trainer)
    np.testing.assert_allclose(losses(made[1]), losses(made[0]), rtol=1e-4)
    for mine, other in zip(made[1].model.parameters(), made[0].model.parameters(), strict=True):
        np.testing.assert_allclose(mine.detach(), other.detach(), rtol=1e-3, atol=5e-5)


class Annealed(BudgetedTrainer):
    """Its loss changes with the number of the step."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs) * (1 + self.state.global_step)


@pytest.mark.slow
def test_a_loss_that_reads_the_state_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"compute_loss reads state\.global_step"):
        trained(Annealed, language(layers=1), tmp_path, texts(2 * BATCH), check=False)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        pytest.param((torch.ones(2, 3),), "is a tuple: let the collator", marks=pytest.mark.slow),
        ({"text": ["a", "b"]}, r"batch\['text'\] is a list, no tensor"),
    ],
)
def test_batches_are_mappings_of_tensors(batch, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        arguments = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to=[])
        trainer = BudgetedTrainer(language(), arguments, data_collator=lambda _: batch, train_dataset=texts(BATCH))
        trainer.train()
