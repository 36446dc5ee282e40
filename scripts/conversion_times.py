"""Seconds that the PyTorch converter takes, by this checkout and by another, and where they go.

    python -m scripts.conversion_times [--before TREE] [--model gpt2-12-half] [--save NAME]

Every conversion is a process of its own; the checkouts take turns on each model. *Export* is a call of
`export_training_step`, its check against PyTorch included, without the start of Python and without building the module;
*processor* is what it takes of all cores together, and *memory* the most that the process takes. Linux only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
MODELS = ("resnet18", "resnet50", "densenet121", "unet", "vit_b-half", "bert-half", "gpt2-12-half", "llama",
          "gpt2-48-narrow")  # fmt: skip
_HEADS = ("model", "checkout", "nodes", "export, s", "processor, s", "memory, MB")


def child(tree: str, model: str) -> None:
    """Convert with the packages of a checkout and say what it took."""
    sys.path.insert(0, tree)
    # The models are this checkout's, whatever converts them.
    spec = importlib.util.spec_from_file_location("models", ROOT / "scripts" / "torch_models.py")
    assert spec and spec.loader
    models = importlib.util.module_from_spec(spec)
    sys.modules["models"] = models
    spec.loader.exec_module(models)
    export = models.builder(models.MODELS[model])
    began, worked = time.monotonic(), time.process_time()
    made = export()
    seconds, processor = time.monotonic() - began, time.process_time() - worked
    print(json.dumps([len(made.graph.node), seconds, processor, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))


def timed(tree: Path, model: str) -> tuple[int, float, float, int]:
    """Nodes, seconds, seconds of all cores, and kilobytes, in a fresh process."""
    command = [sys.executable, str(Path(__file__)), "--child", str(tree), model]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tree, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1].rpartition("ConversionError: ")[2].partition(";")[0])
    nodes, seconds, processor, memory = json.loads(done.stdout.splitlines()[-1])
    return nodes, seconds, processor, memory


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--model", action="append", help="only this one (repeat)")
    parser.add_argument("--save", default="", metavar="NAME", help="also write docs/results/data/NAME.json")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(*given.child)
        return
    from scripts.results import Table, printed, save  # a child finds the packages of another checkout

    trees = ([("before", given.before.resolve())] if given.before else []) + [("now", ROOT)]

    def row(model: str, name: str, tree: Path) -> tuple[str, ...]:
        try:
            nodes, seconds, processor, memory = timed(tree, model)
        except RuntimeError as error:
            return model, name, "", str(error), "", ""
        return model, name, f"{nodes:,}", f"{seconds:.1f}", f"{processor:.1f}", f"{memory / 1e3:.0f}"

    rows = printed(row(model, *tree) for model in given.model or MODELS for tree in trees)
    if given.save:
        save(given.save, Table("python -m scripts.conversion_times --before TREE", _HEADS, rows))


if __name__ == "__main__":
    main()
