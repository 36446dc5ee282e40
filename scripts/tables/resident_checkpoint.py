"""What training from a checkpoint takes of the machine's memory.

Each graph, FILE=BUDGET, is trained by `Loop` from a checkpoint instead, which the process loads, gives to the loop and
drops: an .npz as a dict of arrays (*npz*) and as ``numpy.load`` returns it (*npz, lazily*), and a ``state_dict``
(*torch*). The state is saved after every tenth step. *opening* is the high-water mark until the loop is there,
*training* from the end of the first step to the end of the last, *left* is what stays once the loop is dropped; PyTorch
is imported before all that.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from scripts.child import call

HEADS = ("graph", "arrays", "checkpoint", "state", "budget", "predicted", "opening", "training", "left")

WAYS = "npz", "npz, lazily", "torch"


def from_checkpoint(path: str, checkpoint: str, way: str, loss: str, steps: int) -> tuple[int, int, int]:
    """Bytes that this process takes while it opens a loop, while it trains, and once it has dropped the loop."""
    import numpy as np

    from onnx_remat.measure.probe import reset_peak, resident
    from onnx_remat.measure.training_memory import load_libraries, one_node, state_for
    from onnx_remat.session.heap import trim
    from onnx_remat.session.session import Session
    from onnx_remat.session.training import Loop

    if way == "torch":
        import torch

    def loaded() -> Mapping[str, Any]:
        if way == "torch":
            return {name: value.numpy() for name, value in torch.load(checkpoint).items()}
        file = np.load(checkpoint)
        return file if "lazily" in way else dict(file)

    folder = Path(checkpoint).parent
    with Session(one_node(folder)) as session:
        session.run(state_for(session.inputs))
    load_libraries()
    trim()
    base = reset_peak()
    loop = Loop(path, loaded(), loss)
    opening = resident("VmHWM") - base
    loop.step()
    reset_peak()  # the step before began with what the checkpoint left
    for i in range(1, steps):
        if i % 10 == 0:
            loop.save(folder / "saved.safetensors")
        loop.step()
    training = resident("VmHWM") - base
    del loop
    return opening, training, resident("VmRSS") - base


def save_checkpoint(path: str, checkpoint: str, way: str) -> tuple[int, int]:
    """Write random state of a step to a file; how many arrays, and their bytes."""
    import numpy as np

    from onnx_remat.measure.training_memory import state_for
    from onnx_remat.session.session import Session

    with Session(path) as session:
        state = state_for(session.inputs)
    if way == "torch":
        import torch

        torch.save({name: torch.from_numpy(array) for name, array in state.items()}, checkpoint)
    else:
        np.savez(checkpoint, **state)
    return len(state), sum(array.nbytes for array in state.values())


def rows(item: str, *, effort: float = 5.0, steps: int = 50, loss: str = "loss") -> Iterator[tuple[str, ...]]:
    """The rows of one graph: one for each way to load a checkpoint."""
    from onnx_remat.rewrite.pipeline import rewrite_model

    file, _, budget = item.partition("=")
    graph = Path(file)
    result = rewrite_model(graph, budget, effort=effort, time_limit=600, run_by="loop")
    assert result.report.loop_after is not None
    for way in WAYS:
        with tempfile.TemporaryDirectory(prefix="onnx-remat-") as folder:
            result.save(path := Path(folder) / "small.onnx")
            checkpoint = f"{folder}/state.pt" if way == "torch" else f"{folder}/state.npz"
            arrays, state = call(save_checkpoint, str(path), checkpoint, way).answer
            found = call(from_checkpoint, str(path), checkpoint, way, loss, steps).answer
        sizes = state, result.report.budget, result.report.loop_after.total, *found
        yield graph.stem, str(arrays), way, *(f"{size / 1e6:.1f}" for size in sizes)
