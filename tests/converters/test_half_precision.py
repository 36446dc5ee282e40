"""Steps in half precision as people train on GPUs: autocast, weights in a half type, and a scaled loss in float16.

The check of the export compares their numbers with torch's; ONNX Runtime's CUDA provider has to have every kernel.
"""

from __future__ import annotations

import copy
import itertools

import ml_dtypes
import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")
import onnx_ir as ir  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from onnx_remat.converters.checks import agreement  # noqa: E402
from onnx_remat.converters.passes.widen_halves import widen_halves  # noqa: E402
from onnx_remat.converters.pytorch import budgeted, export_training_step, initial_feeds, reference  # noqa: E402
from onnx_remat.converters.pytorch.arrays import tensor  # noqa: E402
from torch import nn  # noqa: E402

from onnx_remat.converters import halves  # noqa: E402
from onnx_remat.errors import ConversionError  # noqa: E402
from onnx_remat.ort import runtime  # noqa: E402
from onnx_remat.ort.kernels.cuda import CUDA  # noqa: E402
from tests.support.slow import few  # noqa: E402

HALVES = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


class Text(nn.Module):
    """Two words' worth of a language model: attention under a mask, a split, and odd activations."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.mix, self.out = nn.Linear(8, 24), nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.words(tokens))
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        seen = F.leaky_relu(seen.clamp(-1, 1)) + F.softplus(seen) * F.hardswish(seen) + seen.abs().log1p()
        return self.out(x + torch.where(seen > 0.25, seen, (2 + seen).reciprocal().clamp(-2, 2)))


class Images(nn.Module):
    """Convolutions with norms, pools and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.up, self.head = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(F.max_pool2d(F.relu(self.norm(self.first(x))), 2))
        return self.head(F.adaptive_avg_pool2d(F.silu(x), 1).flatten(1))


class Autocast(nn.Module):
    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", self.dtype):
            return self.model(x)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def whole(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """In the type of the model, as some write it."""
    return F.nll_loss(F.log_softmax(output, -1).flatten(0, -2), target.flatten())


WAYS = ["bfloat16", "autocast to bfloat16", "autocast to float16"]
STEPS = list(itertools.product([Text, Images], WAYS, [loss, whole]))
QUICK = [(Images, WAYS[0], loss), (Text, WAYS[1], loss), (Images, WAYS[2], whole)]


@pytest.mark.parametrize(("kind", "how", "loss"), few(STEPS, QUICK, several=True))
def test_a_step_in_half_precision_has_a_kernel_for_every_node(kind, how, loss):
    torch.manual_seed(0)
    model = kind()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if how == "autocast to float16" else None
    whole = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(how)
    model = model.to(whole) if whole else Autocast(model, torch.float16 if scaler else torch.bfloat16)
    batch = (torch.randint(0, 11, (3, 6)), torch.randint(0, 11, (3, 6)))
    if kind is Images:
        batch = (torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,)))
        batch = (batch[0].to(whole), batch[1]) if whole else batch
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = export_training_step(model, batch, loss, optimizer, scaler=scaler)
    onnx.checker.check_model(step, full_check=True)
    types = {v.name: v.type.tensor_type.elem_type for v in (*step.graph.input, *step.graph.value_info)}
    types |= {tensor.name: tensor.data_type for tensor in step.graph.initializer}
    first = [(node, types.get(node.input[0], 0)) for node in step.graph.node if node.input]
    assert [node.name for node, dtype in first if dtype in HALVES and CUDA.on_host(node, dtype, 20)] == []
    assert any(dtype in HALVES for _, dtype in first)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().expand(x.shape[0], 1, -1, -1)
        x = self.mix(x).unsqueeze(1)
        return F.scaled_dot_product_attention(x, x, x, attn_mask=seen).float().square().mean()


def test_a_large_mask_in_bfloat16_can_be_inspected():
    """ONNX Runtime's CPU, which computes it, has no kernel for a Where of bfloat16."""
    step = export_training_step(Masked().bfloat16(), (torch.rand(2, 70, 8).bfloat16(),))
    ops = {node.op_type for node in step.graph.node}
    assert "Softmax" in ops and not ops & {"ReduceMax", "IsInf"}


