"""Kill onnx-remat at random moments: is OUT ever half written, does anything left behind trip the next run?

    python scripts/kill_loop.py [--kills 20] [--saves 200]

`--kills` whole runs of the command are ended by SIGKILL, SIGTERM or SIGINT in turns; `--saves` processes that do
nothing but save two models over each other are ended by SIGKILL, so that most signals hit the writing itself.
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx

ROOT = Path(__file__).resolve().parent.parent

_SAVER = """
import sys, onnx
from onnx_remat.ir import model_io
models = [onnx.load(p) for p in sys.argv[2:]]
print("ready", flush=True)
while True:
    for model in models:
        model_io.save(model, sys.argv[1], None)
"""


def killed_runs(folder: Path, count: int, generator: random.Random) -> None:
    """End whole runs of the command; OUT must be the old file or a whole new one."""
    source, out = ROOT / "sample_models" / "chain.onnx", folder / "out.onnx"
    command = [sys.executable, "-m", "onnx_remat", str(source), str(out), "--force", "-q"]
    command += ["--budget", "60%", "--effort", "500ms"]
    start = time.perf_counter()
    subprocess.run(command, check=True)
    whole, length = out.read_bytes(), time.perf_counter() - start
    answers: dict[str, int] = {}
    for _, kind in zip(range(count), itertools.cycle((signal.SIGKILL, signal.SIGTERM, signal.SIGINT)), strict=False):
        out.write_bytes(b"old")
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        time.sleep(generator.uniform(0, length))
        process.send_signal(kind)
        code = process.wait()
        content = out.read_bytes()
        if content not in (b"old", whole):
            raise SystemExit(f"BROKEN: {len(content)} bytes after signal {kind} (exit code {code})")
        answer = f"{signal.Signals(kind).name}: {'old' if content == b'old' else 'new'} file"
        answers[answer] = answers.get(answer, 0) + 1
    subprocess.run(command, check=True)
    assert out.read_bytes() == whole
    print(f"{count} runs ended, 0 broken files, the next run writes the same bytes: {answers}")
    print(f"left behind: {sorted(p.name for p in folder.iterdir() if p != out)}")


def killed_saves(folder: Path, count: int, generator: random.Random) -> None:
    """End processes that save all the time; the file must be one of the two models."""
    contents = []
    for i, kb in enumerate((8000, 16000)):
        weight = onnx.numpy_helper.from_array(np.full(kb * 250, i, np.float32), "w")
        graph = onnx.helper.make_graph([], "g", [], [onnx.helper.make_tensor_value_info("w", 1, [kb * 250])], [weight])
        model = onnx.helper.make_model(graph)
        contents.append(model.SerializeToString(deterministic=True))
        (folder / f"model{i}.onnx").write_bytes(contents[-1])
    out = folder / "saved.onnx"
    out.write_bytes(contents[0])
    found = [0, 0]
    for _ in range(count):
        process = subprocess.Popen(
            [sys.executable, "-c", _SAVER, out, folder / "model0.onnx", folder / "model1.onnx"], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(generator.uniform(0, 0.1))
        process.kill()
        process.wait()
        found[contents.index(out.read_bytes())] += 1  # ValueError: a broken file
    stale = [p for p in folder.iterdir() if p.suffix == ".tmp"]
    print(f"{count} saves killed, 0 broken files (first {found[0]}, second {found[1]}), {len(stale)} stale .tmp")


def main() -> None:
    """Do both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--saves", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    generator = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as name:
        killed_runs(Path(name), given.kills, generator)
        killed_saves(Path(name), given.saves, generator)


if __name__ == "__main__":
    main()
