"""What ONNX Runtime's CUDA provider makes of rewritten steps: peaks, order, host waits and copies, in one table.

    python -m scripts.cuda_truth FOLDER_OR_FILE... [--budget 60%] [--effort 10] [--levels disable,basic,all,session]
                                                   [--keep FOLDER]
    python -m scripts.cuda_truth --keep FOLDER --versions

Each step is rewritten for ``--provider cuda`` and run, as it was and as it is, on the fake device of the tests, which
takes the environment that `scripts/gpu_env.py` makes (ONNX_REMAT_GPU_ENV). Every convolution takes 1 MiB there, as is
planned for. One line per file and optimisation level: the budget, the peak predicted and the peak of the device's books
(bytes of all tensors and workspace, exact), whether the nodes with large results ran in the order predicted, and host
waits and Memcpy nodes, before -> after. What misses its mark ends in ``!``: a peak over the budget or 0.5 % off, an
order that is not as predicted, three waits or one copy more. Files that cannot be rewritten are listed with the reason.

The line ``session`` is of a file written ``--for loop``, and of what `onnx_remat.Session` and `Loop` take of the device
in all, state included, against what was predicted, which must be the smallest limit they run under to 1 %.

With ``--keep`` rewritten steps and lines stay in FOLDER, and a second run goes on where the first one stopped;
environments of several versions (``onnxruntime-gpu``) share the steps and have lines of their own. ``--versions`` sums
up the lines that are there: one row per version.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from onnx_remat.errors import OnnxRematError
from onnx_remat.ir.metadata import BUDGET_KEY, entries
from onnx_remat.options import Options
from onnx_remat.ort.executed import Executed, as_executed
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.session.prediction import predict
from scripts.results import Table, save
from tests.support.fake_cuda import here, run

WORKSPACE = 2**20
LARGE = 0.005
"""Fraction of the peak from which on a node's result counts for the order: what is smaller may float."""

SESSION = "session"
"""In place of a level: a `Session` of ours."""

_OFF, _OFF_SESSION, _WAITS = 0.005, 0.01, 3
_SETTINGS = {"workspace_forward": WORKSPACE, "workspace_data": WORKSPACE}

_HEADS = ("step", "level", "budget", "predicted", "device", "off", "in order", "host waits", "Memcpy nodes")
_SUMS = (
    "onnxruntime-gpu", "steps", "lines", "off at most", "with Session", "over budget", "out of order", "waits more",
    "Memcpy more", "lines that miss a mark",
)  # fmt: skip
_LEVELS = {"disable": "ORT_DISABLE_ALL", "basic": "ORT_ENABLE_BASIC", "all": "ORT_ENABLE_ALL"}
_HEAD = f"{'step':<18}{'level':<9}{'budget':>12}{'predicted':>12}{'device':>12}{'off':>8}  order  waits     copies"


@dataclass(frozen=True, slots=True)
class Line:
    """One file at one optimisation level; bytes, and counts before and after the rewrite."""

    step: str
    level: str
    budget: int
    predicted: int
    device: int
    in_order: bool
    waits: tuple[int, int]
    copies: tuple[int, int]

    def cells(self) -> tuple[str, ...]:
        """The line of the results page."""
        off = (self.device - self.predicted) / self.predicted
        pairs = (f"{a} -> {b}" for a, b in (self.waits, self.copies))
        return (
            self.step, self.level, f"{self.budget:,}", f"{self.predicted:,}", f"{self.device:,}", f"{off:+.2%}",
            "yes" if self.in_order else "no", *pairs,
        )  # fmt: skip

    def misses(self) -> bool:
        """Does it miss any mark?"""
        off = abs(self.device - self.predicted) > (_OFF_SESSION if self.level == SESSION else _OFF) * self.predicted
        more = self.waits[1] > self.waits[0] + _WAITS or self.copies[1] > self.copies[0]
        return self.device > self.budget or off or not self.in_order or more

    def __str__(self) -> str:
        """The line of the table; what misses its mark ends in an exclamation mark."""
        off = (self.device - self.predicted) / self.predicted
        marks = " !" if self.misses() else ""
        return (
            f"{self.step:<18}{self.level:<9}{self.budget:>12,}{self.predicted:>12,}{self.device:>12,}{off:>8.2%}  "
            f"{'yes' if self.in_order else 'NO':<5}  {self.waits[0]:>3} -> {self.waits[1]:<3} "
            f"{self.copies[0]:>3} -> {self.copies[1]:<3}{marks}"
        )


def lines(path: Path, budget: str, effort: float, levels: Sequence[str], keep: Path) -> Iterator[Line]:
    """Rewrite a step and run it at every level, or read what is kept of either."""
    options = Options(provider="cuda", cudnn_workspace=WORKSPACE)
    for level in levels:
        known = keep / f"{path.stem}-{level}-{run.version()}.json"
        if not known.exists():
            small = keep / ("loop" if level == SESSION else "") / path.name
            if not small.exists():
                small.parent.mkdir(exist_ok=True)
                rewrite_model(
                    path, budget, provider="cuda", cudnn_workspace=WORKSPACE, effort=effort,
                    run_by="loop" if level == SESSION else "session",
                ).save(small)  # fmt: skip
            model = onnx.load(small)
            allowed = int(entries(model)[BUDGET_KEY])
            expected = as_executed(model, keep, "all" if level == SESSION else level, options.preparation())
            found = (_session if level == SESSION else _line)(path, small, allowed, expected, level)
            known.write_text(json.dumps(asdict(found)))
        yield _read(known)


