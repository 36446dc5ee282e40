"""Training steps where ONNX Runtime runs without Python: in Node, in a browser, in C++.

    python scripts/edge_env.py
    python -m scripts.edge make
    python -m scripts.edge losses --headers /usr/include/onnxruntime --save elsewhere-losses
    python -m scripts.edge heap --steps 4 --save elsewhere-heap
    python -m scripts.edge largest 5:0 6:0 14:1600MB --save elsewhere-largest

*make* writes the three steps of `sample_models.networks.page_models` to examples/javascript/steps, where the page looks
for them: as exported, rewritten to half the sum of their tensors, the initial values, and a list with what is known of
them.
*losses* trains both files of each in Node (native kernels and WebAssembly), in Chromium, and with the C++ example where
ONNX Runtime's headers are given, and compares the losses with those of Python's onnxruntime; it also compares which
nodes run, in which order. *heap* says how large WebAssembly's heap is: in Chromium as it grew, and the smallest limit
under which the step still runs. *largest* tries transformers of BLOCKS:BUDGET (0: as exported) in one heap.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from onnx_remat.units import parse_size
from scripts import results
from tests.support import elsewhere
from tests.support.elsewhere import places

STEPS = elsewhere.FOLDER / "steps"
FILES = {"before": "as exported", "after": "rewritten"}
LOSSES = (
    "step",
    "file",
    "nodes",
    "order in WASM",
    "Node",
    "Node, WASM",
    "Chromium, WASM",
    "C++",
    "as the exported file",
)
HEAP = ("step", "file", "tensors, MB", "budget, MB", "heap, MB", "smallest heap, MB", "of the exported", "compute")
LARGEST = ("blocks", "parameters", "budget, MB", "tensors, MB", "compute", "nodes", "in the heap", "seconds")


@dataclass(frozen=True, slots=True)
class Step:
    """One model's files by name, as index.json lists them; `peaks`, by file, and `budget` are bytes of tensors."""

    name: str
    about: str
    before: str
    after: str
    state: str
    peaks: Mapping[str, int]
    budget: int
    compute: float


def exported(model: Any, check: bool = True) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The step of one of `sample_models.networks.page_models`, and its initial values."""
    from onnx_remat.converters.pytorch import export_training_step, initial_feeds

    case = model.case
    step = export_training_step(case.model, case.batch, case.loss, model.optimizer, check=check)
    batch = {f"input.{i}": value.numpy() for i, value in enumerate(case.batch)}
    return step, initial_feeds(step, case.model, model.optimizer) | batch


def make(folder: Path, budget: str, effort: float, names: list[str]) -> None:
    """Write the files of the named models, and their list."""
    from onnx_remat import rewrite_model
    from sample_models.networks.page_models import MODELS

    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for name in names:
        model = MODELS[name]()
        step, feeds = exported(model)
        result = rewrite_model(step, budget, effort=effort, run_by="session")
        files = {"before": f"{name}.onnx", "after": f"{name}.small.onnx", "state": f"{name}.safetensors"}
        onnx.save(step, folder / files["before"])
        onnx.save(result.model, folder / files["after"])
        places.write_state(folder / files["state"], feeds)
        report = result.report
        peaks = {"before": report.before.total, "after": report.after.total}
        known = {"peaks": peaks, "budget": report.budget, "compute": report.extra_compute}
        entries.append({"name": name, "about": model.about} | files | known)
        print(f"{name}: {report.verdict()}", flush=True)
    (folder / "index.json").write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def listed(folder: Path) -> list[Step]:
    """What `make` wrote there."""
    return [Step(**entry) for entry in json.loads((folder / "index.json").read_text(encoding="utf-8"))]


def feeds_of(step: Step, folder: Path) -> dict[str, Any]:
    """The initial values of a step."""
    from onnx_remat.measure.training_memory import state_for
    from onnx_remat.session import state_file
    from onnx_remat.session.session import Session

    with Session(str(folder / step.before)) as session:
        feeds = state_for(session.inputs)
    state_file.read_into(folder / step.state, feeds)
    return feeds


def losses(folder: Path, steps: int, headers: Path | None) -> Iterator[tuple[str, ...]]:
    """Lines of the table of losses: the largest difference to Python's over its largest loss, "=" if none."""
    chromium = elsewhere.chromium()
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        program = places.build_cpp(headers, Path(home)) if headers else None
        for step in listed(folder):
            feeds, state = feeds_of(step, folder), folder / step.state
            first: list[places.Run | None] = []
            for file, name in FILES.items():
                path = folder / getattr(step, file)
                wanted = places.in_python(path, feeds, steps)
                here, there = places.executed(path, feeds, state)
                found = [
                    places.in_node(path, state, steps),
                    places.in_node(path, state, steps, "--wasm"),
                    places.in_browser(chromium, path, state, steps) if chromium else None,
                    places.in_cpp(program, path, state, steps) if program else None,
                ]
                cells = [_shown(places.difference(run.losses, wanted.losses)) if run else "" for run in found]
                first, everywhere = first or [wanted, *found], [wanted, *found]
                pairs = [(a.losses, b.losses) for a, b in zip(everywhere, first, strict=True) if a and b]
                apart = max(places.difference(*pair) for pair in pairs)
                order = "same" if here == there else _differs(here, there)
                yield step.name, name, str(len(there)), order, *cells, "" if file == "before" else _shown(apart)


