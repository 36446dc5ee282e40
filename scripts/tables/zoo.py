"""Networks that people have, built from configurations without weights, through the PyTorch converter and a budget.

Each in a process of its own: whether it converts, and how far its step is from torch's (the converter's own check);
whether the step is rewritten to 60 % of its tensors; how far its losses are from torch's in five steps of SGD on
batches of their own; or the message where one of these fails. Dropout is off, so that torch can be followed. Items are
FAMILY:NETWORK.
"""

from __future__ import annotations

import contextlib
import copy
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import torch
from onnx_remat.converters.pytorch import export_training_step, initial_feeds
from torch import nn

from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.ir.metadata import entries
from onnx_remat.rewrite.pipeline import plan_model, rewrite_model
from onnx_remat.session.training import Loop
from sample_models.networks.hand import Case
from sample_models.networks.zoo import NAMES, RATE, build
from scripts.child import ROOT, Failed, call
from scripts.results import Table

BUDGET = 0.6
STEPS = 5
CLOSE = 1e-4
"""Losses that are further from torch's ask for torch's own distance from float64."""
SECONDS = 400
"""A network may take so long."""


ITEMS = tuple(f"{family}:{name}" for family, names in NAMES.items() for name in names)


def measured(key: str, effort: float) -> dict[str, Any]:
    """One line."""
    torch.manual_seed(0)
    case = build(key)
    found: dict[str, Any] = {"network": key, "parameters": sum(p.numel() for p in case.model.parameters())}
    optimizer = torch.optim.SGD([p for p in case.model.parameters() if p.requires_grad], RATE)
    start = time.perf_counter()
    stage = "converts"
    try:
        step = export_training_step(case.model, case.batch(), case.loss, optimizer)
        found["nodes"] = len(step.graph.node)
        found |= {k.removeprefix("check."): value for k, value in entries(step).items() if k.startswith("check.")}
        stage = "rewrites"
        rewritten, outcome = within_budget(step, effort)
        found |= outcome
        stage = "follows"
        found |= followed(case, step, rewritten, optimizer)
    except Exception as error:  # the message is the result
        found["failed"], found["message"] = stage, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    found["seconds"] = round(time.perf_counter() - start)
    return found


def within_budget(step: onnx.ModelProto, effort: float) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """The step rewritten to the budget, or as it is where that is refused; and what is to be said about it."""
    try:
        result = rewrite_model(step, f"{BUDGET:.0%}", effort=effort, run_by="session")
    except BudgetInfeasibleError as error:
        before = plan_model(step, "100%", effort=effort, run_by="session").budget
        return step, {"refused": str(error), "before": before, "bound": error.lower_bound_bytes}
    before, after = result.report.covered()
    return result.model, {"before": before, "after": after, "compute": result.report.extra_compute}


def followed(
    case: Case, step: onnx.ModelProto, rewritten: onnx.ModelProto, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Losses of some steps, of the rewritten step, of torch and of torch in float64."""
    batches = [case.batch() for _ in range(STEPS)]
    fed = [{f"input.{i}": value.numpy() for i, value in enumerate(batch)} for batch in batches]
    read = {value.name for value in rewritten.graph.input}
    fed = [{name: value for name, value in feeds.items() if name in read} for feeds in fed]
    loop = Loop(rewritten, initial_feeds(step, case.model, optimizer) | fed[0])
    ours = np.array([loop.step(feeds) for feeds in fed])
    start = copy.deepcopy(case.model.state_dict())
    theirs = _trained(case.model, case.loss, batches)
    found = {"losses": ours.tolist(), "loss_error": _apart(ours, theirs)}
    if found["loss_error"] > CLOSE:  # is it rounding?
        wide = [tuple(v.double() if v.is_floating_point() else v for v in batch) for batch in batches]
        case.model.load_state_dict(start)
        with contextlib.suppress(RuntimeError):  # its code asks for float32
            found["torch_error"] = _apart(theirs, _trained(case.model.double(), case.loss, wide))
    return found


def _trained(model: nn.Module, loss: Any, batches: Sequence[tuple[torch.Tensor, ...]]) -> np.ndarray:
    """Losses of torch's own steps."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], RATE)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        made = model(*batch) if loss is None else loss(model(*batch[:-1]), batch[-1])
        made.backward()
        optimizer.step()
        losses.append(made.item())
    return np.array(losses)


def _apart(losses: np.ndarray, others: np.ndarray) -> float:
    """Largest relative difference; NaN where one is."""
    return float(np.max(np.abs(losses - others) / np.abs(others)))


def rows(key: str, *, effort: float = 1.0) -> Iterator[dict[str, Any]]:
    """The line of one network."""
    try:
        yield call(measured, key, effort, seconds=SECONDS).answer
    except Failed as error:
        yield {"network": key, "failed": "converts", "message": str(error)[:500], "seconds": 0}


_PATHS = re.compile(rf"{ROOT}/|/\S*/(?=(?:transformers|timm|torchvision)/)")
"""Where the checkout and packages lie on the machine that measured."""

NETWORKS = ("network", "parameters", "nodes", "converts (error)", "at 60 %", "compute", "five steps", "message")
COUNTS = ("family", "networks", "convert", "largest error", "kept", "refused by proof", "not found", "five steps run")

Line = dict[str, Any]


def tables(lines: Sequence[Line], command: str) -> dict[str, Table]:
    """What became of each network, and how many of each family came how far."""
    lines = sorted(lines, key=lambda line: str(line["network"]).lower())
    families = sorted({_family(line) for line in lines})
    counted = [_counts(family, [line for line in lines if _family(line) == family]) for family in families]
    counts = Table(command, COUNTS, (*counted, _counts("all", lines)))
    return {"zoo": Table(command, NETWORKS, tuple(map(_row, lines))), "zoo-counts": counts}


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
