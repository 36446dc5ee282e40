"""Steps that hold no more than a framework does: cross entropies, masks, SiLU, and constants of the backward pass."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
import torch.nn.functional as F
from onnx_remat.converters.passes.add_to_softmax import add_to_softmax
from onnx_remat.converters.pytorch import export_training_step
from torch import nn

from onnx_remat.ort import runtime
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.ort.prepare import Preparation
from onnx_remat.rewrite.original import begin
from tests.support.slow import few

ROWS, WIDTH, WORDS = 64, 16, 4096
LOGITS = ROWS * WORDS * 4


def executed(model: onnx.ModelProto):
    """The step as ONNX Runtime runs it by default."""
    return as_executed(model, None, "all", Preparation(kernels_of("cpu")))


def count(model: onnx.ModelProto, op_type: str) -> int:
    return sum(node.op_type == op_type for node in model.graph.node)


def language(weight=None, **loss) -> onnx.ModelProto:
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))
    words = torch.randint(0, WORDS, (ROWS,))
    batch = words, torch.where(words % 7 == 0, -100, words)
    return export_training_step(model, batch, lambda y, t: F.cross_entropy(y, t, weight, **loss))


def test_factors_are_looked_at_once_each():
    """A number that is squared forty times has a million millions of ways through its factors."""

    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x):
            w = self.w
            for _ in range(40):
                w = w * w
            return (x - w).square().mean()

    made = export_training_step(Squared(), torch.zeros(4), check=False)
    assert count(made, "ScatterElements") == 0


def test_a_product_may_have_thousands_of_factors():
    info = onnx.helper.make_tensor_value_info
    names = ["loss", *(f"product.{i}" for i in range(3000))]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("ReduceSum", ["x"], ["loss"], keepdims=0)]
        + [onnx.helper.make_node("Mul", [a, "x"], [b]) for a, b in itertools.pairwise(names)]
        + [onnx.helper.make_node("Add", [names[-1], "x"], ["grad.x"])],
        "g", [info("x", 1, [3])], [info("loss", 1, []), info("grad.x", 1, [3])],
        value_info=[info(name, 1, [3]) for name in names[1:]],
    )  # fmt: skip
    model = ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)]))
    add_to_softmax(model)
    assert len(model.graph) == 3002


@pytest.mark.parametrize("reduction", few(["mean", "sum"], ["mean"]))
def test_a_cross_entropy_takes_two_matrices_as_large_as_its_logits_at_most(reduction):
    original = begin(language(reduction=reduction), {"run_by": "loop"})
    state = 2 * (2 * WORDS * WIDTH + WORDS) * 4  # parameters and gradients
    assert original.footprint.weights < LOGITS / 8  # no zeros are held
    assert original.footprint.live <= 2 * LOGITS + state


def test_the_gradient_is_computed_after_the_loss_that_reads_the_same_logarithms():
    found = executed(language())
    steps = [found.compiled.graph.ops[i] for i in found.order.order]
    at = {name: step for step, op in enumerate(steps) for name in op.writes}
    (scatter,) = (step for step, op in enumerate(steps) if op.node.op_type == "ScatterElements" and _adds_to_logits(op))
    assert at["loss"] < scatter


def _adds_to_logits(op) -> bool:
    return any(a.name == "axis" and a.i == 1 for a in op.node.attribute)


@pytest.mark.parametrize("shape", few([(5, 7), (3, 7, 4), (2, 7, 3, 3)], [(3, 7, 4)]))
@pytest.mark.parametrize("extra", [{}, {"weight": torch.rand(7) + 0.1}, {"label_smoothing": 0.1}, {"reduction": "sum"}])
def test_gradients_of_every_kind_of_cross_entropy_are_torchs(shape, extra):
    model = nn.Conv1d(7, 7, 1) if len(shape) == 3 else nn.Conv2d(7, 7, 1) if len(shape) == 4 else nn.Linear(7, 7)
    target = torch.randint(0, 7, (shape[0], *shape[2:]))
    target.reshape(-1)[0] = -100
    made = export_training_step(model, (torch.randn(shape), target), lambda y, t: F.cross_entropy(y, t, **extra))
    properties = {p.key: p.value for p in made.metadata_props}
    assert float(properties["check.error"]) < 1e-5
    if extra.keys() <= {"reduction"}:
        assert count(made, "ScatterElements") == 1 and count(made, "Sub") == 0


def test_zeros_that_an_embeddings_gradient_is_added_to_are_not_held():
    model = nn.Sequential(nn.Embedding(WORDS, 64), nn.Linear(64, 1))
    made = export_training_step(model, (torch.randint(0, WORDS, (32,)), torch.randn(32, 1)), F.mse_loss)
    weights = begin(made, {"run_by": "loop"}).footprint.weights
    assert weights < WORDS * 64 * 4 / 8


def test_constants_of_the_backward_pass_are_right_whatever_the_loss_is():
    model = nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, 1))
    made = export_training_step(model, (torch.randint(0, 9, (32,)), torch.randn(32, 1)), F.mse_loss)
    feeds = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    feeds |= {"input.0": np.arange(32) % 9, "input.1": np.full((32, 1), np.nan, np.float32)}
    found = runtime.outputs(made, feeds, "all")
    assert np.isnan(found["loss"])
    assert not found["grad.0.weight"][9:].any()  # rows that no word picks stay zero though the loss is not a number


class Gated(nn.Module):
    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, wide), nn.Linear(width, wide), nn.Linear(wide, width)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


@pytest.mark.slow
def test_silu_is_held_in_two_parts():
    rows, width, wide, layers = 64, 8, 4096, 6
    model = nn.Sequential(*[Gated(width, wide) for _ in range(layers)])
    made = export_training_step(model, (torch.randn(rows, width), torch.randn(rows, width)), F.mse_loss)
    original = begin(made, {"run_by": "loop"})
    one, weights = rows * wide * 4, 3 * width * wide * 4 * layers
    # per layer: the gate, its sigmoid, the other branch, their product; and what the last layer's backward pass makes
    assert original.footprint.live <= (4 * layers + 3) * one + 2 * weights


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x, mask=None):
        q, k, v = self.project(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


def test_a_causal_mask_needs_no_look_for_rows_of_nothing():
    made = _attention(None)
    assert count(made, "Softmax") == 1 and count(made, "ReduceMin") == count(made, "ReduceMax") == 0


@pytest.mark.slow
def test_nor_does_one_of_any_batch():
    free = {f"input.{i}": {0: "batch"} for i in range(2)}
    made = export_training_step(
        Masked(), (torch.randn(2, 6, 8), torch.randn(2, 2, 6, 4)), F.mse_loss, dynamic_dims=free
    )
    assert count(made, "Softmax") == 1 and count(made, "ReduceMin") == count(made, "ReduceMax") == 0


@pytest.mark.slow
def test_a_mask_that_follows_from_an_open_size_is_looked_at():
    """Of a batch of eight or more the last rows would be empty: what two rows show says nothing of them."""
    free = {f"input.{i}": {0: "batch"} for i in range(2)}
    batch = (torch.randn(2, 6, 8), torch.randn(2, 2, 6, 4))
    made = export_training_step(Masked(by_row=True), batch, F.mse_loss, dynamic_dims=free)
    assert count(made, "ReduceMax") == 1
    initializers = {tensor.name: math.prod(tensor.dims) for tensor in made.graph.initializer}
    chosen = [node.input[1] for node in made.graph.node if node.op_type == "Where"]
    assert chosen and all(initializers.get(name) == 1 for name in chosen)  # one zero, not as many as there are scores


def test_so_is_one_of_fixed_shape_whose_entries_follow_from_an_open_size():
    """A batch of one leaves nothing of any row."""
    free = {f"input.{i}": {0: "batch"} for i in range(2)}
    batch = (torch.randn(2, 6, 8), torch.randn(2, 2, 6, 4))
    made = export_training_step(ByCount(), batch, F.mse_loss, dynamic_dims=free)
    assert count(made, "ReduceMax") == 1


class ByCount(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return self.attention(x, (torch.arange(6) < (x.shape[0] - 1) * 6)[None, None, None].expand(1, 1, 6, 6))


class Masked(nn.Module):
    """Attention under a mask as large as the batch, as models of texts make theirs."""

    def __init__(self, by_row: bool = False) -> None:
        super().__init__()
        self.attention, self.by_row = Attention(), by_row

    def forward(self, x):
        places = torch.arange(6)
        mask = (places[:, None] >= places[None]).expand(x.shape[0], 1, 6, 6)
        if self.by_row:
            mask = mask & (torch.arange(x.shape[0]) < 8)[:, None, None, None]
        return self.attention(x, mask)


def _attention(mask) -> onnx.ModelProto:
    batch = (torch.randn(2, 6, 8), torch.randn(2, 2, 6, 4))
    if mask is None:
        return export_training_step(Attention(), batch, F.mse_loss)
    batch = (batch[0], mask, batch[1])
    return export_training_step(Attention(), batch, F.mse_loss)


def test_a_mask_from_the_batch_may_leave_nothing_of_a_row():
    mask = torch.rand(2, 1, 6, 6) > 0.5
    mask[0, :, 2] = False  # all of a row
    made = _attention(mask)  # compared with torch by the converter
    assert count(made, "ReduceMin") == 0 and count(made, "ReduceMax") == 1


def test_so_may_a_mask_that_is_drawn_at_random():
    """Every step draws another: what one of them shows says nothing of the next."""

    class Drawn(Attention):
        def forward(self, x):
            return super().forward(x, torch.rand(6, 6) < 0.6)

    made = export_training_step(Drawn(), (torch.randn(2, 6, 8), torch.randn(2, 2, 6, 4)), F.mse_loss)
    assert count(made, "ReduceMin") == 0 and count(made, "ReduceMax") == 1


def test_arithmetic_of_an_expanded_value_is_done_before_it_is_expanded():
    made = export_training_step(nn.Linear(64, 512), (torch.randn(8, 64), torch.randn(8)), _mean_of_squares)
    wide = [v.name for v in made.graph.value_info if [d.dim_value for d in v.type.tensor_type.shape.dim] == [8, 512]]
    backward = {o for n in made.graph.node for o in n.output if any(p.value == "backward" for p in n.metadata_props)}
    assert len(backward & set(wide)) <= 2  # twice the output, and that times the narrow rest


@pytest.mark.parametrize("causal", [False, True])
def test_products_of_attention_read_heads_as_they_lie(causal, tmp_path):
    """Without reshapes to one axis of matrices, and factors between products and transposes that they can include."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Parameter(torch.randn(2, 3, 6, 4)) for _ in range(3))

        def forward(self, x):
            return F.scaled_dot_product_attention(self.q * x, self.k, self.v, is_causal=causal)

    made = export_training_step(Heads(), (torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 4)), F.mse_loss)
    assert float({p.key: p.value for p in made.metadata_props}["check.error"]) < 1e-5
    assert count(made, "MatMul") == 6 and count(made, "Reshape") == 0
    run = Counter(node.op_type for node in runtime.optimized(made, tmp_path, "all").graph.node)
    assert run["Transpose"] == run["Reshape"] == 0 and run["FusedMatMul"] + run["MatMul"] == 6


