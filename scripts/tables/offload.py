"""What moving values to the host is worth: plans for a CUDA device with moves and without, by the speed of the link.

Budgets are of what training by `Loop` takes. *Compute* is what a step takes longer by the device's roofline, recomputes
and what kernels wait for copies. *Step* is its predicted time, *in turn* that of the same step with its copies on the
stream of the kernels; *kernels run* in so much of the copies' time. *deep_mlp*, unless a file is named, is the step of
a perceptron of 48 layers of 2048 units, on 8192 rows; *gpt2-12-adamw* trains GPT-2's 124 million parameters on 16 texts
of 128 tokens. *+state*: the moments of AdamW live on the host. Nothing is run: no device is needed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.options import PlanningOptions
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.units import format_bytes
from sample_models import deep_mlp
from scripts.tables.finetune import NAME, export

ITEMS = ("deep_mlp", NAME)
HEADS = (
    "graph",
    "budget",
    "link, a second",
    "compute",
    "step",
    "in turn",
    "kernels run",
    "moved",
    "state there",
    "runs again",
)

_STATE = "+state"


def row(name: str, model: onnx.ModelProto | Path, budget: str, link: str, options: PlanningOptions) -> tuple[str, ...]:
    """One plan; `link` is empty for one that moves nothing, and ends in ``+state`` for one that moves state as well."""
    more: PlanningOptions = {"offload": True, "host_bandwidth": link.removesuffix(_STATE)} if link else {}
    if link.endswith(_STATE):
        more["offload_state"] = True
    try:
        report = rewrite_model(model, budget, **options | more).report
    except BudgetInfeasibleError as error:
        proved = "impossible" if "proved" in str(error) else "no plan found"
        return name, budget, link or "none", proved, "", "", "", "", "", ""
    moved, after = report.moved, report.loop_after
    assert after is not None, "a loop opens the step"
    in_turn = after.seconds - after.waited + after.copies
    return (
        name, f"{budget} ({format_bytes(report.budget)})", link or "none", f"+{report.extra_compute:.1%}",
        f"{after.seconds * 1e3:.0f} ms",
        *((f"{in_turn * 1e3:.0f} ms", f"{moved.covered:.0%}", format_bytes(moved.nbytes)) if moved else ("", "", "")),
        format_bytes(after.state_on_host) if after.state_on_host else "", str(report.recomputed),
    )  # fmt: skip


def rows(
    item: str, *, budgets: str = "50%,35%,30%", links: str = "25GB,450GB", costs: str = "t4", effort: float = 10.0
) -> Iterator[tuple[str, ...]]:
    """The rows of one step."""
    options: PlanningOptions = {
        "provider": "cuda", "run_by": "loop", "effort": effort, "costs": costs, "verify": "none",
    }  # fmt: skip
    path = Path(item)
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        model: onnx.ModelProto | Path = path
        if item == NAME:
            export(model := Path(home) / "step.onnx")
            options["dims"] = {"batch": 16}
            links += f",{links.split(',')[0]}{_STATE}"
        elif item in ITEMS:
            model = deep_mlp.build(depth=48, width=2048, batch=8192, features=2048)
        for budget in budgets.split(","):
            for link in ("", *links.split(",")):
                yield row(path.stem, model, budget, link, options)
