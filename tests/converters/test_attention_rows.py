"""Blocks of rows of an attention under a mask: fewer scores, the same numbers."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
import torch.nn.functional as F
from onnx_remat.converters.autodiff import add_backward
from onnx_remat.converters.pytorch import export_training_step, initial_feeds
from torch import nn

import onnx_remat
from onnx_remat.ort import runtime

TEXTS, HEADS, TOKENS, WIDTH = 2, 2, 128, 4
HIDDEN = -math.inf


class Attention(nn.Module):
    """An attention by a formula of queries, keys, values and what else is given."""

    def __init__(self, formula, groups=HEADS, bias=0):
        super().__init__()
        self.q, self.o = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(2))
        self.k, self.v = (nn.Linear(HEADS * WIDTH, groups * WIDTH) for _ in range(2))
        self.formula = formula
        self.bias = nn.Parameter(torch.randn(bias)) if bias else None

    def forward(self, x, *more, y=None):
        y = more[0] if more and more[0].dim() == 3 else x
        more = [each for each in more if each.dim() != 3]
        q, k, v = (
            project(each).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
            for project, each in ((self.q, x), (self.k, y), (self.v, y))
        )
        made = self.formula(q, k, v, *more, *([] if self.bias is None else [self.bias]))
        return self.o(made.transpose(1, 2).flatten(2))


def batch(*more, tokens=TOKENS, texts=TEXTS):
    x, target = torch.randn(2, texts, tokens, HEADS * WIDTH, dtype=torch.float64)
    return (x, *more, target)


def divided(model, example, parts=2):
    """The sizes of the softmaxes (or exponentials) in parts, after a comparison with the step in one part."""
    torch.manual_seed(0)
    model = model.double()
    one = export_training_step(model, example, F.mse_loss, attention_parts=1, check=False)
    many = export_training_step(model, example, F.mse_loss, attention_parts=parts)  # compared with torch as well
    feeds = initial_feeds(one, model)
    feeds |= {f"input.{i}": value.numpy() for i, value in enumerate(example)}
    for level in ("disable", "all"):
        expected, made = (runtime.outputs(step, feeds, level) for step in (one, many))
        assert expected.keys() == made.keys()
        for name in expected:
            np.testing.assert_allclose(made[name], expected[name], rtol=1e-9, atol=1e-12, err_msg=f"{name} at {level}")
    return forms(many)


def forms(model):
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.value_info}
    made = [shapes[node.output[0]] for node in model.graph.node if node.op_type in ("Softmax", "Exp")]
    return [tuple(shape[-2:]) for shape in made if len(shape) > 2 and min(shape[-2:]) > 1]


def both(*blocks):
    """The blocks of the forward pass, and those of the backward pass, the last one first."""
    return [*blocks, *blocks[::-1]]


def causal(rows=TOKENS, columns=TOKENS, before=0):
    return torch.ones(rows, columns, dtype=torch.bool).tril(before)


def added(mask, by=HIDDEN):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, by)


def by_hand(mask, bent=lambda scores: scores, after=lambda scores: scores, over=-1):
    return lambda q, k, v: F.softmax(after(bent(q @ k.transpose(2, 3)) + mask), over) @ v


def attend(**settings):
    return lambda q, k, v, *more: F.scaled_dot_product_attention(q, k, v, *more, **settings)


def exponentials(q, k, v):
    made = (q @ k.transpose(2, 3) + added(causal())).exp()
    return made / made.sum(-1, keepdim=True) @ v


TRIANGLE = both((64, 64), (64, 128))
FORMULAS = {
    "by PyTorch": (attend(is_causal=True), TRIANGLE),
    "a mask of booleans": (lambda q, k, v: attend()(q, k, v, causal()), TRIANGLE),
    "minus infinity": (by_hand(added(causal())), TRIANGLE),
    "a large number": (by_hand(added(causal(), -3e38)), TRIANGLE),
    "filled in": (
        lambda q, k, v: F.softmax((q @ k.transpose(2, 3)).masked_fill(~causal(), HIDDEN), -1) @ v, TRIANGLE),
    "bent": (by_hand(added(causal()), bent=lambda s: torch.tanh(s / 5) * 5), TRIANGLE),
    "exponentials": (exponentials, TRIANGLE),
    "a mask for each head": (by_hand(added(torch.stack([causal(), causal().tril() & causal().triu(-9)]))), TRIANGLE),
    "a prefix": (by_hand(added(causal() | (torch.arange(TOKENS) < 40))), TRIANGLE),
    "a window": (by_hand(added(causal() & ~causal(before=-16))), both((64, 64), (64, 80))),
    "backwards": (by_hand(added(causal().T)), both((64, 128), (64, 64))),
    "parts that do not see one another": (
        by_hand(added(torch.block_diag(*[torch.ones(64, 64)] * 2).bool())), both((64, 64), (64, 64))),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_blocks_have_the_keys_that_they_may_see(name):
    formula, expected = FORMULAS[name]
    assert divided(Attention(formula), batch()) == expected


WHOLE = [(TOKENS, TOKENS)] * 4
LEFT = {
    "hides little": by_hand(added(causal(before=100))),
    "a softmax over queries": by_hand(added(causal()), over=-2),
    "a key that nobody sees": by_hand(added(causal() & (torch.arange(TOKENS) != 3))),
    "a query that sees nothing": by_hand(added(causal() & (torch.arange(TOKENS) != 3)[:, None], -3e38)),
    "the mean of all scores": by_hand(added(causal()), bent=lambda s: s - s.mean(-1, keepdim=True)),
    "shown again": by_hand(added(causal()), after=lambda s: s.clamp(-5)),
    "a mask of the results": lambda q, k, v: F.softmax(q @ k.transpose(2, 3), -1) * causal() @ v,
    "the rest of a share": lambda q, k, v: (1 - F.softmax(q @ k.transpose(2, 3) + added(causal()), -1)) @ v,
    "half hidden": by_hand(added(causal(), -2.0)),
}


@pytest.mark.parametrize("name", LEFT)
def test_rows_are_left_whole_where_a_hidden_score_counts(name):
    assert divided(Attention(LEFT[name]), batch()) == WHOLE


def test_a_trained_bias_of_each_key_is_a_sum_over_queries():
    model = Attention(lambda q, k, v, bias: by_hand(added(causal()), bent=lambda s: s + bias)(q, k, v), bias=TOKENS)
    assert divided(model, batch()) == [(TOKENS, TOKENS)]


def test_groups_of_heads_share_keys():
    assert divided(Attention(attend(is_causal=True, enable_gqa=True), groups=1), batch()) == TRIANGLE


def test_queries_go_on_after_earlier_keys():
    x, target = batch()
    earlier = torch.randn(TEXTS, 144, HEADS * WIDTH, dtype=torch.float64)
    formula = by_hand(added(causal(TOKENS, 144, 16)))
    assert divided(Attention(formula), (x, earlier, target)) == both((64, 80), (64, 144))


def test_sizes_that_are_no_multiples():
    formula = attend(is_causal=True)
    assert divided(Attention(formula), batch(tokens=200), 3) == both((67, 80), (67, 144), (66, 200))


def test_blocks_of_some_texts():
    """Parts of 64 rows at least: the rest of the parts are texts."""
    assert divided(Attention(attend(is_causal=True)), batch(texts=4), 4) == [(64, 64), (64, 128)] * 2 + [
        (64, 128), (64, 64)] * 2  # fmt: skip


def test_padding_that_the_batch_brings_hides_more():
    """Rows that see nothing at all in this batch are zeros, as PyTorch's."""
    padding = torch.rand(TEXTS, 1, 1, TOKENS) > 0.3
    padding[0, :, :, :5] = False

    def formula(q, k, v, mask):
        return attend()(q, k, v, causal() & mask)

    assert divided(Attention(formula), batch(padding)) == TRIANGLE


