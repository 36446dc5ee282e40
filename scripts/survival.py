"""Do rewritten files keep their savings and their numbers elsewhere? Other runtimes, options, and after other tools.

    python -m scripts.survival FOLDER --versions 1.19.2 1.32.0 --tools onnxslim onnxsim [--graphs FILE ...] [--save]

FOLDER gets one virtual environment per ONNX Runtime version and one per tool, made with pip where they are not there
yet, and the rewritten files. Every cell is measured: the peak as `onnx_remat.measure.processes.measure` takes it (arena
off unless said), over the budget the file was written for, and whether outputs equal the original's in the same
setting.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import onnx_remat
from onnx_remat.errors import OnnxRematError
from onnx_remat.findings.check import check
from onnx_remat.measure.processes import GIVES_BACK
from onnx_remat.process.child import QUIET
from scripts.results import Table, save

ROOT = Path(__file__).resolve().parent.parent

_RUN = """
import json, sys, threading, time
import numpy as np, onnxruntime as ort
job = json.load(sys.stdin)
def resident(field):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(field + ":"))
options = ort.SessionOptions()
options.log_severity_level = 4
options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, job["level"])
options.execution_order = getattr(ort.ExecutionOrder, job["order"])
options.enable_cpu_mem_arena = options.enable_mem_pattern = job["arena"]
options.intra_op_num_threads = job["threads"]
session = ort.InferenceSession(job["path"], options, providers=["CPUExecutionProvider"])
generator, feeds = np.random.default_rng(0), {}
for value in session.get_inputs():
    shape = [d if isinstance(d, int) else 1 for d in value.shape]
    if "float" in value.type:
        array = np.abs(generator.standard_normal(shape, np.float32) * 0.05) + 0.01
        feeds[value.name] = array * np.float32(1 if "var" in value.name else -1)
    else:
        feeds[value.name] = generator.integers(0, 2, shape).astype(value.type[7:-1])
