"""Parts of the model's output as outputs of a step: for metrics while training."""

from __future__ import annotations

import collections
from dataclasses import dataclass

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
from onnx_remat.converters.pytorch import budgeted, export_training_step
from onnx_remat.converters.pytorch.batch import parts_of
from torch import nn
from torch.nn.functional import cross_entropy

from onnx_remat.errors import UsageError
from tests.support.slow import few

Pair = collections.namedtuple("Pair", ["logits", "loss"])


@dataclass
class Made:
    loss: torch.Tensor
    logits: torch.Tensor
    nothing: torch.Tensor | None = None


class Classifier(nn.Module):
    """A model that returns its logits, or its loss with them in some structure."""

    def __init__(self, structure=None):
        super().__init__()
        self.layer, self.structure = nn.Linear(8, 5), structure

    def forward(self, x, target=None):
        logits = self.layer(x)
        return self.structure(cross_entropy(logits, target), logits) if self.structure else logits


STRUCTURES = {
    "dict": lambda loss, logits: {"loss": loss, "logits": logits},
    "dataclass": Made,
    "named tuple": lambda loss, logits: Pair(logits, loss),
}


def batch(rows=64):
    return torch.randn(rows, 8), torch.randint(0, 5, (rows,))


def made(model, loss, example, **options):
    return budgeted(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), example, **options)


@pytest.mark.parametrize("structure", few(STRUCTURES, ["dict"]))
def test_logits_of_every_step_are_those_before_its_update(structure):
    torch.manual_seed(0)
    model = Classifier(STRUCTURES[structure])
    step = made(model, None, batch(), outputs=["logits"])
    for x, target in (batch(), batch()):
        expected = model.layer(x).detach()
        loss = step((x, target))
        torch.testing.assert_close(step.outputs["logits"], expected)
        assert loss == pytest.approx(float(cross_entropy(expected, target)), rel=1e-5)


@dataclass(slots=True)
class Slotted:
    logits: torch.Tensor


def test_an_output_in_slots_is_taken_apart_where_parts_of_it_are_wanted():
    output = Slotted(torch.ones(2))
    assert parts_of(output, ()) == {} and parts_of(output, ("logits",)) == {"logits": output.logits}
    with pytest.raises(UsageError, match="no tensor 'loss'; it has logits"):
        parts_of(output, ("loss",))


@pytest.mark.slow
def test_a_model_that_returns_a_tensor_has_an_output():
    model = Classifier()
    step = made(model, cross_entropy, batch(), outputs=["output"], budget="200% of the step")
    x, target = batch()
    expected = model(x).detach()
    step((x, target))
    kept = step.outputs["output"]
    torch.testing.assert_close(kept, expected)
    step(batch())
    torch.testing.assert_close(kept, expected)  # it is a copy


@pytest.mark.slow
def test_the_first_of_a_tuple_and_a_loss_of_it():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 5)

        def forward(self, x):
            made = self.layer(x)
            return made, made.argmax(-1)

    model = Two()
    step = made(model, lambda output, target: cross_entropy(output[0], target), batch(), outputs=["1"])
    x, target = batch()
    expected = model(x)[1]
    step((x, target))
    assert torch.equal(step.outputs["1"], expected)


@pytest.mark.slow
def test_smaller_batches_have_smaller_outputs():
    model = Classifier()
    dims = {"input.0": {0: "batch"}, "input.1": {0: "batch"}}
    step = made(model, cross_entropy, batch(), outputs=["output"], dynamic_dims=dims)
    x, target = batch(17)
    expected = model(x).detach()
    step((x, target))
    torch.testing.assert_close(step.outputs["output"], expected)


@pytest.mark.slow
def test_a_part_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(UsageError, match="no tensor 'logit'; it has loss, logits"):
        made(Classifier(Made), None, batch(), outputs=["logit"])
    with pytest.raises(UsageError, match="no tensor 'logits'; it has output"):
        made(Classifier(), cross_entropy, batch(), outputs=["logits"])


def test_a_file_has_them_as_outputs():
    model = Classifier(Made)
    file = export_training_step(model, batch(), outputs=["logits"])
    assert "output.logits" in [value.name for value in file.graph.output]


@pytest.mark.slow
def test_logits_that_are_kept_keep_a_loss_whole():
    """A loss in parts never has all logits."""
    model = nn.Linear(8, 3000)
    example = torch.randn(96, 8), torch.randint(0, 3000, (96,))
    step = made(model, cross_entropy, example, outputs=["output"], loss_parts=4)
    expected = model(example[0]).detach()
    step(example)
    torch.testing.assert_close(step.outputs["output"], expected)


@pytest.mark.slow
def test_keywords_of_a_batch_may_come_in_any_order():
    model = Classifier(Made)
    x, target = batch()
    step = made(model, None, {"x": x, "target": target}, outputs=["logits"])
    expected = model.layer(x).detach()
    step({"target": target, "x": x})
    torch.testing.assert_close(step.outputs["logits"], expected)
    with pytest.raises(UsageError, match="the batch has no 'target', which the example has"):
        step({"x": x})
    with pytest.raises(UsageError, match="the batch has 'mask', which the example has not: leave it out"):
        step({"x": x, "target": target, "mask": x})