def _mean_of_squares(y, target):
    return ((y.pow(2).mean(-1) - target) * 3).abs().sum()


@pytest.mark.parametrize("free", few([False, True], [False]))
def test_the_gradient_of_what_was_split_is_put_together_again(free):
    """Not padded to the whole three times and added, which CUDA's kernel takes half a ViT's step for."""
    options = {"dynamic_dims": {f"input.{i}": {0: "batch"} for i in range(2)}} if free else {}
    made = export_training_step(Attention(), (torch.randn(2, 6, 8), torch.randn(2, 2, 6, 4)), F.mse_loss, **options)
    assert count(made, "Pad") == 0
    assert len(next(n for n in made.graph.node if n.op_type == "Concat" and len(n.input) == 3).input) == 3


def test_parts_that_leave_a_gap_are_still_padded():
    model = Parts()
    made = export_training_step(model, (torch.randn(3, 8), torch.randn(3, 2)), F.mse_loss)
    assert float({p.key: p.value for p in made.metadata_props}["check.error"]) < 1e-5
    assert count(made, "Pad") > 0


class Parts(nn.Module):
    """Reads two of four parts, one of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8)

    def forward(self, x):
        x = self.wide(x)
        return x[:, :2] * x[:, 4:6] + x[:, :2]


def test_a_step_of_any_batch_looks_once_for_rows_of_nothing_and_measures_nothing_by_size():
    free = {f"input.{i}": {0: "batch"} for i in range(3)}
    mask = torch.rand(2, 1, 6, 6) > 0.5
    batch = (torch.randn(2, 6, 8), mask, torch.randn(2, 2, 6, 4))
    made = export_training_step(Attention(), batch, F.mse_loss, dynamic_dims=free)
    assert count(made, "ReduceMin") == 0 and count(made, "ReduceMax") == 1
    assert count(made, "Size") == 0


class Sliced(nn.Module):
    """All of a batch, and all but the first of each row, as models of texts slice their last states."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 8)

    def forward(self, x):
        return self.wide(x)[:, slice(0, None)][:, 1:]


