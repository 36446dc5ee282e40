"""Training steps on a real GPU: are they right, what do they take of the device, and how fast are they?

    python -m scripts.gpu_truth plan FOLDER STEP.onnx... [--budget 60%] [--dims batch=32]
    python -m scripts.gpu_truth open FOLDER
    python -m scripts.gpu_truth numbers FOLDER [--out LINES]
    python -m scripts.gpu_truth race FOLDER [--with eager] [--with compile] [--out LINES]
    python -m scripts.gpu_truth table LINES [--save]

``plan`` needs no GPU: it copies each step to FOLDER and rewrites it there to every budget, for CUDA and a `Loop`, and
to the same bytes once more for fused kernels. The others run what lies there, the original also fused. Rows are kept in
LINES as they are measured, and one that is there is not measured again.

*Numbers*: one step of the original on the CPU, or if that cannot compute it the first on the device, is what outputs
are compared with, as ‖a - b‖ / ‖b‖ of the worst
output: of the original and the rewritten file, in onnxruntime's own session at two levels, in a `Session` with new
state over the old, and in the same captured in a CUDA graph. TF32 is off for that (NVIDIA_TF32_OVERRIDE=0).

``open`` plans where values lie, for several files at once, so that the others need not.

*Race*: every runner is a fresh process, alone on the device. *Taken* is what the driver says is used on the device
after the steps, less what it says of a process that has done a product and a convolution: none gives anything back
before it ends, so that is the most it took. *Least limit* is the smallest `memory_limit` that training runs under, in
steps of 32 MiB from the one predicted (``--no-limits``: tries that one alone). *Time* is the median of steps, each
with its loss read. PyTorch's models are those of `sample_models.networks.torch_models`, with a batch of the same size;
both may use TF32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from onnx_remat.errors import OnnxRematError
from scripts import gpu_numbers
from scripts.child import answered
from scripts.gpu_steps import kept, request_of, taken
from scripts.journal import Journal

PLANS = "plans.json"
ORIGINAL, FUSED = "as it is", ", fused"
NUMBERS_HEADS = ("step", "file", *gpu_numbers.WAYS, "outputs with the original's bits")
RACE_HEADS = (
    "step", "runner", "predicted, MB", "least limit, MB", "taken, MB", "of eager", "ms a step", "of eager",
    "in a CUDA graph, MB", "ms", "of eager", "compute, plan", "time",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """A file to run: the step's name, the budget it was rewritten to, or `ORIGINAL`.

    `predicted` is what training by `Loop` takes of the device, in bytes; `fuse` says whether its kernels are fused.
    """

    step: str
    budget: str
    path: str
    dims: Mapping[str, int]
    predicted: int
    compute: float
    fuse: bool = False


def plan(folder: Path, steps: list[Path], budgets: list[str], dims: Mapping[str, int], effort: float) -> None:
    """Add steps to a folder."""
    from onnx_remat.rewrite.pipeline import rewrite_model

    folder.mkdir(parents=True, exist_ok=True)
    plans = {(each.step, each.budget): each for each in known(folder)}
    for path in steps:
        shutil.copyfile(path, folder / path.name)
        for fuse in (False, True):
            name = ORIGINAL + FUSED * fuse
            plans[path.stem, name] = Plan(path.stem, name, path.name, dict(dims), 0, 0.0, fuse)
        asked: dict[str, int] = {}
        for budget, fuse in itertools.product(budgets, (False, True)):
            name, original = budget + FUSED * fuse, (path.stem, ORIGINAL + FUSED * fuse)
            try:
                result = rewrite_model(
                    path, asked.get(budget, budget), provider="cuda", run_by="loop", dims=dims, effort=effort,
                    time_limit=600, fuse=fuse,
                )  # fmt: skip
            except OnnxRematError as error:
                print(f"{path.stem} {name}: {error}", flush=True)
                plans.pop((path.stem, name), None)
                continue
            asked.setdefault(budget, result.report.budget)
            result.save(target := folder / f"{path.stem}-{budget.strip('%')}{'-fused' * fuse}.onnx", force=True)
            before, after, compute = result.report.loop_before, result.report.loop_after, result.report.extra_compute
            assert before is not None and after is not None
            plans[original] = replace(plans[original], predicted=before.total)
            plans[path.stem, name] = Plan(path.stem, name, target.name, dict(dims), after.total, compute, fuse)
            print(plans[path.stem, name], flush=True)
        (folder / PLANS).write_text(json.dumps([asdict(each) for each in plans.values()], indent=1))


def known(folder: Path) -> list[Plan]:
    """What `plan` made."""
    if not (folder / PLANS).exists():
        return []
    return [Plan(**each) for each in json.loads((folder / PLANS).read_text())]


def by_step(folder: Path) -> dict[str, list[Plan]]:
    """The files of each step, the original first."""
    found: dict[str, list[Plan]] = {}
    for each in known(folder):
        found.setdefault(each.step, []).insert(0 if each.budget == ORIGINAL else len(found[each.step]), each)
    return found


def open_all(folder: Path) -> None:
    """Open every file, several at once, for `gpu_steps.kept`."""

    def one(each: Plan) -> None:
        try:
            with tempfile.TemporaryDirectory() as home:
                kept((folder / each.path).resolve(), Path(home) / "lean.onnx", request_of(each.dims, each.fuse))
        except Exception as error:  # of one file: the others are opened all the same
            print(f"{each.step} {each.budget}: {type(error).__name__}: {error}", flush=True)

    with ThreadPoolExecutor((os.cpu_count() or 2) // 2) as pool:
        list(pool.map(one, known(folder)))


def job_of(folder: Path, each: Plan) -> dict[str, Any]:
    """What a process has to know of a file to run it."""
    path = str((folder / each.path).resolve())
    return {"step": each.step, "file": each.budget, "path": path, "dims": dict(each.dims), "fuse": each.fuse}


def race(
    folder: Path, plans: list[Plan], others: list[str], limits: bool, journal: Journal, seconds: float
) -> Iterator[dict[str, Any]]:
    """What each runner of one step took."""
    first = job_of(folder, plans[0])
    key = {"measure": "race", "step": first["step"], "dims": first["dims"]}
    for how in others:
        job = first | {"how": how, "batch": first["dims"].get("batch", 1)}
        yield journal.measured(key | {"runner": how}, partial(answered, taken, job, seconds=seconds))
    for each in plans:
        job = job_of(folder, each) | {"how": "Session", "predicted": each.predicted, "limits": limits}
        ours = {"runner": f"Session, {each.budget}", "compute": each.compute}
        ours |= {"predicted": each.predicted, "limits": limits}
        yield journal.measured(key | ours, partial(answered, taken, job, seconds=seconds))


def rows(found: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The lines of the race's table: of a row that was measured again, the last."""
    found = [each for each in found if each.get("measure") == "race"]
    found = list({(each["step"], each["runner"]): each for each in found}.values())
    eager = {each["step"]: each for each in found if each["runner"] == "eager" and "error" not in each}
    ours = {(each["step"], each["runner"]): each for each in found if "error" not in each}
    for each in found:
        if "error" in each:
            yield each["step"], each["runner"], each["error"], *[""] * (len(RACE_HEADS) - 3)
            continue
        original = f"Session, {ORIGINAL}{FUSED * each['runner'].endswith(FUSED)}"
        base, plain = eager.get(each["step"]), ours.get((each["step"], original))
        longer = each["seconds"] / plain["seconds"] - 1 if plain and each.get("compute") else None
        yield (
            each["step"], each["runner"], f"{each['predicted'] / 1e6:,.0f}" if each.get("predicted") else "",
            f"{each['least'] / 1e6:,.0f}" if each.get("least") else "", f"{each['taken'] / 1e6:,.0f}",
            f"{each['taken'] / base['taken']:.2f}" if base else "", f"{each['seconds'] * 1e3:.1f}",
            f"{each['seconds'] / base['seconds']:.2f}" if base else "",
            f"{each['graph_taken'] / 1e6:,.0f}" if each.get("graph_taken") else "",
            f"{each['graph'] * 1e3:.1f}" if each.get("graph") else "",
            f"{each['graph'] / base['seconds']:.2f}" if each.get("graph") and base else "",
            f"{each['compute']:+.1%}" if each.get("compute") else "", "" if longer is None else f"{longer:+.1%}",
        )  # fmt: skip


