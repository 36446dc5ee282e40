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
from tests.support.slow import few

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


class Several(nn.Module):
    """The sum of several attentions: exported together, they take a third of the time."""

    def __init__(self, formulas):
        super().__init__()
        self.each = nn.ModuleList(map(Attention, formulas))

    def forward(self, x, *more):
        return sum(attention(x, *more) for attention in self.each)


def divided(model, example, parts=2, other=None):
    """The step in parts, after a comparison with the step in one part, on the example or another batch."""
    torch.manual_seed(0)
    model = model.double()
    one = export_training_step(model, example, F.mse_loss, attention_parts=1, check=False)
    many = export_training_step(model, example, F.mse_loss, attention_parts=parts)  # compared with torch as well
    feeds = initial_feeds(one, model)
    feeds |= {f"input.{i}": value.numpy() for i, value in enumerate(example if other is None else other)}
    for level in ("disable", "all"):
        expected, made = (runtime.outputs(step, feeds, level) for step in (one, many))
        assert expected.keys() == made.keys()
        for name in expected:
            np.testing.assert_allclose(made[name], expected[name], rtol=1e-9, atol=1e-12, err_msg=f"{name} at {level}")
    return many


def forms(model, module=None, op_types=("Softmax", "Exp")):
    """The sizes of the softmaxes (or exponentials), of one module if it is named."""
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.value_info}
    labels = [{entry.key: entry.value for entry in node.metadata_props} for node in model.graph.node]
    made = [
        shapes[node.output[0]]
        for node, label in zip(model.graph.node, labels, strict=True)
        if node.op_type in op_types and module in (None, label.get("module"))
    ]
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


def by_numbers(first, second):
    def formula(q, k, v, pad):
        scores = q @ k.transpose(2, 3) + added(causal(), first)
        return F.softmax(scores + torch.where(pad, 0.0, second), -1) @ v

    return formula


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
    "a bias of constants": (by_hand(added(causal()), bent=lambda s: s + torch.arange(TOKENS) / 9), TRIANGLE),
    "padding first": (
        lambda q, k, v: F.softmax((q @ k.transpose(2, 3)).masked_fill(torch.arange(TOKENS) == 3, HIDDEN)
                                  + added(causal()), -1) @ v, TRIANGLE),
    "scaled afterwards": (by_hand(added(causal()), after=lambda s: s / 3), TRIANGLE),
    "added on the left": (lambda q, k, v: F.softmax(added(causal()) + q @ k.transpose(2, 3), -1) @ v, TRIANGLE),
    "not so large a number": (by_hand(added(causal(), -1e9)), TRIANGLE),
    "parts that do not see one another": (
        by_hand(added(torch.block_diag(*[torch.ones(64, 64)] * 2).bool())), both((64, 64), (64, 64))),
}  # fmt: skip


@pytest.mark.slow
def test_blocks_have_the_keys_that_they_may_see():
    made = divided(Several(formula for formula, _ in FORMULAS.values()), batch())
    found = {name: forms(made, f"each.{place}") for place, name in enumerate(FORMULAS)}
    assert found == {name: expected for name, (_, expected) in FORMULAS.items()}


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
    "a number, scaled down": by_hand(added(causal(), -1e9), after=lambda s: s * 1e-9),
    "a number that another takes back": by_hand(added(causal(), -1e9), bent=lambda s: s + added(~causal(), -1e9)),
    "half hidden": by_hand(added(causal(), -2.0)),
    "a query that sees nothing in one head": by_hand(
        added(torch.stack([causal() & (torch.arange(TOKENS) > 4), causal()]), -3e38)
    ),
    "clamped before": by_hand(added(causal()), bent=lambda s: s.clamp(-0.5, 0.5)),
    "the largest taken away": lambda q, k, v: (
        (
            (s := q @ k.transpose(2, 3) + added(causal())),
            (e := (s - s.amax(-1, keepdim=True)).exp()),
            e / e.sum(-1, True),
        )[-1]
        @ v
    ),
}


@pytest.mark.slow
def test_rows_are_left_whole_where_a_hidden_score_counts():
    made = divided(Several(LEFT.values()), batch())
    assert {name: forms(made, f"each.{place}") for place, name in enumerate(LEFT)} == dict.fromkeys(LEFT, WHOLE)


@pytest.mark.slow
def test_a_trained_bias_of_each_key_is_a_sum_over_queries():
    model = Attention(lambda q, k, v, bias: by_hand(added(causal()), bent=lambda s: s + bias)(q, k, v), bias=TOKENS)
    assert forms(divided(model, batch())) == [(TOKENS, TOKENS)]


@pytest.mark.slow
def test_groups_of_heads_share_keys():
    assert forms(divided(Attention(attend(is_causal=True, enable_gqa=True), groups=1), batch())) == TRIANGLE


@pytest.mark.slow
def test_queries_go_on_after_earlier_keys():
    x, target = batch()
    earlier = torch.randn(TEXTS, 144, HEADS * WIDTH, dtype=torch.float64)
    formula = by_hand(added(causal(TOKENS, 144, 16)))
    assert forms(divided(Attention(formula), (x, earlier, target))) == both((64, 80), (64, 144))