def widened(text: str, opset: int = 20) -> onnx.ModelProto:
    """A forward graph, after the pass."""
    model = onnx.parser.parse_model(f"""<ir_version: 12, opset_import: ["" : {opset}]> g {text}""")
    made = ir.from_proto(onnx.shape_inference.infer_shapes(model))
    widen_halves(made)
    after = ir.to_proto(made)
    onnx.checker.check_model(after, full_check=True)
    return after


class Overflowing(nn.Module):
    """Attention in float32 under a mask that was rounded: what is large in float32 is infinite in half precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = torch.full((70, 70), torch.finfo(torch.float32).min)
        mask = torch.where(torch.ones(70, 70, dtype=torch.bool).tril(-1), 0.0, low).to(torch.bfloat16).float()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask.expand(x.shape[0], 1, -1, -1)).square().mean()


def test_a_mask_that_is_infinite_once_rounded_keeps_its_guard():
    """Its first row has no finite entry, and torch makes zeros of it."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Unflatten(0, (2, 1)), Overflowing())
    step = export_training_step(model, (torch.rand(2, 70, 8),))
    assert "Where" in {node.op_type for node in step.graph.node}


def test_bodies_and_sequences_are_widened_or_left_alone():
    body = """(bool k, float16[4] x) => (float16[4] y, float16[n] z) {
        y = If (k) <then_branch = t () => (float16[4] a) { a = Add (x, x) },
                    else_branch = e () => (float16[4] b) { b = Neg (x) }>
        s = SequenceConstruct (y, y)  z = ConcatFromSequence <axis = 0> (s)
    }"""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["" : 20]> g {body}""")
    made = ir.to_proto(halves.widened(ir.from_proto(onnx.shape_inference.infer_shapes(model))))
    x = np.arange(4, dtype=np.float32) + 0.1
    found = runtime.outputs(made, {"k": np.array(True), "x": x.astype(np.float16).astype(np.float32)})
    assert (found["y"] == (2 * x.astype(np.float16)).astype(np.float32)).all()
    assert (found["z"] == np.tile(found["y"], 2)).all()


def test_an_operator_that_a_device_lacks_altogether_is_widened_in_bfloat16():
    """The host, to which it falls back, has no kernel in bfloat16; in float16 it has."""
    kinds = [node.op_type for node in widened("(bfloat16[4] x) => (bfloat16[4] y) { y = Tan (x) }", 22).graph.node]
    assert kinds == ["Cast", "Tan", "Cast"]
    assert [node.op_type for node in widened("(float16[4] x) => (float16[4] y) { y = Tan (x) }", 22).graph.node] == [
        "Tan"
    ]


def test_sequences_are_left_as_they_are():
    text = "(float16[4] x) => (float16[n] y) { s = SequenceConstruct (x, x)  y = ConcatFromSequence <axis = 0> (s) }"
    assert [node.op_type for node in widened(text).graph.node] == ["SequenceConstruct", "ConcatFromSequence"]


def test_names_that_a_widened_node_would_take_are_free():
    text = """(bfloat16[4] x) => (bfloat16[4] y, bfloat16[4] z, bfloat16[4] w) {
        y = Log (x)  z = Neg (x)  w = Neg (x)
    }"""
    named = onnx.parser.parse_model(f"""<ir_version: 12, opset_import: ["" : 20]> g {text}""")
    for node, name in zip(named.graph.node[1:], ("y.wide.0", "y.single"), strict=True):
        node.output[0] = name
    del named.graph.output[1:]
    made = ir.from_proto(onnx.shape_inference.infer_shapes(named))
    widen_halves(made)
    onnx.checker.check_model(ir.to_proto(made), full_check=True)


def test_constants_of_a_widened_node_are_stated_in_float32():
    text = "(bfloat16[4] x) => (bfloat16[4] y) <bfloat16 low = {0}, bfloat16 high = {1}> { y = Clip (x, low, high) }"
    model = widened(text)
    assert [node.op_type for node in model.graph.node] == ["Cast", "Clip", "Cast"]
    kinds = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    assert [kinds[name] for name in model.graph.node[1].input[1:]] == [onnx.TensorProto.FLOAT] * 2


def test_noise_in_bfloat16_may_move_what_a_kink_reads(monkeypatch):
    """The check measures noise by changes of the weights, which a norm over like rows enlarges."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 5)).bfloat16()
    batch = ((torch.ones(16, 8) + torch.randn(16, 8) / 8).bfloat16(), torch.randint(0, 5, (16,)))
    compared, compare = [], agreement.compare

    def compare_thrice(*args):
        compared.append(args)
        if len(compared) < 3:
            raise ConversionError("as if they differed")
        return compare(*args)

    monkeypatch.setattr(agreement, "compare", compare_thrice)
    export_training_step(model, batch, loss)


