"""Losses over many classes, a few rows at a time: the same numbers, and logits that never all exist at once."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
import torch.nn.functional as F
from onnx_remat.converters.autodiff import add_backward
from onnx_remat.converters.passes.loss_in_parts import loss_in_parts
from onnx_remat.converters.pytorch import budgeted, export_training_step, initial_feeds
from torch import nn

import onnx_remat
from onnx_remat.errors import UsageError
from onnx_remat.ort import runtime
from tests.support.slow import few

CLASSES, TEXTS, TOKENS = 50, 6, 5


class Language(nn.Module):
    """Logits of texts of tokens, their structure lost at the end, as losses want it."""

    def __init__(self, tied=True, bias=False, cap=0.0, classes=CLASSES, width=8):
        super().__init__()
        self.embed, self.mix = nn.Embedding(classes, width), nn.Linear(width, width)
        self.out, self.cap = nn.Linear(width, classes, bias=bias), cap
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, words):
        logits = self.out(torch.tanh(self.mix(self.embed(words))))
        if self.cap:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits.flatten(0, 1)


def smooth(logits, target):
    return F.cross_entropy(logits, target, label_smoothing=0.1)


def with_padding(logits, target):
    return F.cross_entropy(logits, target, ignore_index=3)


def with_z(logits, target):
    return F.cross_entropy(logits, target) + 1e-2 * torch.logsumexp(logits, -1).pow(2).mean()


def behind_z(logits, target):
    """The first loss of each row is a number here, not a row of one."""
    return 1e-2 * torch.logsumexp(logits, -1).pow(2).mean() + F.cross_entropy(logits, target)


def squared(logits, target):
    return F.cross_entropy(logits, target) ** 2


def batch(texts=TEXTS, classes=CLASSES, tokens=TOKENS):
    return torch.randint(0, classes, (texts, tokens)), torch.randint(0, classes, (texts * tokens,))


def parts(model: onnx.ModelProto) -> int:
    """How many products make logits."""
    return max((len(node.output) for node in model.graph.node if node.op_type == "Split"), default=1)


@pytest.mark.parametrize("loss", few([F.cross_entropy, smooth, with_padding, with_z, behind_z], [smooth, with_padding]))
@pytest.mark.parametrize(
    "settings", few([{}, {"tied": False, "bias": True}, {"cap": 5.0}], [{"tied": False, "bias": True}]), ids=str
)
def test_the_numbers_are_those_of_one_part(settings, loss):
    """The converter compares four parts with torch; here with one, on a batch that neither has seen."""
    torch.manual_seed(0)
    model, example = Language(**settings), batch()
    one, four = (export_training_step(model, example, loss, loss_parts=n, check=n > 1) for n in (1, 4))
    assert (parts(one), parts(four)) == (1, 4)
    words, target = batch()
    feeds = initial_feeds(one, model) | {"input.0": words.numpy(), "input.1": target.numpy()}
    wanted, made = (runtime.outputs(step, feeds) for step in (one, four))
    assert wanted.keys() == made.keys()
    for name in wanted:
        np.testing.assert_allclose(made[name], wanted[name], rtol=1e-5, atol=1e-6)


def test_rows_that_do_not_divide_and_more_parts_than_rows():
    model = Language()
    assert parts(export_training_step(model, batch(), F.cross_entropy, loss_parts=7)) == 7
    assert parts(export_training_step(model, batch(1, tokens=3), F.cross_entropy, loss_parts=7)) == 3


@pytest.mark.slow
def test_an_open_batch_is_taken_apart_where_that_is_asked_for():
    class Flat(Language):
        def forward(self, words, target):
            return F.cross_entropy(super().forward(words), target.flatten())

    words, target = batch()
    example = words, target.reshape(TEXTS, TOKENS)
    free = {f"input.{i}": {0: "texts"} for i in range(2)}
    made = export_training_step(Flat(), example, dynamic_dims=free, loss_parts=3)
    assert parts(made) == 3
    assert parts(export_training_step(Flat(), example, dynamic_dims=free)) == 1


class Pairs(nn.Module):
    """Similarities of all pairs of embeddings, as contrastive losses want them."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)

    def forward(self, x):
        embedded = torch.tanh(self.embed(x))
        return embedded @ embedded.T


def test_a_product_of_embeddings_with_themselves_reads_them_by_rows_and_whole():
    example = torch.randn(64, 8), torch.randint(0, 64, (64,))
    assert parts(export_training_step(Pairs(), example, F.cross_entropy, loss_parts=2)) == 2


@pytest.mark.parametrize("loss", [squared, lambda logits, target: F.cross_entropy(logits, target).exp()])
def test_a_gradient_that_needs_the_whole_loss_is_left_alone(loss):
    assert parts(export_training_step(Language(), batch(), loss, loss_parts=4)) == 1


def test_logits_that_others_read_whole_are_left_alone():
    class Watched(Language):
        def __init__(self):
            super().__init__()
            self.register_buffer("guesses", torch.zeros(TEXTS * TOKENS, dtype=torch.int64))

        def forward(self, words):
            logits = super().forward(words)
            self.guesses.copy_(logits.argmax(-1))
            return logits

    assert parts(export_training_step(Watched(), batch(), F.cross_entropy, loss_parts=4)) == 1