def test_padding_by_a_number_leaves_rows_whole():
    """A row without any key has equal shares of all keys then, hidden ones too."""
    padding = torch.rand(TEXTS, 1, 1, TOKENS) > 0.3
    padding[0, :, :, :5] = False

    def formula(q, k, v, mask):
        return F.softmax(q @ k.transpose(2, 3) + torch.where(causal() & mask, 0.0, -3e38), -1) @ v

    assert divided(Attention(formula), batch(padding)) == WHOLE


def test_dropout_draws_for_what_a_block_sees():
    """The converter compares with torch, given the masks that were drawn."""
    model, example = Attention(attend(is_causal=True, dropout_p=0.1)), [each.float() for each in batch()]
    made = export_training_step(model, example, F.mse_loss, attention_parts=2)
    assert forms(made) == TRIANGLE


@pytest.mark.parametrize("seed", range(4))
def test_random_masks(seed):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (int(torch.randint(130, 260, (), generator=generator)) for _ in range(2))
    first = torch.randint(0, columns, (rows,), generator=generator)
    first = first.sort()[0] if seed % 2 else (first // 3)
    keys = torch.arange(columns)
    mask = (keys >= first[:, None] - 40) & (keys <= first[:, None] + 40)
    mask |= (keys == 0) | (torch.arange(rows) == rows - 1)[:, None]
    earlier = torch.randn(TEXTS, columns, HEADS * WIDTH, dtype=torch.float64)
    x, target = batch(tokens=rows)
    divided(Attention(by_hand(added(mask))), (x, earlier, target), 4)


def test_scores_that_overflow_do_not_leak():
    model = Attention(attend(is_causal=True))
    with torch.no_grad():
        model.q.weight.mul_(1e3)
        model.k.weight.mul_(1e3)
    assert divided(model, batch()) == TRIANGLE


def test_memory_and_work_follow():
    """Four blocks make 5/8 of the scores, and hold a quarter of them at most at a time."""
    torch.manual_seed(0)
    model = Attention(attend(is_causal=True))
    example = tuple(each.float() for each in batch(tokens=1024))
    whole, taken = (export_training_step(model, example, F.mse_loss, attention_parts=n, check=n > 1) for n in (1, 4))
    before, after = (onnx_remat.rewrite_model(step, "100%", effort=1).report.before for step in (whole, taken))
    assert after.total < before.total / 2
    assert sum(a * b for a, b in forms(taken)) == 2 * 5 / 8 * 1024**2


def test_a_file_from_elsewhere():
    """`add_backward` compares the gradients with differences by itself."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        attention (float[1, 4, 1024, 4] x) => (float[1, 4, 1024, 4] y) {
            q = MatMul (x, wq)
            k = MatMul (x, wk)
            kt = Transpose <perm = [0, 1, 3, 2]> (k)
            scores = MatMul (q, kt)
            hidden = Add (scores, mask)
            shares = Softmax <axis = -1> (hidden)
            y = MatMul (shares, x)
        }""")
    mask = added(causal(1024, 1024)).float().numpy()
    for name, array in {"wq": rng.random((4, 4)), "wk": rng.random((4, 4)), "mask": mask}.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    made = add_backward(model, loss="mse")
    assert forms(made) == both(*[(256, n) for n in (256, 512, 768, 1024)])
