"""Every rule of the three converters, run by several versions of ONNX Runtime at each of their optimisation levels.

    pip install --no-deps --target /tmp/ort1.22.1 onnxruntime==1.22.1
    python -m scripts.battery FOLDER --runtimes /tmp/ort1.19.2 /tmp/ort1.22.1 --save

FOLDER gets one step per case, its feeds, and what they make in float64; those that are there already are kept.
A process per version, the one installed last, runs them all. A result is wrong where it is further from float64 than
rounding takes the newest version with optimisations off; where nothing computes it in float64 (random samples), that
version's result with optimisations off stands for it. Patterns known to be computed wrongly are run for comparison.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Feeds = dict[str, np.ndarray]
LEVELS = {"disable": 0, "basic": 1, "extended": 2, "all": 99}
TOLERANCE = 2e-3  # of a tensor's largest element, and 30 times what is off without optimisations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runtimes", nargs="*", default=[], metavar="DIR", help="where other versions are installed")
    parser.add_argument("--save", action="store_true", help="put the tables among the results")
    given = parser.parse_args()
    make(given.folder)
    found = {}
    for place in (*given.runtimes, ""):
        version, found_there = run(given.folder, place)
        found[version] = found_there
    newest = list(found)[-1]
    tables(found, newest, given.save)
    return 0


# --- making the cases ------------------------------------------------------------------------------------------------


def make(folder: Path) -> None:
    """Write every case that is not there."""
    made: Counter[str] = Counter()
    for name, build in cases():
        place = folder / "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
        if not (place / "expected.npz").exists() and not (place / "none").exists():
            place.mkdir(parents=True, exist_ok=True)
            try:
                write(place, *build())
            except Exception:
                (place / "none").write_text(traceback.format_exc())
                print(f"{name}: {traceback.format_exc(limit=-1).splitlines()[-1]}", flush=True)
        made[name.partition(" ")[0]] += (place / "expected.npz").exists()
    print(", ".join(f"{count} cases of {group}" for group, count in made.items()), flush=True)


def write(place: Path, step: Any, feeds: Feeds) -> None:
    from onnx_remat.converters.checks import default_level, finite_differences

    step = default_level.seeded(step)
    (place / "step.onnx").write_bytes(step.SerializeToString())
    np.savez(place / "feeds.npz", **{name: np.asarray(value) for name, value in feeds.items()})  # type: ignore[arg-type]
    try:
        exact = {} if default_level.is_random(step) else finite_differences.in_float64(step, feeds)
    except Exception:  # an op that the evaluator does not know: versions and levels are compared with each other
        exact = {}
    np.savez(place / "expected.npz", **exact)


def cases() -> Iterator[tuple[str, Callable[[], tuple[Any, Feeds]]]]:
    """Name, beginning with its group, and what makes step and feeds."""
    yield from _patterns()
    yield from _autodiff()
    yield from _jax()
    yield from _pytorch()


def _patterns() -> Iterator[tuple[str, Callable[[], tuple[Any, Feeds]]]]:
    from tests.ort import test_known_bugs as known

    def build(text: str) -> tuple[Any, Feeds]:
        step, rng = known.model(text), np.random.default_rng(0)
        shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in step.graph.input}
        return step, {n: -rng.uniform(1, 2, shape).astype(np.float32) for n, shape in shapes.items()}

    for name, (_, _, _, _, text) in known.MEETING.items():
        yield f"pattern {name}", lambda text=text: build(text)  # type: ignore[misc]


def _autodiff() -> Iterator[tuple[str, Callable[[], tuple[Any, Feeds]]]]:
    from onnx_remat.converters.autodiff import add_backward

    from tests.converters import test_autodiff_ops as ops

    def build(case: Any) -> tuple[Any, Feeds]:
        forward, feeds, wrt = ops.build(case, symbolic=False)
        step = add_backward(forward, wrt=wrt, check=False)
        return step, {name: value.astype(np.float32) for name, value in feeds.items()}

    for case in ops.CASES:
        yield f"autodiff {case.id}", lambda case=case: build(case)  # type: ignore[misc]


def _jax() -> Iterator[tuple[str, Callable[[], tuple[Any, Feeds]]]]:
    from onnx_remat.converters.jax import export as converter
    from onnx_remat.converters.jax.step import trace

    from tests.converters.test_jax import BATTERY, weighted

    def build(name: str) -> tuple[Any, Feeds]:
        function, start = BATTERY[name]
        step = trace(lambda params: weighted(function)(params["p"]), {"p": start()}, (), None, None, None)
        return converter.convert(step), step.feeds()

    for name in BATTERY:
        yield f"jax {name}", lambda name=name: build(name)  # type: ignore[misc]


def _pytorch() -> Iterator[tuple[str, Callable[[], tuple[Any, Feeds]]]]:
    import torch
    from onnx_remat.converters.pytorch import export_training_step, initial_feeds

    from tests.support import torch_battery

    def build(name: str) -> tuple[Any, Feeds]:
        torch.manual_seed(0)
        model = torch_battery.Group([name])
        step = export_training_step(model, torch.ones(()), check=False)
        known = initial_feeds(step, model)
        return step, {v.name: known.get(v.name, np.ones((), np.float32)) for v in step.graph.input}

    for name in torch_battery.CASES:
        yield f"pytorch {name}", lambda name=name: build(name)  # type: ignore[misc]


# --- running them, in a process of each version ----------------------------------------------------------------------


def run(folder: Path, place: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """What the version installed at `place` makes of every case, by case and level: an error, or what it says."""
    root = str(Path(__file__).parents[1])
    paths = os.pathsep.join(filter(None, (place, root)))
    environment = os.environ | {"PYTHONPATH": paths, "ORT_DISABLE_TELEMETRY": "1"}
    code = f"from scripts.battery import child; child({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    version, found = json.loads(done.stdout.splitlines()[-1])
    print(f"{version}: {len(found)} cases run", flush=True)
    return version, found


def child(folder: str) -> None:
    import onnxruntime

    found = {}
    for place in sorted(Path(folder).iterdir()):
        if (place / "expected.npz").exists():
            with np.load(place / "feeds.npz") as feeds, np.load(place / "expected.npz") as expected:
                found[place.name] = _at_all_levels(place / "step.onnx", dict(feeds), dict(expected))
    print(json.dumps([onnxruntime.__version__, found]))


def _at_all_levels(path: Path, feeds: Feeds, expected: Feeds) -> dict[str, Any]:
    import onnxruntime

    said: dict[str, Any] = {}
    for name, level in LEVELS.items():
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel(level)
        options.log_severity_level, options.intra_op_num_threads = 4, 1
        try:
            session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            wanted = {value.name for value in session.get_inputs()}
            made = session.run(None, {n: v for n, v in feeds.items() if n in wanted})
        except Exception as error:
            said[name] = str(error).splitlines()[0]
            continue
        results = dict(zip((value.name for value in session.get_outputs()), made, strict=True))
        expected = expected or results
        said[name] = max((_off(results[n], expected[n]) for n in results), default=0.0)
    return said


def _off(made: np.ndarray | None, expected: np.ndarray) -> float:
    """Largest difference, relative to the largest element; infinite for another shape, or NaN elsewhere."""
    if made is None or made.shape != expected.shape or (np.isnan(made) != np.isnan(expected)).any():
        return float("inf")
    a, b = made.astype(np.float64), expected.astype(np.float64)
    same = (a == b) | np.isnan(a)
    with np.errstate(invalid="ignore"):
        worst = np.abs(np.where(same, 0, a - b)).max(initial=0)
    return float(worst / max(np.abs(b[np.isfinite(b)]).max(initial=0), 1e-3))


# --- what is wrong ---------------------------------------------------------------------------------------------------


def tables(found: dict[str, dict[str, dict[str, Any]]], newest: str, keep: bool) -> None:
    """One of counts by converter, version and level; one of what is wrong, or not run for optimisations."""
    from scripts.results import Table, save

    counts: dict[tuple[str, str], Counter[str]] = {}
    wrong: dict[tuple[str, str, str], dict[str, list[str]]] = {}
    for version, by_case in found.items():
        for case, by_level in by_case.items():
            group, _, name = case.partition("_")
            counted = counts.setdefault((group, version), Counter())
            plain, usual = by_level["disable"], found[newest][case]["disable"]
            counted["cases"] += 1
            counted["unknown"] += isinstance(plain, str)
            for level, got in by_level.items():
                what = _verdict(got, plain, usual)
                if what:
                    counted[level] += 1
                    wrong.setdefault((group, name, what), {}).setdefault(version, []).append(level)
    command = "python -m scripts.battery FOLDER --runtimes DIR ... --save"
    heads = ("steps of", "ONNX Runtime", "cases", "not of that version", *(f"wrong, {level}" for level in LEVELS))
    rows = tuple(
        (group, version, *(str(counted[key]) for key in ("cases", "unknown", *LEVELS)))
        for (group, version), counted in counts.items()
    )
    listed = tuple(
        (group, f"`{name}`", ", ".join(f"{v}: {' '.join(levels)}" for v, levels in where.items()), what)
        for (group, name, what), where in sorted(wrong.items())
    )
    for name, table in (
        ("battery", Table(command, heads, rows)),
        ("battery-wrong", Table(command, ("steps of", "case", "version: levels", "what"), listed)),
    ):
        print(table.to_markdown(), end="\n\n")
        if keep:
            save(name, table)


def _verdict(got: float | str, plain: float | str, usual: float | str) -> str:
    """Nothing where it is right. What a version refuses without optimisations is no fault of theirs."""
    if isinstance(plain, str):
        return ""
    if isinstance(got, str):
        return "refused"
    rounding = usual if isinstance(usual, float) and np.isfinite(usual) else 0.0
    return "wrong" if got > max(TOLERANCE, 30 * rounding) else ""


if __name__ == "__main__":
    sys.exit(main())