def watching_confidence(logits, target):
    of_one_token = logits.detach().reshape(-1, 1, CLASSES)
    return F.cross_entropy(logits, target) - 0.01 * F.log_softmax(of_one_token, -1).sum(2).mean()


def test_sums_over_the_last_of_three_axes_are_left_alone():
    """A part of the logits is a matrix, which lacks that axis."""
    assert parts(export_training_step(Language(), batch(), watching_confidence, loss_parts=4)) == 1


def test_rows_scaled_one_by_one_in_three_axes_are_left_alone():
    class Scaled(Language):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.rand(TEXTS * TOKENS, 1, 1) + 1)

        def forward(self, words):
            return (super().forward(words).unsqueeze(1) * self.scale).squeeze(1)

    assert parts(export_training_step(Scaled(), batch(), F.cross_entropy, loss_parts=4)) == 1


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "4"])
def test_what_is_no_number_of_parts_is_refused(wrong):
    with pytest.raises(UsageError, match="loss_parts"):
        export_training_step(Language(), batch(), F.cross_entropy, loss_parts=wrong)


def test_large_logits_are_taken_apart_by_themselves_and_a_budget_below_them_is_kept():
    """82 MB of logits in 8 parts of as many rows as an entry of the matrix has numbers."""
    classes, width, tokens = 40_000, 64, 512
    model = Language(classes=classes, width=width)
    example = batch(1, classes, tokens)
    whole, taken = (export_training_step(model, example, F.cross_entropy, loss_parts=n) for n in (1, None))
    assert (parts(whole), parts(taken)) == (1, tokens // width)
    logits = 4 * classes * tokens
    with pytest.raises(onnx_remat.BudgetInfeasibleError, match="impossible"):
        onnx_remat.rewrite_model(whole, logits, effort=0.3)
    result = onnx_remat.rewrite_model(taken, logits, effort=0.3)
    assert result.report.extra_compute < 0.05


def test_a_budgeted_step_in_parts_trains_as_torch_does():
    torch.manual_seed(1)
    ours, theirs = Language(), Language()
    theirs.load_state_dict(ours.state_dict())
    example = batch()
    step = budgeted(ours, F.cross_entropy, torch.optim.SGD(ours.parameters(), 0.1), example, loss_parts=3)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    for _ in range(5):
        words, target = batch()
        optimizer.zero_grad()
        loss = F.cross_entropy(theirs(words), target)
        loss.backward()
        optimizer.step()
        assert step((words, target)) == pytest.approx(loss.item(), rel=1e-5)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_forward_file_gets_its_loss_in_parts():
    """512 rows of 64 numbers each, 40,000 classes: `add_backward` compares the gradients with differences by itself."""
    rng = np.random.default_rng(0)
    forward = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        language (int64[512] words) => (float[512, 40000] logits) {
            embedded = Gather (matrix, words)
            active = Tanh (embedded)
            logits = Gemm <transB = 1> (active, matrix)
        }""")
    matrix = (rng.standard_normal((40_000, 64)) * 0.02).astype(np.float32)
    forward.graph.initializer.append(onnx.numpy_helper.from_array(matrix, "matrix"))
    assert parts(add_backward(forward, loss="cross_entropy")) == 8


def linear(rows: int | str, bias: tuple[int, ...]) -> onnx.ModelProto:
    """A step of five classes, in four parts, with a constant bias."""
    rng = np.random.default_rng(0)
    forward = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 20]>
        linear (float[{rows}, 4] x) => (float[{rows}, 5] logits) {{ logits = Gemm (x, w, b) }}""")
    for name, shape in (("w", (4, 5)), ("b", bias)):
        array = rng.standard_normal(shape).astype(np.float32)
        forward.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return add_backward(forward, "cross_entropy", ["w"], check=False)


def in_four_parts(step: onnx.ModelProto) -> onnx.ModelProto:
    model = ir.from_proto(step)
    loss_in_parts(model, wanted=4)
    return ir.to_proto(model)


def agree(step: onnx.ModelProto, divided: onnx.ModelProto, rows: int) -> None:
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal((rows, 4)).astype(np.float32), "target": rng.integers(0, 5, rows)}
    feeds["w"] = rng.standard_normal((4, 5)).astype(np.float32)
    wanted, made = runtime.outputs(step, feeds), runtime.outputs(divided, feeds)
    for name in wanted:
        np.testing.assert_allclose(made[name], wanted[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("bias", "count"), [((5,), 4), ((1, 5), 4), ((8, 5), 1), ((8, 1), 1)])
def test_a_bias_with_rows_of_its_own_is_left_alone(bias, count):
    step = linear(8, bias)
    divided = in_four_parts(step)
    assert parts(divided) == count
    agree(step, divided, 8)


def test_an_open_batch_need_not_divide_into_parts():
    step = linear("n", (5,))
    divided = in_four_parts(step)
    assert parts(divided) == 4
    for rows in (8, 5, 3, 1):
        agree(step, divided, rows)
