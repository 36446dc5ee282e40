"""Attention a few heads at a time: the same numbers to the last bit, and scores that never all exist at once."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import onnx
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
import torch.nn.functional as F
from onnx_remat.converters.autodiff import add_backward
from onnx_remat.converters.pytorch import budgeted, export_training_step, initial_feeds
from torch import nn

import onnx_remat
from onnx_remat.errors import UsageError
from onnx_remat.ort import runtime
from tests.support.slow import few

TEXTS, HEADS, TOKENS, WIDTH = 2, 4, 24, 4


class Attention(nn.Module):
    """Queries of one input, keys and values of another, or of the same."""

    def __init__(self, groups=HEADS, eager=False, scores=None, **settings):
        super().__init__()
        self.q, self.o = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(2))
        self.k, self.v = (nn.Linear(HEADS * WIDTH, groups * WIDTH) for _ in range(2))
        self.groups, self.eager, self.scores, self.settings = groups, eager, scores, settings

    def forward(self, x, mask=None, y=None):
        y = x if y is None else y
        heads = (project(each).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
                 for project, each in ((self.q, x), (self.k, y), (self.v, y)))  # fmt: skip
        q, k, v = heads
        if self.eager:
            made = self.by_hand(q, k, v, mask)
        else:
            made = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, enable_gqa=self.groups < HEADS, **self.settings
            )
        return self.o(made.transpose(1, 2).flatten(2))

    def by_hand(self, q, k, v, mask):
        """As transformers' eager attention."""
        k, v = (each.repeat_interleave(HEADS // self.groups, 1) for each in (k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(WIDTH)
        if self.scores is not None:
            scores = self.scores(scores)
        if mask is not None:
            scores = scores + mask
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return F.dropout(weights, 0.1 if self.settings.get("dropout_p") else 0.0) @ v


def batch(*more, tokens=TOKENS, dtype=torch.float32):
    x = torch.randn(TEXTS, tokens, HEADS * WIDTH, dtype=dtype)
    return (x, *more, torch.randn(TEXTS, tokens, HEADS * WIDTH, dtype=dtype))


def scores(model: onnx.ModelProto, tokens: int = TOKENS) -> list[int]:
    """How many heads of texts each softmax takes."""
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.value_info}
    softmaxes = [node for node in model.graph.node if node.op_type in ("Softmax", "Exp")]
    return [math.prod(s[:-2]) for node in softmaxes if len(s := shapes[node.output[0]]) > 2 and s[-2] == tokens]


class Several(nn.Module):
    """The sum of several attentions, each with its mask: exported together, they take a third of the time."""

    def __init__(self, *each):
        super().__init__()
        self.each = nn.ModuleList(each)

    def forward(self, x, *masks):
        return sum(each(x, *masks[place : place + 1]) for place, each in enumerate(self.each))


def compared(model, example, parts=3, wanted=(2, 2, 2, 2), **settings):
    """The step in one part and in several, on a batch that neither has seen: equal to the last bit, but for factors.

    ONNX Runtime's optimisations move a factor of queries or keys behind their product where nothing else reads them.
    """
    torch.manual_seed(0)
    count = len(model.each) if isinstance(model, Several) else 1
    one = export_training_step(model, example, F.mse_loss, attention_parts=1, check=False, **settings)
    many = export_training_step(model, example, F.mse_loss, attention_parts=parts, **settings)  # compared with torch
    assert scores(one) == [TEXTS * HEADS] * count
    assert scores(many) == [*wanted, *wanted] * count, "each once forward, once backward"
    feeds = initial_feeds(one, model)
    feeds |= {f"input.{i}": value.numpy() for i, value in enumerate(example) if value is not None}
    for level in ("disable", "all"):
        expected, made = (runtime.outputs(step, feeds, level) for step in (one, many))
        assert expected.keys() == made.keys()
        for name in expected:
            noise = 0 if level == "disable" else 1e-8 + 1e-5 * np.abs(expected[name]).max()
            np.testing.assert_allclose(made[name], expected[name], rtol=0, atol=noise, err_msg=f"{name} at {level}")
    return many


def test_the_numbers_are_those_of_one_part():
    settings = [{}, {"is_causal": True}, {"scale": 3.0}, {"groups": 2}, {"eager": True}, {"eager": True, "groups": 2}]
    compared(Several(*(Attention(**each) for each in settings)), batch())


MASKS = [
    (TOKENS, TOKENS), (TEXTS, 1, TOKENS, TOKENS), (TEXTS, 1, 1, TOKENS), (1, HEADS, TOKENS, TOKENS),
    (TEXTS, HEADS, TOKENS, TOKENS), (HEADS, 1, TOKENS),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_of_every_shape(kind):
    masks = [torch.rand(shape) > 0.3 for shape in MASKS]
    if kind == "float":
        masks = [torch.where(mask, torch.randn(mask.shape), -math.inf) for mask in masks]
    compared(Several(*(Attention() for _ in masks)), batch(*masks))


@pytest.mark.parametrize("eager", few([False, True], [True]))
def test_rows_of_which_a_mask_leaves_nothing_and_scores_that_overflow(eager):
    mask = torch.where(torch.rand(TEXTS, 1, TOKENS, TOKENS) > 0.5, 0.0, -math.inf if not eager else -3e38)
    mask[:, :, 3] = -math.inf if not eager else -3e38
    model = Attention(eager=eager)
    with torch.no_grad():
        model.q.weight.mul_(300)
        model.k.weight.mul_(300)
    compared(model, batch(mask))


@pytest.mark.slow
def test_heads_that_scores_are_scaled_and_bent_by():
    slopes = torch.rand(1, HEADS, 1, 1)
    compared(Attention(eager=True, scores=lambda s: torch.tanh(s / 5) * 5 * slopes), batch())


@pytest.mark.slow
def test_cross_attention():
    other = torch.randn(TEXTS, 17, HEADS * WIDTH)
    x, target = batch()
    compared(Attention(), (x, torch.rand(17) > 0.3, other, target))


@pytest.mark.slow
@pytest.mark.parametrize("opset", few([18, 19, 20, 21, 22, 23], [23]))
def test_opsets(opset):
    compared(Attention(is_causal=True), batch(), opset=opset)


@pytest.mark.slow
def test_float64():
    compared(Attention(is_causal=True).double(), batch(dtype=torch.float64))


PARTS = [(2, [4, 4]), (3, [2] * 4), (8, [1] * 8), (100, [1] * 8), (7, [2] * 4)]


@pytest.mark.parametrize(
    ("parts", "wanted"),
    few(PARTS, PARTS[1:2], several=True),
    ids=str,
)
def test_parts_are_some_heads_of_one_text_or_texts_whole(parts, wanted):
    compared(Attention(), batch(), parts, wanted)


@pytest.mark.parametrize("shape", few([(6, 1, TOKENS, TOKENS), (HEADS, 1, TOKENS)], [(HEADS, 1, TOKENS)]), ids=str)
def test_a_part_of_several_texts(shape, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "TEXTS", 6)
    compared(Attention(), batch(torch.rand(shape) > 0.3), parts=3, wanted=(8, 8, 8))


@pytest.mark.parametrize("eager", few([False, True], [False]))
def test_dropout_of_scores_keeps_what_was_drawn_and_nothing_else(eager):
    """The converter compares with torch, given the masks that were drawn."""
    model, example = Attention(dropout_p=0.1, is_causal=not eager, eager=eager), batch()
    made = export_training_step(model, example, F.mse_loss, attention_parts=4)
    phases = {o: n.metadata_props for n in made.graph.node for o in n.output}
    stage = {o: next(p.value for p in props if p.key == "phase") for o, props in phases.items()}
    shapes = {v.name: v.type.tensor_type for v in made.graph.value_info}
    drops = [node for node in made.graph.node if node.op_type == "Dropout"]
    assert [math.prod(d.dim_value for d in shapes[n.output[0]].shape.dim[:-2]) for n in drops] == [2] * 4
    for node in made.graph.node:
        for name in node.input if stage.get(node.output[0]) == "backward" else ():
            sizes = [d.dim_value for d in shapes[name].shape.dim[-2:]] if stage.get(name) == "forward" else []
            if sizes == [TOKENS] * 2:
                assert shapes[name].elem_type == onnx.TensorProto.BOOL


@pytest.mark.slow
def test_each_head_draws_for_itself():
    """Also where ONNX Runtime's generator is seeded, all parts together drop as much as is said."""
    model = Attention(dropout_p=0.5)
    made = export_training_step(model, batch(), F.mse_loss, attention_parts=8)
    masks = [node.output[1] for node in made.graph.node if node.op_type == "Dropout"]
    for name in masks:
        made.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.BOOL, None))
    x, target = batch()
    feeds = initial_feeds(made, model) | {"input.0": x.numpy(), "input.1": target.numpy()}
    drawn = [runtime.outputs(made, feeds)[name] for name in masks]
    assert len({mask.tobytes() for mask in drawn}) == len(masks)


