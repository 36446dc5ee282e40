"""A value held back stays held back: at every opset, rank, size and optimisation level, bit by bit what it was."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnx_remat.write.barriers import MIN_OPSET
from tests.support.barriers import held_back, shape_held_back

NEWEST = 24
LEVELS = ("DISABLE_ALL", "ENABLE_BASIC", "ENABLE_EXTENDED", "ENABLE_ALL")


def loaded(model: onnx.ModelProto, level: str, folder: Path) -> tuple[ort.InferenceSession, onnx.ModelProto]:
    """A session and the graph it runs."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session, onnx.load(folder / "optimised.onnx")


def ancestors(model: onnx.ModelProto, name: str) -> set[str]:
    """Names of all values that a value is computed from."""
    made = {output: node for node in model.graph.node for output in node.output}
    found: set[str] = set()
    todo = [name]
    while todo:
        if (name := todo.pop()) in made:
            new = [n for n in made[name].input if n and n not in found]
            found.update(new)
            todo += new
    return found


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("opset", [MIN_OPSET, 14, 15, 18, 20, 21, NEWEST])
def test_what_is_held_back_waits_and_stays_what_it_is(opset, level, tmp_path):
    shapes: list[list[int | str]] = [[], [3], [0], [2, 0, 4], [2, 3, 4], ["batch", 5]]
    triggers = [(3, 4), (0, 4), (1, 1)]
    for shape, trigger in itertools.product(shapes, triggers):
        model = held_back(opset, shape)
        onnx.checker.check_model(model, full_check=True)
        session, runs = loaded(model, level, tmp_path)
        size = [d if isinstance(d, int) else 2 for d in shape]
        x = np.arange(np.prod(size, dtype=int), dtype=np.float32).reshape(size)
        y, again, b = session.run(None, {"x": x, "a": np.ones(trigger)})
        assert y.shape == again.shape == x.shape and (y == -x).all() and (again == -x).all() and b.shape == trigger
        assert {"t", "x"} <= ancestors(runs, "y") & ancestors(runs, "again")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("opset", [MIN_OPSET, 15, NEWEST])
def test_a_shape_that_is_held_back_stays_what_it_is(opset, symbolic, level, tmp_path):
    model = shape_held_back(opset, symbolic)
    onnx.checker.check_model(model, full_check=True)
    session, runs = loaded(model, level, tmp_path)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y, b = session.run(None, {"x": x, "a": np.ones((3, 4))})
    assert (y == x).all() and b.shape == (3, 4)
    assert "t" in ancestors(runs, "zeros")


@pytest.mark.parametrize("dtype", [TensorProto.BOOL, TensorProto.INT8, TensorProto.FLOAT16, TensorProto.INT64])
def test_triggers_of_any_type(dtype, tmp_path):
    session, runs = loaded(held_back(20, [3], dtype, holds=1), "ENABLE_ALL", tmp_path)
    y, _ = session.run(None, {"x": np.ones(3, np.float32), "a": np.ones((2, 2))})
    assert (y == -1).all() and "t" in ancestors(runs, "y")


def test_the_shape_of_a_trigger_alone_would_be_folded(tmp_path):
    """The negative control: without the Unsqueeze that hides it, a known shape becomes a constant and nobody waits."""
    model = held_back(20, [3], holds=1)
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("a", TensorProto.DOUBLE, [2, 2]))
    assert "t" in ancestors(loaded(model, "ENABLE_BASIC", tmp_path)[1], "y")
    next(node for node in model.graph.node if node.op_type == "Shape").input[0] = "t"
    assert "t" not in ancestors(loaded(model, "ENABLE_BASIC", tmp_path)[1], "y")


def test_every_helper_is_made_once():
    kinds = [node.op_type for node in held_back(20, [3]).graph.node]
    assert kinds.count("Size") == kinds.count("Mul") == 1
    assert kinds.count("Shape") == 2 and kinds.count("Unsqueeze") == 3  # one token for each, one hidden trigger
