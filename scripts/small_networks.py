"""Small random networks, each rewritten to four budgets with the indices of compiled functions checked, and without.

    python -m scripts.small_networks FOLDER [--count 300] [--timm] [--jobs 2] [--save]

A step out of bounds in the search is an IndexError where indices are checked, and sooner or later the end of the
process where they are not. Networks of many small ops are those that the search makes its longest moves on: CNNs with
BatchNormalization, residual and dense blocks, Flax's, recurrent ones, and with ``--timm`` timm's smallest at 32 pixels.
FOLDER keeps the training graphs and a line for every process, so that a run goes on where the last one ended. Each
process takes one network through all budgets; where it dies, another takes the rest. With ``--save`` the table goes to
docs/results/data, see `scripts.results`. Takes some five hours on two cores; ``--time-limit`` bounds each plan instead
of its effort, and most plans then end before they reach their budget.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx

from scripts.results import Table, save

BUDGETS = ("80%", "60%", "50%", "40%")
EFFORT = 1.0
CLASSES = 10
BATCHES = (256, 1024)
"""Samples: with fewer, images of 8 x 8 pixels weigh less than ONNX Runtime's bookkeeping."""
SECONDS = 600
"""A process may take so long."""
MOST_TIMM = 18
"""Of timm's networks: one takes a minute and more, ten times as long as any other."""
TIMM = (
    "resnet10t", "resnet14t", "lcnet_035", "mobilenetv3_small_050", "tinynet_e", "efficientnet_lite0", "ghostnet_050",
    "regnetx_002", "hardcorenas_a", "test_resnet", "test_convnext", "test_efficientnet", "test_byobnet", "test_vit",
)  # fmt: skip


def convolutional(rng: random.Random) -> onnx.ModelProto:
    """Convolutions with BatchNormalization, one after the other."""
    import torch
    from torch import nn

    from sample_models.networks.hand.images import conv

    widths = [3, *(rng.choice((4, 8, 16)) for _ in range(rng.randint(2, 6)))]
    layers: list[nn.Module] = [conv(a, b, rng.choice((1, 3))) for a, b in itertools.pairwise(widths)]
    layers += [nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(CLASSES)]
    return _torch_step(rng, nn.Sequential(*layers), torch.randn(rng.choice(BATCHES), 3, 8, 8))


def residual(rng: random.Random) -> onnx.ModelProto:
    """Residual blocks (He et al. 2015)."""
    import torch
    from torch import nn

    from sample_models.networks.hand.images import Residual, conv

    width = rng.choice((8, 16))
    layers: list[nn.Module] = [conv(3, width)]
    for _ in range(rng.randint(1, 4)):
        after = rng.choice((width, 2 * width))
        layers.append(Residual(width, after, 2 if after > width and rng.random() < 0.5 else 1))
        width = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)]
    return _torch_step(rng, nn.Sequential(*layers), torch.randn(rng.choice(BATCHES), 3, 8, 8))


def dense(rng: random.Random) -> onnx.ModelProto:
    """Dense blocks (Huang et al. 2017): every layer reads all those before it."""
    import torch
    from torch import nn

    from sample_models.networks.hand.images import conv

    class Dense(nn.Module):
        def __init__(self, width: int, layers: int, growth: int) -> None:
            super().__init__()
            self.layers = nn.ModuleList(conv(width + i * growth, growth) for i in range(layers))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.cat([x, layer(x)], 1)
            return x

    layers, growth = rng.randint(2, 6), rng.choice((4, 8))
    width = 8 + layers * growth
    network = nn.Sequential(
        conv(3, 8), Dense(8, layers, growth), conv(width, 16, 1), nn.AvgPool2d(2), Dense(16, 2, growth),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16 + 2 * growth, CLASSES),
    )  # fmt: skip
    return _torch_step(rng, network, torch.randn(rng.choice(BATCHES), 3, 8, 8))