def test_scores_that_others_read_are_left_alone():
    class Watched(Attention):
        def by_hand(self, q, k, v, mask):
            self.weights = F.softmax(q @ k.transpose(2, 3), -1)
            return self.weights @ v

        def forward(self, x):
            return super().forward(x) + self.weights.mean()

    example = batch()
    made = export_training_step(Watched(eager=True), example, F.mse_loss, attention_parts=4)
    assert scores(made) == [TEXTS * HEADS]


def weights(q, k, bent=lambda scores: scores):
    return F.softmax(bent(q @ k.transpose(2, 3)), -1)


def ends_early(p, v):
    made = p @ v
    return p @ torch.tanh(made + made.mean())


MIXED = {
    "heads mixed before": lambda q, k, v: (
        weights(q, k, lambda s: torch.einsum("bhts,hg->bgts", s, torch.eye(4) + 1)) @ v
    ),
    "heads mixed after": lambda q, k, v: torch.einsum("bhts,hg->bgts", weights(q, k), torch.eye(4) + 1) @ v,
    "another text": lambda q, k, v: weights(q, k, lambda s: s.flip(0)) @ v,
    "another head": lambda q, k, v: weights(q, k, lambda s: s.roll(1, 1)) @ v,
    "softmax over heads": lambda q, k, v: F.softmax(q @ k.transpose(2, 3), 1) @ v,
    "the largest of all heads": lambda q, k, v: weights(q, k, lambda s: s * s.amax((1,), keepdim=True)) @ v,
    "axes swapped": lambda q, k, v: weights(q, k, lambda s: s.transpose(0, 1)).transpose(0, 1) @ v,
    "values of all heads' results": lambda q, k, v: ends_early(weights(q, k), v),
}
ALONE = {
    "over columns": lambda q, k, v: F.softmax(q @ k.transpose(2, 3), -2) @ v,
    "turned": lambda q, k, v: weights(q, k).transpose(2, 3) @ v,
    "counted otherwise": lambda q, k, v: weights(
        q, k, lambda s: s.reshape(HEADS, TEXTS, TOKENS, TOKENS)).reshape(TEXTS, HEADS, TOKENS, TOKENS) @ v,
    "normalized first": lambda q, k, v: weights(q, k, lambda s: s - s.mean((2, 3), keepdim=True)) @ v,
    "clamped": lambda q, k, v: weights(q, k, lambda s: s.clamp(-0.5, 0.5).relu()) @ v,
    "exponentials": lambda q, k, v: (s := q @ k.transpose(2, 3), (s - s.logsumexp(-1, keepdim=True)).exp())[1] @ v,
    "no gradient of scores": lambda q, k, v: weights(q, k).detach() @ v,
}  # fmt: skip


