"""Peaks of inference graphs before and after a rewrite to the lowest budget that is found, measured.

The graphs are a U-Net, super-resolution, a DenseNet block, the first pass of a language model, and one of the onnx
wheel's models without weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import torch
from onnx import numpy_helper, version_converter
from torch import nn

from onnx_remat import files, rewrite_model
from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.findings.estimate import estimate
from onnx_remat.measure import processes
from onnx_remat.units import format_bytes

_EASIER = 1.05  # times the last budget, where no plan was found for it
_TRIES = 5


class Upscaler(nn.Module):
    """Super-resolution by sub-pixel convolution (Shi et al. 2016)."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 64, 5, padding=2), nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 32, 3, padding=1)]
        self.body = nn.Sequential(*[part for layer in layers for part in (layer, nn.Tanh())])
        self.head = nn.Sequential(nn.Conv2d(32, 27, 3, padding=1), nn.PixelShuffle(3))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.body(image))
        return made


def _double(into: int, out: int) -> nn.Module:
    once = [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*once, nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


class UNet(nn.Module):
    """Ronneberger et al. 2015, four levels."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width, 8 * width]
        self.down = nn.ModuleList([_double(i, o) for i, o in zip([3, *sizes], sizes, strict=False)])
        pairs = list(zip(sizes[:0:-1], sizes[-2::-1], strict=True))
        self.up = nn.ModuleList([nn.ConvTranspose2d(i, o, 2, stride=2) for i, o in pairs])
        self.join = nn.ModuleList([_double(i, o) for i, o in pairs])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            image = block(torch.max_pool2d(image, 2) if level else image)
            skips.append(image)
        skips.pop()
        for up, join in zip(self.up, self.join, strict=True):
            image = join(torch.cat([skips.pop(), up(image)], 1))
        made: torch.Tensor = self.head(image)
        return made


class DenseNet(nn.Module):
    """One block of Huang et al. 2017, eight layers."""

    def __init__(self, growth: int = 16, layers: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.layers = nn.ModuleList([self._layer(32 + growth * i, growth) for i in range(layers)])
        self.head = nn.Linear(32 + growth * layers, 10)

    @staticmethod
    def _layer(into: int, growth: int) -> nn.Module:
        narrow = [nn.BatchNorm2d(into), nn.ReLU(), nn.Conv2d(into, 4 * growth, 1)]
        return nn.Sequential(
            *narrow, nn.BatchNorm2d(4 * growth), nn.ReLU(), nn.Conv2d(4 * growth, growth, 3, padding=1)
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        image = self.stem(image)
        for layer in self.layers:
            image = torch.cat([image, layer(image)], 1)
        made: torch.Tensor = self.head(image.mean((2, 3)))
        return made


class Block(nn.Module):
    """A transformer's block with causal attention; also returns keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        batch, length, width = x.shape
        split = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mask = torch.full((length, length), float("-inf")).triu(1)
        weights = torch.softmax(q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5 + mask, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.between(x)), k, v


class Prefill(nn.Module):
    """The first pass of a decoder over its prompt: scores of the next token, keys and values of all."""

    def __init__(self, width: int = 256, heads: int = 8, blocks: int = 4, words: int = 2000, length: int = 512) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.randn(length, width))
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(blocks)])
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, cache = self.words(tokens) + self.places, []
        for block in self.blocks:
            x, k, v = block(x)
            cache += [k, v]
        return self.head(x[:, -1]), *cache


def _exported(model: nn.Module, example: torch.Tensor) -> onnx.ModelProto:
    program = torch.onnx.export(model.eval(), (example,), dynamo=True, verbose=False, external_data=False)
    assert program is not None
    made: onnx.ModelProto = program.model_proto
    return made


def _light(name: str) -> onnx.ModelProto:
    """A model of the onnx wheel, its weights stored: there they are made by ConstantOfShape nodes."""
    folder = Path(onnx.__file__).parent / "backend/test/data/light"
    model = version_converter.convert_version(onnx.load(folder / f"light_{name}.onnx"), 13)
    model.ir_version = 8
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    kept = []
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape" and node.input[0] in stored:
            value = numpy_helper.to_array(node.attribute[0].t)
            filled = value.repeat(stored[node.input[0]].prod()).reshape(stored[node.input[0]])
            model.graph.initializer.append(numpy_helper.from_array(filled, node.output[0]))
        else:
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


GRAPHS: dict[str, Callable[[], onnx.ModelProto]] = {
    "U-Net, 256 x 256": lambda: _exported(UNet(), torch.randn(1, 3, 256, 256)),
    "super-resolution, 256 x 256": lambda: _exported(Upscaler(), torch.randn(1, 3, 256, 256)),
    "DenseNet block, batch 8": lambda: _exported(DenseNet(), torch.randn(8, 3, 64, 64)),
    "transformer prefill, 512 tokens": lambda: _exported(Prefill(), torch.randint(0, 2000, (1, 512))),
    "squeezenet of the onnx wheel": lambda: _light("squeezenet"),
}


ITEMS = tuple(GRAPHS)
HEADS = ("graph", "no plan below", "measured before", "measured after", "", "compute", "recomputed")


def rows(name: str, *, effort: float = 5.0) -> Iterator[tuple[str, ...]]:
    """Rewrite one graph to the lowest budget that is found in a few tries, run both, and put it in a row."""
    torch.manual_seed(0)
    model = GRAPHS[name]()
    known = estimate(model, run_by="session")
    budget = min(known.first_look, known.peak.total - 1)
    for _ in range(_TRIES):
        try:
            report = rewrite_model(model, budget, effort=effort, run_by="session", verify="run").report
            break
        except BudgetInfeasibleError:
            budget = int(budget * _EASIER)
    else:
        report = rewrite_model(model, "100%", effort=effort, run_by="session", verify="run").report
    found = report.measured
    if found is None:  # no lower budget was found: the graph stays as it is
        yield name, format_bytes(known.impossible_below), format_bytes(_measured(model)), "as it is", "", "", ""
        return
    assert "bitwise equal" in found.outputs_equal, name
    yield (
        name, format_bytes(known.impossible_below), format_bytes(found.before), format_bytes(found.after),
        f"{found.after / found.before - 1:+.1%}", f"+{report.extra_compute:.1%}", str(report.recomputed),
    )  # fmt: skip


def _measured(model: onnx.ModelProto) -> int:
    with files.scratch() as folder:
        onnx.save(model, folder / "model.onnx")
        return processes.measure(folder / "model.onnx").peak_bytes
