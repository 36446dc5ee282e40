"""All measurements on a real GPU, most telling first, for as long as there is time: one command, resumable.

    python -m scripts.gpu_day FOLDER OUT [--seconds 540] [--again]

FOLDER has the steps that ``scripts.gpu_truth plan`` made, without a GPU. Each of these adds rows to OUT as they are
measured, and a second run goes on where the first one ended:

1. ``open``: plans where values lie, for all that follows;
2. ``race``: memory and time against PyTorch eager and torch.compile;
3. ``budgeted``: a module trained where it lies, against PyTorch's own step;
4. ``numbers``: the worst output of each file compared with the CPU's;
5. ``profile``: kernels by kind.

Each may take half of the time that is left, the last one all of it. Rows that failed are measured again with
``--again``. Afterwards, anywhere: ``scripts.gpu_truth table OUT/race.jsonl --save``, ``scripts.gpu_truth numbers FOLDER
--out OUT/numbers.jsonl --save``.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

MODELS = ("resnet50", "vit_b", "gpt2-12-adamw", "bert", "llama")
"""Networks that `budgeted` trains: those of the race, see `sample_models.networks.torch_models`."""

LONGEST = 120
"""Seconds that one row may take."""


def parts(folder: Path, out: Path, again: bool = False) -> list[tuple[str, list[str]]]:
    """Names of the measurements, and the arguments of Python for each."""
    rows = [*["--again"] * again, "--seconds", str(LONGEST), "--out"]
    return [
        ("open", ["scripts.gpu_truth", "open", str(folder)]),
        ("race", ["scripts.gpu_truth", "race", str(folder), "--with", "eager", "--with", "compile", *rows,
                  str(out / "race.jsonl")]),
        ("budgeted", ["scripts.gpu_budgeted", *MODELS, *rows, str(out / "budgeted.jsonl")]),
        ("numbers", ["scripts.gpu_truth", "numbers", str(folder), *rows, str(out / "numbers.jsonl")]),
        ("profile", ["scripts.gpu_profile", str(folder), "--torch", *rows, str(out / "profile.jsonl")]),
    ]  # fmt: skip


def run(parts: Sequence[tuple[str, Sequence[str]]], seconds: float) -> list[str]:
    """Run each part for half of what is left of the time, the last for all of it; return how each ended."""
    until, ends = time.monotonic() + seconds, []
    for index, (name, arguments) in enumerate(parts):
        began = time.monotonic()
        left = max(until - began, 0.0)
        process = subprocess.Popen([sys.executable, "-m", *arguments], start_new_session=True)
        try:
            code = process.wait(left if index == len(parts) - 1 else left / 2)
            ended = "done" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            ended = "cut off: run the command again to go on"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it started has the device
            process.wait()
        ends.append(f"{name}: {ended}")
        print(f"{ends[-1]} ({time.monotonic() - began:.0f} s)", flush=True)
    return ends


def main() -> None:
    """Measure what there is time for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seconds", type=float, default=540, help="for all together (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="measure rows again that are errors")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    run(parts(given.folder, given.out, given.again), given.seconds)


if __name__ == "__main__":
    main()