class Written(Attention):
    """An attention by its formula."""

    def __init__(self, formula):
        super().__init__(eager=True)
        self.formula = formula

    def by_hand(self, q, k, v, mask):
        return self.formula(q, k, v)


def nodes_of_each(model: onnx.ModelProto, formulas) -> dict[str, int]:
    """How many nodes compute each formula."""
    labels = [entry.value for node in model.graph.node for entry in node.metadata_props if entry.key == "module"]
    return {name: labels.count(f"each.{place}") for place, name in enumerate(formulas)}


@pytest.mark.slow
def test_scores_of_heads_that_depend_on_one_another_are_left_alone():
    model = Several(*map(Written, MIXED.values()))
    one, many = (export_training_step(model, batch(), F.mse_loss, attention_parts=n, check=False) for n in (1, 4))
    assert nodes_of_each(one, MIXED) == nodes_of_each(many, MIXED)
    assert min(nodes_of_each(one, MIXED).values()) > 5


@pytest.mark.slow
def test_heads_that_are_computed_alone_otherwise():
    """Bit for bit, with more nodes."""
    model, example = Several(*map(Written, ALONE.values())), batch()
    one, many = (export_training_step(model, example, F.mse_loss, attention_parts=n, check=n > 1) for n in (1, 3))
    more = {name: count / nodes_of_each(one, ALONE)[name] for name, count in nodes_of_each(many, ALONE).items()}
    assert min(more.values()) > 1.5, more
    feeds = initial_feeds(one, model) | {f"input.{i}": value.numpy() for i, value in enumerate(example)}
    expected, made = (runtime.outputs(step, feeds) for step in (one, many))
    for name in expected:
        np.testing.assert_array_equal(made[name], expected[name], err_msg=name)


