"""What a report says besides its figures: what was not seen, what rests on what, what does not compute reliably."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from onnx_remat.ir import model_io
from onnx_remat.ir.training_ops import first_training_op
from onnx_remat.measure import fixed_draws
from onnx_remat.messages import Message, Setting
from onnx_remat.ort import known_bugs, placement, runtime
from onnx_remat.ort.executed import whom_to_ask
from onnx_remat.ort.prepare import Compiled
from onnx_remat.session.prediction import Footprint
from onnx_remat.units import format_bytes

MOVES = (
    "values are moved when they are due by onnx_remat.Session and training.Loop alone; in onnxruntime's own session "
    "they come back early"
)

_MORE = 1.05  # times what a file takes by default: what it takes at another level is said above this


def warnings(compiled: Compiled, result: onnx.ModelProto) -> tuple[str, ...]:
    """What ONNX Runtime does not compute reliably: in the original, and in the model that users run."""
    ranks = {name: len(tensor.shape) for name, tensor in compiled.tensors.items()}
    races = fixed_draws.race_warnings(compiled.graph.model, compiled.kernels)
    return races + known_bugs.warnings(result, ranks) + placement.warnings(compiled)


def on_device(compiled: Compiled) -> tuple[str, ...]:
    """What a plan for a device was checked against, and what it rests on."""
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


def fusing(trained: Footprint | None, budget: int) -> tuple[str, ...]:
    """Whether a budget for a loop was kept with fused kernels, and what that means where there are none."""
    if trained is None or not trained.kernels:
        why = Message(": {}", trained.not_fused) if trained and trained.not_fused else ""
        return (Message("training is counted with nothing fused{}", why),) if trained else ()
    above = trained.unfused > budget
    unfused = Setting("fuse", False)
    plain = Message(
        "training is counted with elementwise nodes fused, as Session and Loop run them on this machine; on machines "
        "without these kernels, or with {}, it takes {}", unfused, format_bytes(trained.unfused),
    )  # fmt: skip
    return (Message("{}, above the budget: for such machines plan with {}", plain, unfused) if above else plain,)


def unseen(emulated: str, source: onnx.ModelProto) -> tuple[str, ...]:
    """What ONNX Runtime was not asked of a model, and why; `emulated` as in `Executed`."""
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
            "of them was foreseen, what it may fuse into them was not",
        )
    if runtime.available():
        return ()
    return (
        "onnxruntime is not installed: its graph optimisations were not simulated; "
        "install onnx-remat[cpu] to have the file checked as it will really run",
    )


def worst_level(peaks: Mapping[str, int], default: int) -> tuple[str, ...]:
    """Of a file that takes more at another optimisation level than by default; `peaks` in bytes, by level."""
    level = max(peaks, key=peaks.__getitem__)
    if peaks[level] <= default * _MORE:
        return ()
    return (
        f"the budget holds at every optimisation level: at level {level!r} the file takes "
        f"{format_bytes(peaks[level])}, since ONNX Runtime merges or fuses less there",
    )


def rounding(names: tuple[str, ...]) -> tuple[str, ...]:
    """Of values that ONNX Runtime rounds in one of the two files only."""
    if not names:
        return ()
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"results are equal within rounding, not to the last bit: ONNX Runtime's CPU kernels round the half-precision "
        f"value {names[0]!r}{more} in one of the two files only",
    )
