"""The tables of `scripts.zoo`: what became of each network, and how many of each family came how far."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.results import Table, save

_PATHS = re.compile(rf"{Path(__file__).parents[1]}/|/\S*/(?=(?:transformers|timm|torchvision)/)")
"""Where the checkout and packages lie on the machine that measured."""

HEADS = ("network", "parameters", "nodes", "converts (error)", "at 60 %", "compute", "five steps", "message")
COUNTS = ("family", "networks", "convert", "largest error", "kept", "refused by proof", "not found", "five steps run")

Line = dict[str, Any]


def keep(lines: Sequence[Line], command: str) -> None:
    """Put both tables into docs/results/data."""
    lines = sorted(lines, key=lambda line: str(line["network"]).lower())
    save("zoo", Table(command, HEADS, tuple(map(_row, lines))))
    families = sorted({_family(line) for line in lines})
    counted = [_counts(family, [line for line in lines if _family(line) == family]) for family in families]
    save("zoo-counts", Table(command, COUNTS, (*counted, _counts("all", lines))))


def _family(line: Line) -> str:
    return str(line["network"]).partition(":")[0]


def _counts(family: str, lines: Sequence[Line]) -> tuple[str, ...]:
    converted = [line for line in lines if "error" in line]
    refused = [line for line in converted if "refused" in line]
    proved = [line for line in refused if "proved" in line["refused"]]
    share = f"{len(converted)} ({100 * len(converted) / len(lines):.1f} %)"
    worst = max((error(line) for line in converted), default=0.0)
    followed = sum("loss_error" in line for line in lines)
    return (
        family, str(len(lines)), share, f"{worst:.1e}", str(sum("after" in line for line in converted)),
        str(len(proved)), str(len(refused) - len(proved)), str(followed),
    )  # fmt: skip


def error(line: Line) -> float:
    """How far the step is from torch's; from float64 where that was computed."""
    return float(line["exact_error"] if "exact_error" in line else line["error"])


def _row(line: Line) -> tuple[str, ...]:
    converts = f"{float(line['error']):.1e}" if "error" in line else "no"
    if "exact_error" in line:
        converts += f"; float64 {float(line['exact_error']):.1e}, torch's {float(line['framework_error']):.1e}"
    within, compute = "", ""
    if "after" in line:
        within, compute = f"{100 * line['after'] / line['before']:.1f} %", f"+{100 * line['compute']:.1f} %"
    elif "refused" in line:
        least = f"{100 * line['bound'] / line['before']:.0f} %"
        within = f"proved: none below {least}" if "proved" in line["refused"] else f"not found, none below {least}"
    steps = f"{line['loss_error']:.1e}" if "loss_error" in line else ""
    if "torch_error" in line:
        steps += f"; torch from float64 {line['torch_error']:.1e}"
    message = _PATHS.sub("", str(line.get("message", ""))).removeprefix("ConversionError: ").replace("|", r"\|")
    nodes = str(line.get("nodes", ""))
    parameters = f"{line['parameters']:,}" if "parameters" in line else ""
    return str(line["network"]), parameters, nodes, converts, within, compute, steps, message