def test_the_reference_in_float64_reads_values_in_bfloat16():
    value = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    with reference.Wide():
        assert tensor(value).tolist() == value.tolist()


class Products(nn.Module):
    """The gradient of its weights is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_in_half_precision_decays_by_the_number_that_it_is_given(dtype):
    """0.99 is 0.988 in bfloat16: torch computes by the number in float32, and rounds the result."""
    torch.manual_seed(0)
    model, x = Products().to(dtype), torch.randn(64).to(dtype)
    optimizer = torch.optim.RMSprop(model.parameters(), 1e-2, alpha=0.99, eps=1e-3)
    model(x).backward()
    optimizer.step()
    before = {"weight": model.weight.detach().clone(), **optimizer.state[model.weight]}
    before = {name: tensor.clone() for name, tensor in before.items()}
    step = export_training_step(model, (x,), optimizer=optimizer)
    optimizer.step()
    feeds = {"weight": before["weight"], "state.weight.square_avg": before["square_avg"]}
    feeds |= {"state.weight.step": before["step"], "input.0": x}
    wide = ir.to_proto(halves.widened(ir.from_proto(step)))
    found = runtime.outputs(wide, {name: value.float().numpy() for name, value in feeds.items()})
    expected = optimizer.state[model.weight]["square_avg"].float().numpy()
    assert (found["new.state.weight.square_avg"] == expected).all()
    assert (found["new.weight"] == model.weight.detach().float().numpy()).mean() > 0.9


@pytest.mark.parametrize("rate", [0.05, torch.tensor(0.05)], ids=["number", "tensor"])
def test_a_rate_is_not_rounded_to_half_precision(rate):
    """A tensor without dimensions takes part as a number: decay by 1 - rate * 0.5 was 6 % off in bfloat16."""
    torch.manual_seed(0)
    model, x = Products().to(torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.5, eps=1e-3, foreach=False)
    step = export_training_step(model, (x,), optimizer=optimizer)
    before = {name: value.copy() for name, value in initial_feeds(step, model, optimizer).items()}
    wide = ir.to_proto(halves.widened(ir.from_proto(step)))
    feeds = {name: halves.wide(value) for name, value in (before | {"input.0": x.float().numpy()}).items()}
    made = runtime.outputs(wide, feeds)["new.weight"]
    model(x).backward()
    optimizer.step()
    assert (made == model.weight.detach().float().numpy()).all()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*budget")
def test_sums_at_indices_in_float16_train_on_the_cpu():
    """Those of a MaxPool's gradient: ONNX Runtime's CPU has no kernel for them in float16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2, stride=1), nn.Flatten(), nn.Linear(36, 3)).half()
    batch = (torch.randn(4, 1, 6, 6).half(), torch.randint(0, 3, (4,)))
    other = copy.deepcopy(model)
    step = budgeted(model, loss, torch.optim.SGD(model.parameters(), 0.1), batch, progress=False)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        expected = loss(other(batch[0]), batch[1])
        expected.backward()
        optimizer.step()
        assert step(batch).item() == pytest.approx(expected.item(), rel=1e-2)