def main() -> None:
    """Do what the first argument says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "numbers", "open", "race", "table"))
    parser.add_argument("folder")
    parser.add_argument("steps", nargs="*", type=Path)
    parser.add_argument("--budget", action="append", help="of plan, default 60%%")
    parser.add_argument("--dims", action="append", default=[], metavar="NAME=N", help="of plan")
    parser.add_argument("--effort", type=float, default=3.0, help="of plan")
    parser.add_argument("--only", action="append", help="these steps")
    parser.add_argument(
        "--with", dest="others", action="append", choices=("eager", "compile", "onnxruntime"), help="of race"
    )
    parser.add_argument("--no-limits", action="store_true", help="of race, try the predicted limits alone")
    parser.add_argument("--out", type=Path, metavar="LINES", help="of numbers and race, a file of JSON lines to add to")
    parser.add_argument("--again", action="store_true", help="measure rows of LINES again of which a part failed")
    parser.add_argument("--seconds", type=float, default=240, help="most that a row may take (default: %(default)s)")
    parser.add_argument(
        "--save", action="store_true", help="also write docs/results/data/gpu-numbers.json or gpu-race.json"
    )
    given = parser.parse_args()
    folder = Path(given.folder)
    if given.what == "plan":
        dims = {name: int(size) for name, _, size in (each.partition("=") for each in given.dims)}
        plan(folder, given.steps, given.budget or ["60%"], dims, given.effort)
        return
    if given.what == "open":
        open_all(folder)
        return
    from scripts import results

    planned = by_step(folder) if given.what in ("numbers", "race") else {}
    steps = {step: plans for step, plans in planned.items() if not given.only or step in given.only}
    journal = Journal(given.out, given.again)
    if given.what == "numbers":
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
        numbers = (
            gpu_numbers.cells(row)
            for plans in steps.values()
            for row in gpu_numbers.rows([job_of(folder, each) for each in plans], journal, given.seconds)
        )
        command = "python -m scripts.gpu_truth numbers FOLDER --save"
        table = results.Table(command, NUMBERS_HEADS, results.printed(numbers))
    elif given.what == "table":
        table = results.Table(
            "python -m scripts.gpu_truth table LINES --save", RACE_HEADS, results.printed(rows(Journal(folder).rows()))
        )
    else:
        found = []
        for plans in steps.values():
            for each in race(folder, plans, given.others or [], not given.no_limits, journal, given.seconds):
                found.append(each)
                print(json.dumps(each), flush=True)
        table = results.Table("python -m scripts.gpu_truth race FOLDER", RACE_HEADS, results.printed(rows(found)))
    if given.save:
        results.save("gpu-numbers" if given.what == "numbers" else "gpu-race", table)


if __name__ == "__main__":
    main()
