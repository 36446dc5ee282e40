"""Steps in half precision as people train on GPUs: autocast, weights in bfloat16, and a scaled loss in float16.

The check of the export compares their numbers with torch's; ONNX Runtime's CUDA provider has to have every kernel.
"""

from __future__ import annotations

import onnx
import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402
from onnx_remat.converters.pytorch import export_training_step  # noqa: E402
from torch import nn  # noqa: E402

from onnx_remat.ort.kernels.cuda import CUDA  # noqa: E402

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


@pytest.mark.parametrize("loss", [loss, whole])
@pytest.mark.parametrize("how", ["bfloat16", "autocast to bfloat16", "autocast to float16"])
@pytest.mark.parametrize("kind", [Text, Images])
def test_a_step_in_half_precision_has_a_kernel_for_every_node(kind, how, loss):
    torch.manual_seed(0)
    model = kind()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if how == "autocast to float16" else None
    model = model.bfloat16() if how == "bfloat16" else Autocast(model, torch.float16 if scaler else torch.bfloat16)
    batch = (torch.randint(0, 11, (3, 6)), torch.randint(0, 11, (3, 6)))
    if kind is Images:
        batch = (torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,)))
        batch = (batch[0].bfloat16(), batch[1]) if how == "bfloat16" else batch
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = export_training_step(model, batch, loss, optimizer, scaler=scaler)
    onnx.checker.check_model(step, full_check=True)
    types = {v.name: v.type.tensor_type.elem_type for v in (*step.graph.input, *step.graph.value_info)}
    types |= {tensor.name: tensor.data_type for tensor in step.graph.initializer}
    first = [(node, types.get(node.input[0], 0)) for node in step.graph.node if node.input]
    assert [node.name for node, dtype in first if dtype in HALVES and CUDA.on_host(node, dtype, 20)] == []
    assert any(dtype in HALVES for _, dtype in first)