def recurrent(rng: random.Random) -> onnx.ModelProto:
    """LSTM, GRU or a plain recurrence, over a few steps."""
    import torch
    from torch import nn

    kind = rng.choice((nn.LSTM, nn.GRU, nn.RNN))
    width, tokens = rng.choice((8, 16)), rng.randint(3, 10)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = kind(width, width, rng.randint(1, 2), batch_first=True)
            self.out = nn.Linear(width, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.cells(x)[0][:, -1])

    return _torch_step(rng, Recurrent(), torch.randn(rng.choice(BATCHES), tokens, width))


def flax(rng: random.Random) -> onnx.ModelProto:
    """Flax, channels last: convolutions, some of them in residual blocks with BatchNorm."""
    import flax.linen as nn
    import jax
    import optax

    from sample_models.networks.jax_models import Residual, classifier

    widths, blocks = [rng.choice((4, 8, 16)) for _ in range(rng.randint(1, 4))], rng.randint(0, 2)

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for width in widths:
                x = nn.Conv(width, (3, 3), use_bias=False)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
            for _ in range(blocks):
                x = Residual(widths[-1], 1)(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
            return nn.Dense(CLASSES)(x.reshape(len(x), -1))

    case = classifier(Network(), (rng.choice(BATCHES), 8, 8, rng.choice((1, 3))), CLASSES)
    return case.export(rng.choice((optax.adamw, optax.sgd))(0.01), check=False)


def timm(rng: random.Random) -> onnx.ModelProto:
    """One of timm's at 32 pixels."""
    import torch

    from sample_models.networks.torch_models import declare_torchvision

    declare_torchvision()  # timm imports it
    import timm

    name = rng.choice(TIMM)
    network = timm.create_model(name, pretrained=False, num_classes=CLASSES, drop_rate=0.0)
    return _torch_step(rng, network, torch.randn(rng.choice((16, 64)), 3, 32, 32))


KINDS: dict[str, Callable[[random.Random], onnx.ModelProto]] = {
    make.__name__: make for make in (convolutional, residual, dense, recurrent, flax, timm)
}


def _torch_step(rng: random.Random, network: Any, x: Any) -> onnx.ModelProto:
    import torch
    from onnx_remat.converters.pytorch import export_training_step

    network(x)  # lazy layers
    optimizer = rng.choice((torch.optim.AdamW, torch.optim.SGD))(network.parameters(), lr=0.01)
    labels = torch.randint(0, CLASSES, (len(x),))
    return export_training_step(network, (x, labels), torch.nn.functional.cross_entropy, optimizer, check=False)


def convert(folder: Path, names: Sequence[str]) -> None:
    """Write the training graphs of some networks, in this process."""
    import torch

    torch.set_num_threads(1)
    for name in names:
        kind, _, seed = name.partition("-")
        torch.manual_seed(int(seed))
        made = folder / f"{name}.part"
        onnx.save(KINDS[kind](random.Random(int(seed))), made)
        made.rename(folder / f"{name}.onnx")


def rewrite(path: Path, budgets: Sequence[str], limit: float) -> None:
    """Rewrite to some budgets, in this process; a word for each on standard output."""
    from onnx_remat.errors import OnnxRematError
    from onnx_remat.options import PlanningOptions
    from onnx_remat.rewrite.first_use import first_use
    from onnx_remat.rewrite.original import begin
    from onnx_remat.rewrite.pipeline import rewrite_for

    run_by = "session" if int(path.stem.partition("-")[2]) % 2 else "loop"  # two kinds of budgets, in turn
    limits: PlanningOptions = {"time_limit": limit} if limit else {"effort": EFFORT}
    with first_use() as kernels:
        original = begin(path, {**limits, "run_by": run_by}, kernels)
    for budget in budgets:
        try:
            rewrite_for(original, budget, advise=False)
            word = "written"
        except OnnxRematError:
            word = "refused"
        except IndexError:
            word = "IndexError"
        print(word, flush=True)


def tried(folder: Path, limit: float, name: str, checks: bool) -> list[str]:
    """What comes of each budget, in processes that may die."""
    words: list[str] = []
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1" if checks else "0"}
    while len(words) < len(BUDGETS):
        rest = BUDGETS[len(words) :]
        call = [sys.executable, "-m", "scripts.small_networks", str(folder), "--time-limit", f"{limit:g}"]
        call += ["--rewrite", name, *rest]
        ran = subprocess.run(call, stdout=subprocess.PIPE, text=True, env=environment, check=False, timeout=SECONDS)
        words += ran.stdout.split()
        if ran.returncode > 0:
            raise SystemExit(f"{name} at {rest}: an error that is neither a refusal nor an IndexError, see above")
        if ran.returncode < 0:
            words.append("died")
    return words


def chosen(count: int, timm: bool) -> list[str]:
    """Names of networks, of each kind in turn."""
    most = {"timm": timm * MOST_TIMM}
    every = (f"{kind}-{seed}" for seed in itertools.count() for kind in KINDS if seed < most.get(kind, count))
    return list(itertools.islice(every, count))


def table(lines: Sequence[dict[str, Any]], command: str) -> Table:
    """Networks and outcomes by kind."""
    words = ("written", "refused", "IndexError", "died")
    counts = {(kind, checks): Counter[str]() for kind in KINDS for checks in (True, False)}
    networks = Counter[str]()
    for line in lines:
        kind = line["network"].partition("-")[0]
        counts[kind, line["checks"]].update(line["words"])
        networks[kind] += line["checks"]
    rows = []
    for kind in [kind for kind in KINDS if networks[kind]]:
        for checks in (True, False):
            found = counts[kind, checks]
            rows.append((kind, str(networks[kind]), "yes" if checks else "no", *(str(found[word]) for word in words)))
    return Table(command, ("networks", "number", "indices checked", *words), tuple(rows))


def main() -> None:
    """Go on with what is not done yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=300, help="networks")
    parser.add_argument("--jobs", type=int, default=1, help="networks at a time (default: 1)")
    parser.add_argument("--time-limit", type=float, default=0.0, metavar="SECONDS", help="of a plan (default: none)")
    parser.add_argument("--timm", action="store_true", help="timm's among them: it has to be installed")
    parser.add_argument("--save", action="store_true", help="write docs/results/data/small-networks.json")
    parser.add_argument("--convert", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--rewrite", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    if asked.convert:
        convert(asked.folder, asked.convert)
        return
    if asked.rewrite:
        rewrite(asked.folder / f"{asked.rewrite[0]}.onnx", asked.rewrite[1:], asked.time_limit)
        return
    names = chosen(asked.count, asked.timm)
    book = asked.folder / "lines.jsonl"
    lines = [json.loads(line) for line in book.read_text().splitlines()] if book.exists() else []
    done = {(line["network"], line["checks"]) for line in lines}
    for start in range(0, len(names), 10):  # a process loads its framework once for ten
        some = names[start : start + 10]
        if missing := [name for name in some if not (asked.folder / f"{name}.onnx").exists()]:
            call = [sys.executable, "-m", "scripts.small_networks", str(asked.folder), "--convert", *missing]
            subprocess.run(call, check=True)
        todo = [(name, checks) for name in some for checks in (True, False) if (name, checks) not in done]
        with ThreadPoolExecutor(asked.jobs) as pool:
            for (name, checks), words in zip(
                todo, pool.map(lambda one: tried(asked.folder, asked.time_limit, *one), todo), strict=True
            ):
                lines.append({"network": name, "checks": checks, "words": words})
                with book.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(lines[-1]) + "\n")
                print(name, "checked" if checks else "unchecked", *words, flush=True)
    options = f"--count {asked.count}" + " --timm" * asked.timm
    options += f" --time-limit {asked.time_limit:g}" if asked.time_limit else ""
    made = table(lines, f"python -m scripts.small_networks FOLDER {options} --save")
    print(made.to_markdown())
    if asked.save:
        save("small-networks", made)


if __name__ == "__main__":
    main()