def _line(path: Path, small: Path, budget: int, expected: Executed, level: str) -> Line:
    before, after = (run.run_step(file, _LEVELS[level], **_SETTINGS) for file in (path, small))
    weights = expected.compiled.problem.base_bytes - sum(
        expected.compiled.tensors[value.name].nbytes for value in expected.compiled.graph.model.graph.input
    )
    return Line(
        path.stem, level, budget, expected.timeline.peak, after.peak + weights, _in_order(expected, after),
        (before.waits, after.waits), (_memcpy(before), _memcpy(after)),
    )  # fmt: skip


def _session(path: Path, small: Path, budget: int, expected: Executed, level: str) -> Line:
    """What a `Session` of ours takes of the device, in a loop that renews state in place.

    Its arena grows by what is asked and no more, so the most that it ever took is the smallest limit it runs under. It
    is opened again with the limit predicted, and once more with 1 % less: that it must not bear.
    """
    limit = predict(expected).total
    job = {"path": str(small.resolve()), "limits": [0, limit, int(limit * (1 - _OFF_SESSION)) - 1]}
    free, enough, little = here.ask("tests.support.fake_cuda.session", job, **_SETTINGS)
    if "error" in free or "error" in enough:
        raise run.Failed(free.get("error") or enough["error"])
    peak = max(step["peak"] for step in free["steps"])
    waits = max(step["waits"] for step in free["steps"])
    before = run.run_step(path, _LEVELS["all"], **_SETTINGS)
    return Line(path.stem, level, budget, limit, peak, "error" in little, (before.waits, waits), (0, 0))


def _in_order(expected: Executed, ran: run.Step) -> bool:
    """Did the nodes with large results that both have, views aside, run in the order predicted?"""
    compiled = expected.compiled
    ops = [compiled.graph.ops[i] for i in expected.order.order]
    ops = [op for op in ops if not compiled.kernels.aliases(op.node)]
    least = LARGE * expected.timeline.peak
    large = [op.node.name for op in ops if any(compiled.tensors[name].nbytes >= least for name in op.writes)]
    names = {name for name, _, _ in ran.order} & set(large)
    return [n for n in large if n in names] == [n for n, _, _ in ran.order if n in names]


def by_version(keep: Path) -> Iterator[tuple[str, ...]]:
    """The lines that are kept, summed up: a row per version of onnxruntime-gpu."""
    found: dict[tuple[int, ...], list[Line]] = {}
    for path in sorted(keep.glob("*.json")):
        numbers = tuple(int(part) for part in path.stem.rpartition("-")[2].split("."))
        found.setdefault(numbers, []).append(_read(path))
    for version, seen in sorted(found.items()):
        stock, ours = ([line for line in seen if (line.level == SESSION) == session] for session in (False, True))
        offs = [max((abs(line.device / line.predicted - 1) for line in some), default=0.0) for some in (stock, ours)]
        yield (
            ".".join(map(str, version)), str(len({line.step for line in seen})), str(len(seen)),
            *(f"{off:.2%}" for off in offs), str(sum(line.device > line.budget for line in seen)),
            str(sum(not line.in_order for line in seen)), str(max(line.waits[1] - line.waits[0] for line in seen)),
            str(max(line.copies[1] - line.copies[0] for line in seen)), str(sum(line.misses() for line in seen)),
        )  # fmt: skip


def _read(path: Path) -> Line:
    read = json.loads(path.read_text())
    return Line(**read | {"waits": tuple(read["waits"]), "copies": tuple(read["copies"])})


def _check_settings(keep: Path, settings: dict[str, Any]) -> None:
    """Refuse a folder with steps of other settings; note these in a new one."""
    noted = keep / "settings"
    if noted.exists() and json.loads(noted.read_text()) != settings:
        raise SystemExit(f"{keep} has steps of {noted.read_text()}: name another folder")
    noted.write_text(json.dumps(settings))


def _memcpy(step: run.Step) -> int:
    return sum(op.startswith("Memcpy") for _, op, _ in step.order)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="FOLDER_OR_FILE")
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--effort", type=float, default=10.0, help="of each plan: the same plan on any machine")
    parser.add_argument("--levels", default="disable,basic,all,session")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--versions", action="store_true", help="sum up what is in --keep")
    parser.add_argument("--save", action="store_true", help="also write docs/results/data/NAME.json, or cuda-versions")
    parser.add_argument("--name", default="cuda", help="name of the table that --save writes (default: cuda)")
    given = parser.parse_args()
    if given.versions:
        command = "python -m scripts.cuda_truth --keep FOLDER --versions --save"
        summed = Table(command, _SUMS, tuple(by_version(given.keep)))
        print(summed.to_markdown())
        if given.save:
            save("cuda-versions", summed)
        return
    if why := run.why_not():
        parser.error(why)
    print(f"onnxruntime-gpu {run.version()}\n{_HEAD}", flush=True)
    seen: list[Line] = []
    failed = 0
    with contextlib.ExitStack() as stack:
        keep = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keep.mkdir(parents=True, exist_ok=True)
        _check_settings(keep, {"budget": given.budget, "effort": given.effort})
        for path in [file for p in given.paths for file in (sorted(p.rglob("*.onnx")) if p.is_dir() else [p])]:
            try:
                for line in lines(path, given.budget, given.effort, given.levels.split(","), keep):
                    print(line, flush=True)
                    seen.append(line)
            except (OnnxRematError, run.Failed) as error:
                print(f"{path.stem:<18}{error}", flush=True)
                failed += 1
    if given.save:
        command = f"python -m scripts.cuda_truth FOLDER --save --name {given.name}"
        save(given.name, Table(command, _HEADS, tuple(line.cells() for line in seen)))
    missed = failed + sum(line.misses() for line in seen)
    print(f"{missed} lines miss a mark" if missed else "every line keeps its marks")


if __name__ == "__main__":
    main()
