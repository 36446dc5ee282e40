"""The largest batch that trains within so much memory of the machine, as the operating system counts it.

    python -m scripts.largest_batch MODEL.onnx=400MB OTHER.onnx=450MB --save largest-batch

*session* is the largest batch for which onnxruntime's own session, its options at their defaults, is seen to take no
more than the budget for some steps in a fresh process; *loop* the largest for which `Loop` is foreseen to, with the
same file; *rewritten* the largest for which a file is found. *resident* is what that file is seen to take, *compute*
what it computes again. Linux only.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import onnx

from onnx_remat.app.bench import largest, max_batch
from onnx_remat.measure import residence
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.units import parse_budget
from scripts import results
from scripts.patterns import in_child

HEADS = ("graph", "budget, MB", "session", "loop", "rewritten", "times", "resident, MB", "compute")


def fixed(model: Path, dim: str, size: int, folder: str) -> Path:
    """The model with a symbolic dimension of one size, in a folder: a plain session must be told nothing more."""
    made = onnx.load(model, load_external_data=False)
    for value in (*made.graph.input, *made.graph.output, *made.graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param == dim:
                axis.dim_value = size
    onnx.save(made, path := Path(folder) / "fixed.onnx")
    return path


def row(model: Path, budget: int, dim: str, effort: float, steps: int) -> tuple[str, ...]:
    """One line of the table."""

    def in_session(size: int) -> bool:
        return int(in_child("taken", str(fixed(model, dim, size, home)), True, steps)) <= budget

    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        stock = largest(in_session)
        plain, small = max_batch(model, f"{budget}B", dim, effort=effort)
        result = rewrite_model(model, budget, dims={dim: small}, effort=effort)
        result.save(path := Path(home) / "small.onnx")
        resident = residence.measure(path, {dim: small}, steps).total
    times = f"{small / stock:.1f}" if stock else ""
    return (
        model.stem, f"{budget / 1e6:.0f}", str(stock), str(plain), str(small), times, f"{resident / 1e6:.1f}",
        f"{result.report.extra_compute:+.1%}",
    )  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="+", metavar="MODEL=BUDGET")
    parser.add_argument("--dim", default="batch", help="the symbolic dimension")
    parser.add_argument("--effort", type=float, default=3.0, help="of each plan, see onnx-remat --effort")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save", default="", metavar="NAME", help="of the table in docs/results/data")
    arguments = parser.parse_args()
    rows = []
    print("| " + " | ".join(HEADS) + " |\n" + "| --- " * len(HEADS) + "|", flush=True)
    for given in arguments.graphs:
        model, _, budget = given.rpartition("=")
        size = parse_budget(budget).bytes
        if size is None:
            raise SystemExit(f"{budget}: a percentage grows with the batch")
        rows.append(row(Path(model), size, arguments.dim, arguments.effort, arguments.steps))
        print("| " + " | ".join(rows[-1]) + " |", flush=True)
    if arguments.save:
        shown = " ".join(f"{Path(given).name}" for given in arguments.graphs)
        command = f"python -m scripts.largest_batch {shown} --effort {arguments.effort:g}"
        results.save(arguments.save, results.Table(command, HEADS, tuple(rows)))


if __name__ == "__main__":
    main()
