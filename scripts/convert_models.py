"""Export well-known models as training steps, check them, rewrite them to a budget, and print what came out.

    python -m scripts.convert_models --out DIR                       write the exported steps
    python -m scripts.convert_models --budget 60%                    also rewrite and measure them
    python -m scripts.convert_models --model resnet18 --converter pytorch

Per model and converter: node count, seconds of export (tracing, translation and check), the largest relative error of
loss, gradients, buffers and update against the framework (where it is above 1e-5, also how far both are from the same
step in float64; for add_backward always, and how far its gradients are from torch's where both are computed in
float64), how many of them rounding alone decides, whether stock ONNX Runtime runs the step on the CPU; with
--budget also the measured peaks of the step and of its rewritten version (in brackets how far the simulated ones are
off), the extra compute, and how equal their outputs are.

A builder makes the model and returns a function that exports it, which alone is timed; it is entered in the table
with ``@builds(model, converter)``. Models are built from their configurations, nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import onnx

from onnx_remat.errors import OnnxRematError
from onnx_remat.measure import processes, verify
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.units import format_bytes
from sample_models.networks import forward_models, jax_models, torch_models

Export: TypeAlias = Callable[[], onnx.ModelProto]
Builder: TypeAlias = Callable[[], Export]
BUILDERS: dict[tuple[str, str], Builder] = {}


def builds(model: str, converter: str) -> Callable[[Builder], Builder]:
    """Enter the function below as what builds `model` for `converter`."""

    def enter(builder: Builder) -> Builder:
        BUILDERS[model, converter] = builder
        return builder

    return enter


for _name, _make in torch_models.MODELS.items():
    BUILDERS[_name, "pytorch"] = partial(torch_models.builder, _make)
for _name, _case in jax_models.MODELS.items():
    BUILDERS[_name, "jax"] = partial(jax_models.builder, _case)
for _name in forward_models.TORCH:
    BUILDERS[_name, "autodiff"] = partial(forward_models.exported, torch_models.MODELS[_name])
for _name in forward_models.LIGHT:
    BUILDERS[f"light_{_name}", "autodiff"] = partial(forward_models.light, _name)


@dataclass(frozen=True, slots=True)
class Row:
    """One model by one converter; seconds and bytes."""

    model: str
    converter: str
    outcome: str
    nodes: int = 0
    seconds: float = 0.0
    error: float = 0.0
    worst: str = ""
    undetermined: int = 0
    exact: tuple[float, float] | None = None
    in_float64: float | None = None
    runs: bool = False
    budget: int = 0
    before: int = 0
    after: int = 0
    predicted: tuple[int, int] = (0, 0)
    compute: float = 0.0
    outputs: str = ""


def convert(model: str, converter: str, out: Path, budget: str | None, limit: float) -> Row:
    """Export one model, write it, and rewrite it to the budget."""
    try:
        export = BUILDERS[model, converter]()
        start = time.perf_counter()
        step = export()
    except (OnnxRematError, ImportError) as error:
        return Row(model, converter, f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - start
    path = out / f"{model}.{converter}.onnx"
    onnx.save(step, path)
    known = {p.key: p.value for p in step.metadata_props}
    facts = (
        len(step.graph.node), seconds, float(known["check.error"]), known["check.output"],
        int(known["check.undetermined"]), _exact(known), _number(known, "check.in_float64"),
    )  # fmt: skip
    del step
    if budget is None:
        return Row(model, converter, "exported", *facts, _runs(path))
    before = processes.measure(path).peak_bytes
    try:
        result = rewrite_model(path, budget, effort=limit)
    except OnnxRematError as error:
        return Row(model, converter, f"{type(error).__name__}: {error}", *facts, True, before=before)
    target = out / f"{model}.{converter}.small.onnx"
    result.save(target, force=True)
    before -= processes.beyond_tensors(result.original)
    beyond = processes.beyond_tensors(result.executed)
    after = processes.peak_under(result.report.budget + beyond, partial(processes.measure, target)) - beyond
    written = onnx.load(path, load_external_data=False), result.model
    settled = verify.without_chance(written, out, out / f"{model}.{converter}.settled", result.compiled.tensors)
    equal = verify.bitwise(*(settled or (path, target))) + (" (random draws fixed)" if settled else "")
    report = result.report
    outcome = "kept" if after <= report.budget else "unresolved"
    if after > report.budget + processes.RESOLUTION:
        outcome = "EXCEEDED"
    predicted = report.before.total, report.after.total
    return Row(
        model, converter, outcome, *facts, True, report.budget, before, after, predicted, report.extra_compute, equal
    )


def _exact(known: dict[str, str]) -> tuple[float, float] | None:
    ours, framework = (_number(known, f"check.{what}_error") for what in ("exact", "framework"))
    return None if ours is None or framework is None else (ours, framework)


def _number(known: dict[str, str], key: str) -> float | None:
    return float(known[key]) if key in known else None


def _runs(path: Path) -> bool:
    processes.measure(path)
    return True


HEAD = "| model | converter | nodes | export, s | largest error (where) | undetermined | runs |"
HEAD_REWRITTEN = " peak (simulated) | budget | rewritten (simulated) | compute | outputs |"


def show(row: Row) -> str:
    """One line of the table."""
    error = f"{row.error:.1e} ({row.worst})"
    if row.exact:
        error += "; from float64 {:.1e}, the framework {:.1e}".format(*row.exact)
    if row.in_float64 is not None:
        error += f"; both in float64 {row.in_float64:.1e}"
    text = f"| {row.model} | {row.converter} | {row.nodes} | {row.seconds:.1f} | {error} |"
    text += f" {row.undetermined} |"
    text += f" {'yes' if row.runs else 'no'} |"
    if row.before:
        sizes = [
            f"{format_bytes(found)} ({told / found - 1:+.2%})" if told else format_bytes(found)
            for found, told in zip((row.before, row.after), row.predicted, strict=True)
        ]
        text += f" {sizes[0]} | {format_bytes(row.budget)} | {sizes[1]} | +{row.compute:.1%} | {row.outputs} |"
    return f"{text} {row.outcome} |"


def chosen(models: list[str] | None, converters: list[str] | None) -> Iterator[tuple[str, str]]:
    """Pairs of the table that were asked for."""
    for model, converter in BUILDERS:
        if (not models or model in models) and (not converters or converter in converters):
            yield model, converter


def main() -> None:
    """Convert every model that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", help="only this one (repeat)")
    parser.add_argument("--converter", action="append", help="only this one (repeat)")
    parser.add_argument("--out", type=Path, help="keep the files in this folder")
    parser.add_argument("--budget", help="also rewrite to this budget, 60%% for instance")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds per plan")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--list", action="store_true", help="print the pairs and stop")
    arguments = parser.parse_args()
    pairs = list(chosen(arguments.model, arguments.converter))
    if arguments.list:
        sys.exit(print("\n".join(f"{model} {converter}" for model, converter in pairs)))
    rows = []
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        out = arguments.out or Path(scratch)
        out.mkdir(parents=True, exist_ok=True)
        print(f"{HEAD}{HEAD_REWRITTEN if arguments.budget else ''} outcome |", flush=True)
        for model, converter in pairs:
            row = convert(model, converter, out, arguments.budget, arguments.time_limit)
            rows.append(row)
            print(show(row), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
