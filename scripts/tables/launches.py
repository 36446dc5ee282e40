"""Launches of kernels in a step on a CUDA device, with elementwise nodes and rows fused and without, and in PyTorch.

ONNX Runtime's CUDA provider runs each step, as exported, by `Session` on the fake device of the tests, which counts
launches (scripts/gpu_env.py makes its environment): *launches* those of ONNX Runtime's own kernels and of ours,
*kernels* ours; what cuBLAS and cuDNN launch is not among them. *slab* and *moved*, the bytes that all nodes read and
write, are in megabytes. *PyTorch's operations* are those of its own step that compute, its updates by ``foreach`` as on
a device; most launch one kernel. The milliseconds are what the planner predicts for a device, by launches, bytes and
arithmetic (``--costs``), and for PyTorch the same of its operations.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.child import call
from scripts.tables.race import ITEMS as RACE
from scripts.tables.race import case_of, export
from tests.support.fake_cuda import here

ITEMS = (*RACE, "language, 48 texts", "masked language")
COSTS = ("h100", "a100", "l4", "t4")
HEADS = (
    "step", "PyTorch's operations", "launches", "fused", "ratio", "kernels", "moved, MB", "fused", "ratio", "slab, MB",
    "fused", *(head for device in COSTS for head in (f"{device.upper()}: PyTorch, ms", "ours", "fused")),
)  # fmt: skip


def rows(name: str) -> Iterator[tuple[str, ...]]:
    """The row of one step."""
    if why := here.why_not():
        raise SystemExit(why)
    theirs = call(eager, name).answer
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.onnx"
        call(export, name, str(path))
        plain, fused = here.ask("tests.support.fake_cuda.launches", {"path": str(path), "costs": COSTS})
    launches, moved, slab = ((plain[key], fused[key]) for key in ("launches", "moved", "slab"))
    yield (
        name, f"{theirs['operations']:,}", *(f"{count:,}" for count in launches), f"{launches[1] / launches[0]:.2f}",
        str(fused["driven"]), *(f"{nbytes / 1e6:,.0f}" for nbytes in moved), f"{moved[1] / moved[0]:.2f}",
        *(f"{nbytes / 1e6:,.1f}" for nbytes in slab),
        *(f"{1e3 * side['seconds'][device]:.1f}" for device in COSTS for side in (theirs, plain, fused)),
    )  # fmt: skip


def eager(name: str) -> dict[str, Any]:
    """Operations of PyTorch's own step that compute, and its predicted seconds by device."""
    import torch
    from torch.utils import _pytree as pytree
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    from onnx_remat.ort.kernels.costs import PRESETS

    found: list[tuple[float, float]] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            tensors = [x for x in pytree.tree_leaves((args, kwargs, made)) if isinstance(x, torch.Tensor)]
            if not func.is_view and tensors and func.overloadpacket not in _FREE:
                count = flop_registry.get(func.overloadpacket)
                numbers = max(x.numel() for x in tensors)
                arithmetic = count(*args, **(kwargs or {}), out_val=made) if count else numbers
                found.append((float(arithmetic), float(sum(x.nbytes for x in tensors))))
            return made

    aten = torch.ops.aten
    _FREE = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.lift_fresh}
    case, optimizer = case_of(name)
    for group in optimizer.param_groups:
        group["foreach"] = True
    positional, named, target = case.arguments()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        given = case.model(*positional, **named) if case.loss else case.model(*positional, target, **named)
        (case.loss(given, target) if case.loss else given).backward()
        optimizer.step()

    step()
    with Counted():
        step()
    seconds = {
        name: math.fsum(max(f / device.flops, moved / device.bandwidth) + device.overhead for f, moved in found)
        for name, device in PRESETS.items()
    }
    return {"operations": len(found), "seconds": {name: seconds[name] for name in COSTS}}
