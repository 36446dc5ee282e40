"""JAX and us: the same training steps of Flax networks with AdamW, taken in turns in one run, and their memory.

Runners, each in a process of its own, of which one works at a time: JAX's own step under `jax.jit`, with its state
donated; the exported step by `session.training.Loop`, as it is, and rewritten to each budget, which is a share of what
JAX's step takes. All begin with the same parameters and batch, and draw the same random numbers.

*Memory* is resident: for JAX parameters, state and batch, and the process's high-water mark over a step less what is
resident between steps; for ours all of `measure.training_memory`. *Time*, *cpu* and *loss* are as in
`scripts.tables.race`. Linux only.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scripts.child import call, in_turns
from scripts.tables.race import compared, our_step, rewritten

ITEMS = ("mlp", "cnn", "resnet18", "gpt2_4l", "gpt2_4l_dropout", "gpt2_4l_scan")
HEADS = ("model", "runner", "memory, MB", "of JAX", "ms a step", "of JAX", "cpu ms", "loss", "compute")
_WARM, _COMPARED = 2, 2


def _optimizer() -> Any:
    import optax

    return optax.adamw(1e-3)


def jax_step(name: str) -> tuple[int, Callable[[], list[float]]]:
    """The bytes that a step of a case takes of the machine, and the step."""
    import gc

    import jax
    import optax

    from onnx_remat.measure.probe import reset_peak, resident
    from onnx_remat.session.heap import trim
    from sample_models.networks.jax_models import MODELS

    case, optimizer = MODELS[name](), _optimizer()

    def with_buffers(params: Any, buffers: Any, *batch: Any) -> tuple[Any, Any]:
        if case.buffers is None:
            return case.loss_fn(params, *batch), None
        return case.loss_fn(params, buffers, *batch)

    def train(params: Any, buffers: Any, state: Any, *batch: Any) -> tuple[Any, ...]:
        (loss, buffers), gradients = jax.value_and_grad(with_buffers, has_aux=True)(params, buffers, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), buffers, state, loss

    params, buffers, batch = jax.device_put((case.params, case.buffers, case.batch))
    state = [params, buffers, optimizer.init(params)]
    called = jax.jit(train, donate_argnums=(0, 1, 2))
    losses: list[float] = []

    def step() -> list[float]:
        *state[:], loss = called(*state, *batch)
        losses.append(float(loss))
        return losses[:_COMPARED]

    for _ in range(_WARM):
        step()
    gc.collect()
    trim()
    between = reset_peak()
    step()
    held = sum(leaf.nbytes for leaf in jax.tree_util.tree_leaves((state, batch)))
    return resident("VmHWM") - between + held, step


def memory_in_jax(name: str) -> int:
    """The bytes that a step of a case takes of the machine."""
    return jax_step(name)[0]


def export(name: str, file: str) -> None:
    """Write a case's step to a file, and what it reads at first next to it, as FILE.npz."""
    import numpy as np
    import onnx
    from onnx_remat.converters.jax.step import trace

    from sample_models.networks.jax_models import MODELS

    case = MODELS[name]()
    onnx.save(case.export(_optimizer()), file)
    first = trace(case.loss_fn, case.params, case.batch, case.buffers, _optimizer(), None).feeds()
    np.savez(Path(file).with_suffix(".npz"), **first)


def rows(model: str, *, budgets: str = "60%,40%", effort: float = 5.0, turns: int = 8) -> Iterator[tuple[str, ...]]:
    """The rows of one model."""
    theirs = call(memory_in_jax, model).answer
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as home:
        ours = Path(home) / "ours.onnx"
        call(export, model, str(ours))
        first = str(ours.with_suffix(".npz"))
        jobs: list[tuple[Any, ...]] = [("JAX", jax_step, model), ("ours", our_step, str(ours), first)]
        made = rewritten(ours, budgets, theirs, effort)
        jobs += [(name, our_step, path, first) for name, (path, _) in made.items() if path]
        runners = in_turns(jobs, turns)
    yield from compared(model, runners, made)
