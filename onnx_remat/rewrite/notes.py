"""Notes and warnings of a report: limits of the simulation, assumptions, unreliable computations."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from onnx_remat.fuse.onednn import PACKAGE
from onnx_remat.ir import model_io
from onnx_remat.ir.metadata import CLONES_KEY, EDGES_KEY, entries
from onnx_remat.ir.training_ops import first_training_op
from onnx_remat.measure import fixed_draws
from onnx_remat.messages import Message, Setting
from onnx_remat.ort import known_bugs, placement, runtime
from onnx_remat.ort.executed import whom_to_ask
from onnx_remat.ort.host_state import NOT_MOVABLE
from onnx_remat.ort.prepare import Compiled
from onnx_remat.session.prediction import Footprint
from onnx_remat.units import format_bytes

MOVES = (
    "values are moved when they are due, and alongside kernels, by onnx_remat.Session and training.Loop alone; in "
    "onnxruntime's own session they come back early, and kernels wait for each copy"
)

_NOTED_LEVEL_RATIO = 1.05  # of the default level's peak: a level above this gets a note


def warnings(compiled: Compiled, result: onnx.ModelProto) -> tuple[str, ...]:
    """Return warnings of results that ONNX Runtime does not compute reliably, in the original or in the result."""
    ranks = {name: len(tensor.shape) for name, tensor in compiled.tensors.items()}
    races = fixed_draws.race_warnings(compiled.graph.model, compiled.kernels)
    return races + known_bugs.warnings(result, ranks) + placement.warnings(compiled)


def on_device(compiled: Compiled) -> tuple[str, ...]:
    """Return how a plan for a device was checked, and the assumptions it rests on."""
    kernels = compiled.kernels
    if kernels.device == "cpu":
        return ()
    name = kernels.name.upper()
    if whom_to_ask(kernels)[0] == kernels.execution_providers:
        checked = f"graph optimisations and the order are those of ONNX Runtime's {name} provider here"
    else:
        checked = (
            f"there is no {name} device here: the file was checked against what is known of the {name} provider's "
            "kernels and, where ONNX Runtime is installed, against the graph that its CPU provider makes"
        )
    return (checked, *placement.notes(compiled))


def fusing(trained: Footprint | None, budget: int, offload_state: bool = False) -> tuple[str, ...]:
    """Return whether a loop's budget counts on fused kernels, and the memory without them."""
    if trained is None or not trained.kernels:
        why = Message(": {}", trained.not_fused) if trained and trained.not_fused else ""
        return (Message("training is counted with nothing fused{}", why),) if trained else ()
    above = trained.unfused > budget
    unfused = Setting("fuse", False)
    plain = Message(
        "training is counted with elementwise nodes fused, as Session and Loop run them on this machine; on machines "
        "without these kernels, or with {}, it takes {}", unfused, format_bytes(trained.unfused),
    )  # fmt: skip
    found = Message("{}, above the budget: for such machines plan with {}", plain, unfused) if above else plain
    if above and offload_state:
        found = Message("{} and without {}", found, Setting("offload_state", True))
    if not trained.unserved:
        return (found,)
    return found, (
        f"oneDNN computes {trained.unserved} of the convolutions faster than ONNX Runtime, and with less memory: pip "
        f"install {PACKAGE}"
    )


def state_on_device(trained: Footprint | None, state: int) -> tuple[str, ...]:
    """Return how much of the `state`, in bytes, that should lie on the host does not."""
    left = state - trained.state_on_host if trained else 0
    if left <= 0:
        return ()
    return (f"{format_bytes(left)} of state stays on the device: {NOT_MOVABLE}",)


def unseen(emulated: str, source: onnx.ModelProto) -> tuple[str, ...]:
    """Return which parts of the simulation ONNX Runtime did not confirm, and why; `emulated` as in `Executed`."""
    if emulated and (node := first_training_op(source)):
        return (
            f"{node.op_type} is an op of onnxruntime-training: the plan was made and simulated for the file as it is, "
            "not run; run the result in onnxruntime-training",
        )
    if emulated:
        return (emulated,)
    if runtime.available() and model_io.weight_bytes(source) > runtime.MOST_WEIGHTS:
        return (
            f"ONNX Runtime was not shown the {format_bytes(model_io.weight_bytes(source))} of weights: what it folds "
            "from them was predicted, what it may fuse into them was not",
        )
    if runtime.available():
        return ()
    return (
        "onnxruntime is not installed: its graph optimisations were not simulated; "
        "install onnx-remat[cpu] to have the file checked as it will really run",
    )


def other_levels(peaks: Mapping[str, int], budget: int, level: str) -> tuple[str, ...]:
    """Return a note on a level that takes more than the default one.

    `peaks` are in bytes, by level; `level` is the one that the budget is for, see `Options.level`.
    """
    worst = max(peaks, key=peaks.__getitem__)
    takes = f"at level {worst!r} the file takes {format_bytes(peaks[worst])}"
    if level != "every" and peaks[worst] > budget:
        return (Message("the budget holds at onnxruntime's default level; {}: {}", takes, Setting("level", "every")),)
    if level != "every" or peaks[worst] <= peaks.get("all", peaks[worst]) * _NOTED_LEVEL_RATIO:
        return ()
    return (f"the budget holds at every level: {takes}, since ONNX Runtime merges or fuses less there",)


def rewritten_before(source: onnx.ModelProto) -> tuple[str, ...]:
    """Return a note on a model that is the result of another rewrite, which did not leave it as it was."""
    if all(entries(source).get(key, "[]") == "[]" for key in (CLONES_KEY, EDGES_KEY)):
        return ()
    return ("IN was rewritten before: percentages and extra compute refer to it; start from the original",)


def rounding(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return a note on values that ONNX Runtime rounds in only one of the two files."""
    if not names:
        return ()
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"results are equal within rounding, not to the last bit: ONNX Runtime's CPU kernels round the half-precision "
        f"value {names[0]!r}{more} in one of the two files only",
    )
