"""The sample models: exact gradients, falling losses, labelled and reproducible files."""

from __future__ import annotations

import doctest
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from sample_models import attention_stack, build, chain, deep_mlp, residual_cnn, step
from sample_models.feeds import Feeds, make_feeds, next_feeds

SMALL: dict[str, Callable[[], onnx.ModelProto]] = {
    "deep_mlp": lambda: deep_mlp.build(depth=3, width=5, batch=6, features=4, classes=3),
    "residual_cnn": lambda: residual_cnn.build(stages=(2, 3), blocks=1, batch=3, size=6, classes=3),
    "residual_cnn_odd": lambda: residual_cnn.build(stages=(2, 3), blocks=2, batch=2, size=5, classes=3),
    "attention_stack": lambda: attention_stack.build(blocks=2, width=6, heads=2, batch=2, length=4, tokens=7),
    "chain": lambda: chain.chain(4, width=3, batch=2),
}


@pytest.fixture(scope="module", params=build.MODELS)
def committed(request: pytest.FixtureRequest) -> tuple[str, onnx.ModelProto]:
    return request.param, onnx.load(build.FOLDER / f"{request.param}.onnx")


def test_file_is_reproducible_and_small(committed: tuple[str, onnx.ModelProto]) -> None:
    name, _ = committed
    stored = (build.FOLDER / f"{name}.onnx").read_bytes()
    assert build.serialize(build.MODELS[name]()) == stored
    assert len(stored) < 1_000_000


def test_readme_row_is_current(committed: tuple[str, onnx.ModelProto]) -> None:
    assert build.summarize(*committed).row() in (build.FOLDER / "README.md").read_text()


def test_every_node_is_labelled_and_every_value_typed(committed: tuple[str, onnx.ModelProto]) -> None:
    _, model = committed
    phases = [build.phase_of(node) for node in model.graph.node]
    assert phases == sorted(phases, key=["forward", "backward", "optimizer"].index)
    assert set(phases) == {"forward", "backward", "optimizer"}
    known = {value.name for value in [*model.graph.value_info, *model.graph.output]}
    assert {name for node in model.graph.node for name in node.output} == known
    assert (model.opset_import[0].version, model.ir_version) == (20, 10)
    assert {node.domain for node in model.graph.node} == {""}