def test_what_takes_all_of_an_open_batch_copies_nothing():
    free = {f"input.{i}": {0: "batch"} for i in range(2)}
    made = export_training_step(Sliced(), (torch.randn(3, 8), torch.randn(3, 7)), F.mse_loss, dynamic_dims=free)
    assert count(made, "ScatterND") == 0 and count(made, "Slice") == 1


class Tied(nn.Module):
    """A language model whose embedding makes its logits, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(50, 8), nn.Linear(8, 8)

    def forward(self, words):
        return F.linear(torch.tanh(self.mix(self.embed(words))), self.embed.weight).flatten(0, 1)


@pytest.mark.parametrize("padding", [None, 3])
def test_a_tied_embedding_is_summed_in_place(padding):
    model = Tied()
    model.embed.padding_idx = padding
    made = export_training_step(model, (torch.randint(0, 50, (3, 5)), torch.randint(0, 50, (15,))), F.cross_entropy)
    makers = {name: node for node in made.graph.node for name in node.output}
    gradient = makers["grad.embed.weight"]
    assert gradient.op_type == "ScatterElements" and makers[gradient.input[0]].op_type in ("Gemm", "MatMul")
    assert count(made, "Add") == 0


def test_what_is_scattered_and_read_twice_stays():
    class Twice(Tied):
        def forward(self, words):
            return super().forward(words) + (self.embed.weight * torch.linspace(0, 1, 8)).sum()

    made = export_training_step(Twice(), (torch.randint(0, 50, (3, 5)), torch.randint(0, 50, (15,))), F.cross_entropy)
    assert count(made, "ScatterElements") == 2


def test_a_window_of_one_entry_over_small_images_takes_one_product_for_its_weights():
    """The gradient of its images is a convolution, too: not one product for each of the 16 pixels."""
    model = nn.Sequential(nn.Conv2d(16, 32, 1), nn.BatchNorm2d(32), nn.Conv2d(32, 16, 1))
    step = export_training_step(model, (torch.randn(32, 16, 4, 4), torch.randn(32, 16, 4, 4)), F.mse_loss)
    assert count(step, "Conv") == 3
    assert count(step, "MatMul") + count(step, "Gemm") == 2
    assert not count(step, "Concat")
