"""What moving values to the host is worth: plans for a CUDA device with moves and without, by the speed of the link.

    python -m scripts.offload [FILE...] [--budgets 50%,30%] [--links 25GB,450GB] [--costs t4] [--save NAME]

Budgets are of what training by `Loop` takes. *Compute* is what a step takes longer by the device's roofline, copies
included; the column beside it says how much of that the copies are. Without a FILE the step is that of a perceptron of
48 layers of 2048 units, on 8192 rows. Nothing is run: no device is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import onnx

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.ir import model_io
from onnx_remat.options import PlanningOptions
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.units import format_bytes, parse_dims
from sample_models import deep_mlp
from scripts.results import Table, printed, save

HEADS = ("graph", "budget", "link, a second", "compute", "of it copies", "moved", "runs again")


def row(name: str, model: model_io.Model, budget: str, link: str, options: PlanningOptions) -> tuple[str, ...]:
    """One plan; `link` is empty for one that moves nothing."""
    more: PlanningOptions = {"offload": True, "host_bandwidth": link} if link else {}
    try:
        report = rewrite_model(model, budget, **options | more).report
    except BudgetInfeasibleError as error:
        proved = "impossible" if "proved" in str(error) else "no plan found"
        return name, budget, link or "none", proved, "", "", ""
    moved = report.moved
    return (
        name, f"{budget} ({format_bytes(report.budget)})", link or "none", f"+{report.extra_compute:.1%}",
        f"+{moved.share:.1%}" if moved else "", format_bytes(moved.nbytes) if moved else "", str(report.recomputed),
    )  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--budgets", default="50%,35%,30%")
    parser.add_argument("--links", default="25GB,450GB")
    parser.add_argument("--costs", default="t4")
    parser.add_argument("--dim", action="append", default=[], metavar="NAME=SIZE")
    parser.add_argument("--effort", type=float, default=10.0)
    parser.add_argument("--save", default="", metavar="NAME", help="also write docs/results/data/NAME.json")
    given = parser.parse_args()
    options: PlanningOptions = {
        "provider": "cuda", "run_by": "loop", "effort": given.effort, "costs": given.costs, "verify": "none",
        "dims": parse_dims(given.dim),
    }  # fmt: skip
    graphs: dict[str, onnx.ModelProto | Path] = {path.stem: path for path in given.paths}
    graphs = graphs or {"deep_mlp": deep_mlp.build(depth=48, width=2048, batch=8192, features=2048)}

    def rows() -> Iterator[tuple[str, ...]]:
        for name, model in graphs.items():
            for budget in given.budgets.split(","):
                for link in ("", *given.links.split(",")):
                    yield row(name, model, budget, link, options)

    seen = printed(rows())
    if given.save:
        command = f"python -m scripts.offload --effort {given.effort:g} --costs {given.costs} --save {given.save}"
        save(given.save, Table(command, HEADS, seen))


if __name__ == "__main__":
    main()