@pytest.mark.slow
def test_sizes_that_are_no_multiples():
    formula = attend(is_causal=True)
    assert forms(divided(Attention(formula), batch(tokens=200), 3)) == both((67, 80), (67, 144), (66, 200))


@pytest.mark.slow
def test_blocks_of_some_texts():
    """Parts of 64 rows at least: the rest of the parts are texts."""
    assert forms(divided(Attention(attend(is_causal=True)), batch(texts=4), 4)) == [(64, 64), (64, 128)] * 2 + [
        (64, 128), (64, 64)] * 2  # fmt: skip


def test_padding_that_the_batch_brings_hides_more():
    """Rows that see nothing at all in this batch are zeros, as PyTorch's."""
    padding = torch.rand(TEXTS, 1, 1, TOKENS) > 0.3
    padding[0, :, :, :5] = False

    def formula(q, k, v, mask):
        return attend()(q, k, v, causal() & mask)

    assert forms(divided(Attention(formula), batch(padding))) == TRIANGLE


PADDED = {
    "not shown": (lambda q, k, v, pad: attend()(q, k, v, ~(~causal() | ~pad)), TRIANGLE),
    "added to the mask": (
        lambda q, k, v, pad: attend()(q, k, v, added(causal()) + torch.where(pad, 0.0, HIDDEN)), TRIANGLE),
    "a number after the mask": (by_numbers(HIDDEN, -1e30), TRIANGLE),
    "a number for both": (
        lambda q, k, v, pad: F.softmax(q @ k.transpose(2, 3) + torch.where(causal() & pad, 0.0, -1e30), -1) @ v, None),
    "a number, then a number": (by_numbers(-1e30, -1e30), None),
    "a number, then less": (by_numbers(-1e30, -1e35), None),
}  # fmt: skip


@pytest.mark.parametrize("name", few(PADDED, ["added to the mask"]))
def test_padding_that_the_batch_brings_in_other_forms(name):
    """A row without any key has equal shares of all keys where numbers hide, hidden ones too: it is left whole."""
    formula, expected = PADDED[name]
    padding = torch.rand(TEXTS, 1, 1, TOKENS) > 0.3
    padding[..., 0] = True
    more = padding.clone()
    more[0, :, :, :5] = False
    made = divided(Attention(formula), batch(padding), other=batch(more))
    assert forms(made) == (expected or WHOLE)


def test_dropout_draws_for_what_a_block_sees():
    """The converter compares with torch, given the masks that were drawn."""
    model, example = Attention(attend(is_causal=True, dropout_p=0.1)), [each.float() for each in batch()]
    made = export_training_step(model, example, F.mse_loss, attention_parts=2)
    assert forms(made) == TRIANGLE
    assert forms(made, op_types=("Dropout",)) == TRIANGLE[:2]


@pytest.mark.parametrize("seed", few(range(8), [1]))
def test_random_masks(seed):
    """A band with holes, or all up to its end, of queries and keys in other numbers."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns, width = (
        int(torch.randint(*ends, (), generator=generator)) for ends in ((130, 260),) * 2 + ((4, 20),)
    )
    middle = torch.arange(rows)[:, None] * columns // rows
    keys = torch.arange(columns)
    mask = (keys <= middle + width) & (torch.rand(rows, columns, generator=generator) > 0.3)
    mask &= (keys >= middle - width) | (seed % 2 == 0)
    mask |= (keys - middle).abs() <= 2
    earlier = torch.randn(TEXTS, columns, HEADS * WIDTH, dtype=torch.float64)
    x, target = batch(tokens=rows)
    found = forms(divided(Attention(by_hand(added(mask))), (x, earlier, target), 4))
    assert max(queries for queries, _ in found) < rows


@pytest.mark.slow
def test_scores_of_any_size():
    model = Attention(attend(is_causal=True))
    with torch.no_grad():
        model.q.weight.mul_(1e3)
        model.k.weight.mul_(1e3)
    assert forms(divided(model, batch())) == TRIANGLE


def test_memory_and_work_follow():
    """Four blocks make 5/8 of the scores, and hold a quarter of them at most at a time."""
    torch.manual_seed(0)
    model = Attention(attend(is_causal=True))
    example = tuple(each.float() for each in batch(tokens=1024))
    whole, taken = (export_training_step(model, example, F.mse_loss, attention_parts=n, check=n > 1) for n in (1, 4))
    before, after = (onnx_remat.rewrite_model(step, "100%", effort=1).report.before for step in (whole, taken))
    assert after.total < before.total / 2
    assert sum(a * b for a, b in forms(taken)) == 2 * 5 / 8 * 1024**2


@pytest.mark.slow
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
    blocks = [(256, n) for n in (256, 512, 768, 1024)]
    assert forms(add_backward(model, loss="mse")) == both(*blocks)
    twice = onnx.parser.parse_graph("""again (float[1, 4, 1024, 4] x) => (float[1, 4, 1024, 4] z) {
        second = MatMul (y, kt)
        more = Add (second, mask)
        others = Softmax <axis = -1> (more)
        z = MatMul (others, x)
    }""")
    model.graph.node.extend(twice.node)
    model.graph.output[0].name = "z"
    made = forms(add_backward(model, loss="mse"))  # the second one's queries are the first one's results
    assert made == [*blocks, *both(*blocks), *blocks[::-1]]