def test_a_jax_step_gets_its_attention_in_parts():
    """16 MiB of scores in blocks of rows, see `test_attention_rows`; the converter compares with JAX by itself."""
    jax = pytest.importorskip("jax")
    pytest.importorskip("optax")
    from onnx_remat.converters.jax import export as converter

    def loss(params, x):
        q, k, v = ((x @ params[name]).reshape(1, 1024, HEADS, WIDTH) for name in "qkv")
        return (jax.nn.dot_product_attention(q, k, v, is_causal=True) ** 2).mean()

    rng = np.random.default_rng(0)
    params = {name: rng.standard_normal((16, 16)).astype(np.float32) for name in "qkv"}
    made = converter.export_training_step(loss, params, rng.standard_normal((1, 1024, 16)).astype(np.float32))
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in made.graph.value_info}
    parts = [shapes[n.output[0]] for n in made.graph.node if n.op_type == "Exp"]
    blocks = [HEADS * 256 * keys for keys in (256, 512, 768, 1024)]
    assert [math.prod(shape) for shape in parts] == blocks + blocks[::-1]


SEEDED = """
import hashlib, torch
from onnx_remat.converters.pytorch import export_training_step
from torch import nn
import torch.nn.functional as F
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
x = torch.randn(2, 24, 16)
made = export_training_step(Net(), (x, torch.randn(2, 4, 24, 4)), F.mse_loss, attention_parts=3, check=False)
print(hashlib.sha256(made.SerializeToString(deterministic=True)).hexdigest())
"""