def _shown(difference: float) -> str:
    return f"{difference:.0e}" if difference else "="


def _differs(here: list[str], there: list[str]) -> str:
    return f"{len(set(here) ^ set(there))} nodes are not the same" if set(here) != set(there) else "another order"


def heaps(folder: Path, steps: int) -> Iterator[tuple[str, ...]]:
    """Lines of the table of heaps."""
    chromium = elsewhere.chromium()
    for step in listed(folder):
        whole = 0
        for file, name in FILES.items():
            path, state = folder / getattr(step, file), folder / step.state
            grown = places.in_browser(chromium, path, state, steps).heap
            least = places.smallest_heap(path, state, grown)
            whole = whole or least
            last = ("", "") if file == "before" else (f"{least / whole:.0%}", f"{step.compute:+.1%}")
            budget = f"{step.budget / 1e6:.1f}" if file == "after" else ""
            yield step.name, name, _mb(step.peaks[file]), budget, _mb(grown), _mb(least), *last


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f}"


def largest(heap: int, sizes: list[str], effort: float, steps: int) -> Iterator[tuple[str, ...]]:
    """Lines of the table of transformers: do some steps run in a heap of so many bytes?"""
    from onnx_remat.errors import BudgetInfeasibleError
    from onnx_remat.rewrite.pipeline import rewrite_model
    from sample_models.networks.page_models import transformer

    for size in sizes:
        blocks, _, budget = size.partition(":")
        model = transformer(int(blocks), length=128, batch=128)
        head = blocks, f"{sum(p.numel() for p in model.case.model.parameters()) / 1e6:.1f} M"
        step, feeds = exported(model, check=False)
        rewritten = budget != "0"
        try:
            result = rewrite_model(step, budget if rewritten else "200%", effort=effort, run_by="session")
        except BudgetInfeasibleError as error:
            print(error, file=sys.stderr)
            yield *head, _mb(parse_size(budget)), "", "", "", "no plan", ""
            continue
        report, written = result.report, result.model if rewritten else step
        with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
            path, state = Path(home) / "step.onnx", Path(home) / "state.safetensors"
            onnx.save(written, path)
            places.write_state(state, feeds)
            start = time.perf_counter()
            kept = places.fits(path, state, heap, steps)
            seconds = f"{time.perf_counter() - start:.0f}" if kept else ""
        plan = _mb(report.budget), _mb(report.after.total), f"{report.extra_compute:+.1%}"
        planned = plan if rewritten else ("as exported", _mb(report.before.total), "")
        yield *head, *planned, str(len(written.graph.node)), "runs" if kept else "does not", seconds


def shown(heads: tuple[str, ...], rows: Iterator[tuple[str, ...]], save: str, command: str) -> None:
    """Print a table line by line, and save it where asked to."""
    print("| " + " | ".join(heads) + " |\n" + "| --- " * len(heads) + "|", flush=True)
    kept = []
    for row in rows:
        kept.append(row)
        print("| " + " | ".join(row) + " |", flush=True)
    if save:
        results.save(save, results.Table(command, heads, tuple(kept)))


def main() -> None:
    """Do what the command says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "losses", "heap", "largest"))
    parser.add_argument("sizes", nargs="*", metavar="BLOCKS:BUDGET", help="of transformers, for largest")
    parser.add_argument("--folder", type=Path, default=STEPS, help="of the steps")
    parser.add_argument("--models", default="mlp,cnn,transformer", help="for make")
    parser.add_argument("--budget", default="50%", help="for make")
    parser.add_argument("--effort", type=float, default=5.0, help="of each plan, see onnx-remat --effort")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--headers", type=Path, help="folder with onnxruntime_cxx_api.h, for losses")
    parser.add_argument("--heap", default="2GiB", help="for largest")
    parser.add_argument("--save", default="", metavar="NAME", help="of the table in docs/results/data")
    given = parser.parse_args()
    if given.what == "make":
        make(given.folder, given.budget, given.effort, given.models.split(","))
        return
    if why := elsewhere.missing():
        sys.exit(why)
    command = f"python -m scripts.edge {given.what}"
    if given.what == "losses":
        shown(LOSSES, losses(given.folder, given.steps, given.headers), given.save, command)
    elif given.what == "heap":
        shown(HEAP, heaps(given.folder, given.steps), given.save, f"{command} --steps {given.steps}")
    else:
        command += f" {' '.join(given.sizes)} --heap {given.heap} --effort {given.effort:g} --steps {given.steps}"
        rows = largest(parse_size(given.heap), given.sizes, given.effort, given.steps)
        shown(LARGEST, rows, given.save, command)


if __name__ == "__main__":
    main()
