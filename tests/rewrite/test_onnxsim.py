"""Training steps of onnxsim, rewritten: the losses of its own loop."""

from __future__ import annotations

import numpy as np
import pytest

from onnx_remat import rewrite_model
from tests.support.onnxsim_steps import STEPS

onnxsim = pytest.importorskip("onnxsim", minversion="0.8.1")
pytest.importorskip("onnxruntime")

RATE, TAKEN = np.float32(1e-3), 20


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_rewritten_step_gives_the_losses_of_its_own_loop(name):
    from onnxsim.qat_graph import adam_bias_corrections

    from onnx_remat.training import Loop

    def settings(taken: int) -> dict[str, np.ndarray]:
        found = adam_bias_corrections(taken) if optimizer == "adam" else {}
        return {"lr": RATE, **{each: np.asarray(value, np.float32) for each, value in found.items()}}

    def batch() -> dict[str, np.ndarray]:
        return {each: rng.standard_normal(shape).astype(np.float32) for each, shape in made.shapes.items()}

    build, optimizer = STEPS[name]
    made, rng = build(), np.random.default_rng(1)
    theirs = onnxsim.compile_training_loop(made.model(), "loss", made.trained, optimizer=optimizer)
    step, state = theirs.step_graph, theirs.initial_state
    result = rewrite_model(step.model, "70%", state_outputs=step.state, effort=3)
    report = result.report
    assert report.loop_after.donated == len(step.state) and report.recomputed > 0
    assert report.loop_after.total <= report.budget and report.extra_compute < 0.15
    ours = Loop(result, {**state, **batch(), **settings(0)})
    for taken in range(TAKEN):
        given = batch()
        wanted = theirs(given, lr=float(RATE))
        # Adam divides small gradients by their size: in twenty steps of twelve seeds a rounding grew from 1e-7 to 4e-5,
        # in a weight to a part of the rate.
        np.testing.assert_allclose(ours.step({**given, **settings(taken)}), wanted, rtol=1e-6 if taken < 3 else 2e-4)
    for each, value in theirs.parameters().items():
        np.testing.assert_allclose(ours.view(each), value, rtol=1e-3, atol=RATE)