@pytest.mark.slow
def test_the_file_is_the_same_every_time():
    made = {
        subprocess.run(
            [sys.executable, "-c", SEEDED], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "01"
    }
    assert len(made) == 1


@pytest.mark.slow
def test_small_scores_heads_too_wide_and_one_part_are_left_alone():
    model, example = Attention(is_causal=True), batch()
    steps = [export_training_step(model, example, F.mse_loss, attention_parts=n, check=False) for n in (1, None)]
    assert steps[0].SerializeToString() == steps[1].SerializeToString()
    short = batch(tokens=2 * WIDTH)
    made = export_training_step(model, short, F.mse_loss, attention_parts=4, check=False)
    assert scores(made, 2 * WIDTH) == [TEXTS * HEADS]


@pytest.mark.parametrize("wrong", [0, -1, 2.5, True, "4"])
def test_what_is_no_number_of_parts_is_refused(wrong):
    with pytest.raises(UsageError, match="attention_parts"):
        export_training_step(Attention(), batch(), F.mse_loss, attention_parts=wrong)


@pytest.mark.slow
def test_no_two_parts_exist_at_once():
    """Of 33.6 MB of scores, a step holds those of a part, in as many forms as before; a budget may lie below them."""
    torch.manual_seed(0)
    model, tokens = Attention(), 1024
    example = batch(torch.rand(tokens, tokens) > 0.3, tokens=tokens)
    whole, taken = (export_training_step(model, example, F.mse_loss, attention_parts=n) for n in (1, None))
    assert scores(taken, tokens) == [2] * 8
    every = 4 * TEXTS * HEADS * tokens**2
    reports = [onnx_remat.rewrite_model(step, "100%", effort=1).report for step in (whole, taken)]
    before, after = (report.before.total for report in reports)
    assert before > 2 * every
    assert after < 6 * every / 4
    with pytest.raises(onnx_remat.BudgetInfeasibleError):
        onnx_remat.rewrite_model(whole, every, effort=1)


@pytest.mark.slow
def test_a_budgeted_step_in_parts_trains_as_torch_does():
    torch.manual_seed(1)
    ours, theirs = (Attention(is_causal=True) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    step = budgeted(ours, F.mse_loss, torch.optim.SGD(ours.parameters(), 0.1), batch(), attention_parts=4)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1)
    for _ in range(3):
        x, target = batch()
        optimizer.zero_grad()
        loss = F.mse_loss(theirs(x), target)
        loss.backward()
        optimizer.step()
        assert step((x, target)) == pytest.approx(loss.item(), rel=1e-5)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def forward_file(texts: int, heads: int, tokens: int, width: int) -> onnx.ModelProto:
    """Attention of one input, as others export it."""
    rng = np.random.default_rng(0)
    wide = heads * width
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 20]>
        attention (float[{texts}, {tokens}, {wide}] x) => (float[{texts}, {tokens}, {wide}] y) {{
            by = Constant <value_ints = [{texts}, {tokens}, {heads}, {width}]> ()
            flat = Constant <value_ints = [{texts}, {tokens}, {wide}]> ()
            scale = Constant <value_float = {1 / math.sqrt(width)}> ()
            {
        "".join(
            f'''
            {n}m = MatMul (x, w{n})
            {n}r = Reshape ({n}m, by)
            {n} = Transpose <perm = [0, 2, {"3, 1" if n == "k" else "1, 3"}]> ({n}r)'''
            for n in "qkv"
        )
    }
            product = MatMul (q, k)
            scores = Mul (product, scale)
            weights = Softmax <axis = -1> (scores)
            made = MatMul (weights, v)
            turned = Transpose <perm = [0, 2, 1, 3]> (made)
            y = Reshape (turned, flat)
        }}""")
    for name in "qkv":
        array = rng.standard_normal((wide, wide)).astype(np.float32) / wide
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, f"w{name}"))
    return model


def test_a_forward_file_gets_its_attention_in_parts():
    """33.6 MB of scores, in parts of 8 MiB; `add_backward` compares the gradients with differences by itself."""
    assert scores(add_backward(forward_file(2, 4, 1024, 4), loss="mse"), 1024) == [2] * 8
    assert scores(add_backward(forward_file(2, 4, 64, 4), loss="mse"), 64) == [8]


def test_a_single_matrix_of_scores_is_not_divided_by_heads():
    """One text and one head, as in a causal file without an axis of heads: 16 MiB of scores."""
    forward = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        attention (float[1, 2048, 8] x) => (float[1, 2048, 8] y) {
            q = MatMul (x, wq)
            k = MatMul (x, wk)
            turned = Transpose <perm = [0, 2, 1]> (k)
            scores = MatMul (q, turned)
            weights = Softmax <axis = -1> (scores)
            y = MatMul (weights, x)
        }""")
    for name in ("wq", "wk"):
        forward.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((8, 8), np.float32), name))
    step = add_backward(forward, loss="mse", check=False)
    assert [value.name for value in step.graph.output] == ["loss", "grad.wq", "grad.wk"]