session.run(None, feeds)
open("/proc/self/clear_refs", "w").write("5")
before = resident("VmRSS")
outputs = session.run(None, feeds)
peak = resident("VmHWM") - before + sum(a.nbytes for a in feeds.values())
np.savez(job["outputs"], *outputs)
print(json.dumps({"peak": peak}))
"""

_TOOLS = {
    "onnxsim": "import onnx, onnxsim, sys; m, ok = onnxsim.simplify(onnx.load(sys.argv[1])); onnx.save(m, sys.argv[2])",
    "onnxslim": "import onnx, onnxslim, sys; onnx.save(onnxslim.slim(onnx.load(sys.argv[1])), sys.argv[2])",
    "onnxoptimizer": (
        "import onnx, onnxoptimizer as o, sys; onnx.save(o.optimize(onnx.load(sys.argv[1])), sys.argv[2])"
    ),
    "onnx-ir": "import onnx_ir, sys; onnx_ir.save(onnx_ir.load(sys.argv[1]), sys.argv[2])",
    "onnx-ir-cse": (
        "import onnx_ir as ir, sys\n"
        "from onnx_ir.passes.common import CommonSubexpressionEliminationPass as P\n"
        "m = ir.load(sys.argv[1]); ir.save(P()(m).model, sys.argv[2])"
    ),
    "onnxscript-optimizer": (
        "import onnx, onnxscript.optimizer as o, sys; onnx.save(o.optimize(onnx.load(sys.argv[1])), sys.argv[2])"
    ),
    "ort-save": (
        "import onnxruntime as ort, sys; o = ort.SessionOptions(); o.optimized_model_filepath = sys.argv[2]; "
        "o.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED; "
        "ort.InferenceSession(sys.argv[1], o, providers=['CPUExecutionProvider'])"
    ),
}
_VERSIONS = ["1.19.2", "1.20.1", "1.22.1", "1.24.4", "1.26.0", "1.28.0", "1.30.0", "1.32.0"]
_PACKAGES = {"onnx-ir-cse": "onnx-ir", "onnxscript-optimizer": "onnxscript", "ort-save": "onnxruntime"}


@dataclass(frozen=True)
class Setting:
    """How a file is run."""

    level: str = "ORT_ENABLE_ALL"
    order: str = "DEFAULT"
    arena: bool = False
    threads: int = 1


SETTINGS = {
    "default": Setting(),
    "optimisations off": Setting(level="ORT_DISABLE_ALL"),
    "basic": Setting(level="ORT_ENABLE_BASIC"),
    "extended": Setting(level="ORT_ENABLE_EXTENDED"),
    "priority order": Setting(order="PRIORITY_BASED"),
    "arena on": Setting(arena=True),
    "4 threads": Setting(threads=4),
}


def environment(folder: Path, name: str, packages: list[str]) -> Path:
    """The interpreter of a virtual environment with some packages, made if it is not there."""
    home = folder / name
    if not (home / ".ok").exists():
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        subprocess.run([home / "bin" / "pip", "install", "-q", *packages], check=True)
        (home / ".ok").touch()
    return home / "bin" / "python"


def run(python: Path, path: Path, folder: Path, setting: Setting) -> tuple[int, Path] | str:
    """Peak and outputs of a file in a setting, or the last line of the error."""
    outputs = folder / f"{path.stem}.npz"
    job = {**setting.__dict__, "path": str(path), "outputs": str(outputs)}
    done = subprocess.run(
        [python, "-c", _RUN], input=json.dumps(job), capture_output=True, text=True, check=False,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | QUIET | GIVES_BACK,
    )  # fmt: skip
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"killed by signal {-done.returncode}"])[-1][:120]
    return json.loads(done.stdout)["peak"], outputs


def same(a: Path, b: Path) -> str:
    """How equal two files of outputs are."""
    import numpy as np

    with np.load(a) as x, np.load(b) as y:
        if all(x[n].tobytes() == y[n].tobytes() for n in x.files):
            return "="
        scales = [float(np.max(np.abs(x[n]), initial=1e-30)) for n in x.files]
        errors = [float(np.max(np.abs(x[n] - y[n]), initial=0)) for n in x.files]
    return f"{max(e / s for e, s in zip(errors, scales, strict=True)):.0e}"


def cell(python: Path, original: Path, small: Path, budget: int, setting: Setting) -> str:
    """Peak over budget, saving kept, and how equal the outputs are."""
    before, after = (run(python, path, small.parent, setting) for path in (original, small))
    if isinstance(before, str) or isinstance(after, str):
        return "fails: " + next(r for r in (before, after) if isinstance(r, str))
    return f"{after[0] / budget:.2f} (was {before[0] / budget:.2f}), {same(before[1], after[1])}"


def after_tool(python: Path, tool: str, small: Path) -> tuple[Path | None, str]:
    """What a tool makes of a file and what `onnx-remat check` says of that."""
    target = small.with_name(f"{small.stem}-{tool}.onnx")
    done = subprocess.run(
        [python, "-c", _TOOLS[tool], small, target], capture_output=True, text=True, check=False, timeout=600,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
    )  # fmt: skip
    if done.returncode or not target.exists():
        return None, "tool fails: " + (done.stderr.strip().splitlines() or ["?"])[-1][:100]
    try:
        found = check(target)
    except OnnxRematError as error:
        return target, f"check: {str(error)[:100]}"
    lost = f"{len(found.recomputed_lost)}/{found.recomputed} recomputes lost, "
    lost += f"{len(found.control_edges_lost)}/{found.control_edges} edges"
    verdict = "kept" if found.kept else "NOT kept" if found.lost else "unresolved"
    return target, f"{verdict} ({lost})"


def show(name: str, head: str, rows: dict[str, list[str]], graphs: list[str], keep: bool) -> None:
    """Print a table; rows of equal cells in one."""
    merged: dict[tuple[str, ...], list[str]] = {}
    for label, cells in rows.items():
        merged.setdefault(tuple(cells), []).append(label)
    lines = tuple(("; ".join(labels), *cells) for cells, labels in merged.items())
    made = Table("python -m scripts.survival FOLDER --save", (head, *graphs), lines)
    print(made.to_markdown() + "\n")
    if keep:
        save(name, made)


def main() -> None:
    """Fill the matrix and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--versions", nargs="*", default=_VERSIONS)
    parser.add_argument("--tools", nargs="*", default=list(_TOOLS), choices=list(_TOOLS))
    parser.add_argument("--graphs", nargs="*", type=Path, default=sorted((ROOT / "sample_models").glob("*.onnx")))
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--save", action="store_true", help="also write docs/results/data/survival-*.json")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    small, budgets = {}, {}
    for graph in given.graphs:
        small[graph] = given.folder / f"{graph.stem}-small.onnx"
        result = onnx_remat.rewrite_model(graph, given.budget, effort=5.0, run_by="session")
        result.save(small[graph], force=True)
        budgets[graph] = result.report.budget
    names = [graph.stem for graph in given.graphs]

    def row(make: Callable[[Path], str]) -> list[str]:
        return [make(graph) for graph in given.graphs]

    rows: dict[str, list[str]] = {}
    for version in given.versions:
        python = environment(given.folder, f"ort-{version}", [f"onnxruntime=={version}"])
        settings = SETTINGS if version in (given.versions[0], given.versions[-1]) else {"default": Setting()}
        for label, setting in settings.items():
            rows[f"{version}, {label}"] = row(
                lambda g, p=python, s=setting: cell(p, g, small[g], budgets[g], s)  # type: ignore[misc]
            )
            print(f"{version}, {label}: {rows[f'{version}, {label}']}", file=sys.stderr, flush=True)
    show("survival-runtimes", "onnxruntime", rows, names, given.save)
    newest = environment(given.folder, f"ort-{given.versions[-1]}", [f"onnxruntime=={given.versions[-1]}"])
    rows = {}
    for tool in given.tools:
        python = environment(given.folder, f"tool-{tool}", [_PACKAGES.get(tool, tool), "onnx"])

        def judged(graph: Path, tool: str = tool, python: Path = python) -> str:
            target, verdict = after_tool(python, tool, small[graph])
            return verdict + (f"; measured {cell(newest, graph, target, budgets[graph], Setting())}" if target else "")

        rows[tool] = row(judged)
        print(f"{tool}: {rows[tool]}", file=sys.stderr, flush=True)
    show("survival-tools", "then another tool", rows, names, given.save)


if __name__ == "__main__":
    main()