def test_training_lowers_the_loss(committed: tuple[str, onnx.ModelProto]) -> None:
    _, model = committed
    losses = [float(outputs["loss"]) for outputs in _train(model, make_feeds(model), steps=3)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 1e-3


@pytest.mark.parametrize("name", SMALL)
def test_update_agrees_with_finite_differences(name: str) -> None:
    """Along a random direction of each parameter, (old - new) / rate is the forward part's float64 slope."""
    model = SMALL[name]()
    feeds = _perturbed(make_feeds(model))
    rate = next(numpy_helper.to_array(value) for value in model.graph.initializer if value.name == "learning_rate")
    outputs = next(_train(model, feeds, steps=1))
    loss = _double_loss(model)
    assert outputs["loss"] == pytest.approx(loss(feeds), rel=1e-5)
    rng = np.random.default_rng(1)
    for parameter in (key.removeprefix("new.") for key in outputs if key != "loss"):
        grad = (feeds[parameter].astype(np.float64) - outputs[f"new.{parameter}"]) / rate
        direction = rng.standard_normal(grad.shape)
        slope = _slope(loss, feeds, parameter, direction)
        assert np.vdot(grad, direction) == pytest.approx(slope, rel=2e-5, abs=2e-5), parameter


def test_chain_has_one_order() -> None:
    nodes = chain.chain(5, width=4, batch=2).graph.node
    for before, after in pairwise(nodes):
        assert before.output[0] in after.input


@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_chain_peaks_as_documented(n: int) -> None:
    assert _liveness_peak(chain.chain(n, width=4, batch=8), in_place=False) == chain.peak_bytes(n, 4, 8)
    assert _liveness_peak(chain.chain(n, width=4, batch=8), in_place=True) == chain.peak_bytes(n, 4, 8, in_place=True)


@pytest.mark.parametrize("module", [step, chain])
def test_docstring_examples(module: ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


def test_build_writes_every_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build.main(["--out", str(tmp_path / "models")])
    assert {path.stem for path in (tmp_path / "models").iterdir()} == set(build.MODELS)
    assert capsys.readouterr().out.count("\n") == len(build.MODELS)


def _train(model: onnx.ModelProto, feeds: Feeds, steps: int) -> Iterator[Feeds]:
    """Outputs by name of consecutive training steps in ONNX Runtime."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    for _ in range(steps):
        outputs = dict(zip(names, session.run(None, feeds), strict=True))
        yield outputs
        feeds = next_feeds(feeds, outputs)


def _perturbed(feeds: Feeds) -> Feeds:
    """Move every float away from special values: zero biases, unit gains."""
    rng = np.random.default_rng(2)
    floats = {name: value for name, value in feeds.items() if value.dtype == np.float32}
    return feeds | {
        name: value + 0.1 * rng.standard_normal(value.shape, dtype=np.float32) for name, value in floats.items()
    }


class Erf(OpRun):  # type: ignore[misc]
    """The reference evaluator's own rounds to float32."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.vectorize(math.erf)(x),)


def _double_loss(model: onnx.ModelProto) -> Callable[[Feeds], float]:
    """The loss as a float64 function of the feeds, by the reference evaluator on the forward nodes alone."""
    forward = onnx.ModelProto.FromString(model.SerializeToString())
    nodes = [node for node in forward.graph.node if build.phase_of(node) == "forward"]
    outputs = [value for value in forward.graph.output if value.name == "loss"]
    for field, kept in ((forward.graph.node, nodes), (forward.graph.output, outputs)):
        del field[:]
        field.extend(kept)
    for constant in forward.graph.initializer:
        if constant.data_type == TensorProto.FLOAT:
            values = numpy_helper.to_array(constant).astype(np.float64)
            constant.CopyFrom(numpy_helper.from_array(values, constant.name))
    evaluator = ReferenceEvaluator(forward, new_ops=[Erf])

    def loss(feeds: Feeds) -> float:
        doubles = {name: np.asarray(x, np.float64) if x.dtype.kind == "f" else x for name, x in feeds.items()}
        return float(evaluator.run(None, doubles)[0])

    return loss


def _slope(loss: Callable[[Feeds], float], feeds: Feeds, parameter: str, direction: np.ndarray) -> float:
    """Central difference of the loss along a direction of one parameter."""
    step = 1e-5
    ends = (loss(feeds | {parameter: feeds[parameter] + sign * step * direction}) for sign in (1, -1))
    return (next(ends) - next(ends)) / (2 * step)


def _liveness_peak(model: onnx.ModelProto, in_place: bool) -> int:
    """Peak bytes in file order, each value freed after its last reader; inputs, constants and outputs stay.

    With `in_place`, an output takes the place of an equally large input that dies at the node.
    """
    graph = model.graph
    typed = [*graph.input, *graph.value_info, *graph.output]
    sizes = {value.name: build.nbytes(value) for value in typed}
    last_use = {name: index for index, node in enumerate(graph.node) for name in node.input}
    pinned = {value.name for value in [*graph.input, *graph.initializer, *graph.output]}
    live = sum(sizes[value.name] for value in graph.input)
    live += sum(numpy_helper.to_array(value).nbytes for value in graph.initializer)
    peak = live
    for index, node in enumerate(graph.node):
        dying = {name for name in node.input if last_use[name] == index and name not in pinned}
        live += sizes[node.output[0]]
        reused = in_place and any(sizes[name] == sizes[node.output[0]] for name in dying)
        peak = max(peak, live - reused * sizes[node.output[0]])
        live -= sum(sizes[name] for name in dying)
    return peak
