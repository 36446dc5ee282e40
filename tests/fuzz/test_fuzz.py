"""Random training graphs through the whole pipeline, and mutated files through all that reads them.

The default run does a few; ``--fuzz N`` does N of each kind.
"""

from __future__ import annotations

import random
import time

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import helper

import onnx_remat
from onnx_remat.errors import BudgetInfeasibleError, OnnxRematError
from onnx_remat.ort import runtime
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Preparation
from tests.ort.test_buffers import naive_steps
from tests.support.graphs import feeds_for, mlp, same_bits
from tests.write.test_writer import Builder, only, run_model, traced

pytest.importorskip("onnxruntime")
QUICK = {"effort": 0.05, "dims": {}, "run_by": "session"}


def fuzz(config: pytest.Config, default: int):
    """Hypothesis settings: `default` examples, or as many as ``--fuzz`` says, other ones each time."""
    asked = config.getoption("--fuzz")
    return settings(
        max_examples=asked or default, derandomize=not asked, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def test_random_steps_are_rewritten_and_keep_every_promise(pytestconfig):
    """Outputs to the last bit, the order emulated, the peak of the independent simulation, the budget."""
    done = []

    @fuzz(pytestconfig, 8)
    @given(
        seed=st.integers(0, 2**32 - 1), layers=st.integers(5, 40), budget=st.sampled_from(["97%", "90%", "80%"]),
        cond=st.booleans(),
    )  # fmt: skip
    def run(seed, layers, budget, cond):
        model = Builder(seed, layers).model()
        model.graph.node.append(helper.make_node("Sign", ["x"], ["g"], name="gradient"))
        model.graph.output.append(helper.make_tensor_value_info("g", 1, [32, 32]))
        try:
            result = onnx_remat.rewrite_model(model, budget, **QUICK)
        except BudgetInfeasibleError as error:  # then what it says is possible must be
            try:
                result = onnx_remat.rewrite_model(model, int(error.best_peak_bytes * 1.05), **QUICK)
            except BudgetInfeasibleError:
                return
        assert max(result.report.peaks_by_level.values()) <= result.report.budget
        feeds = feeds_for(model) | {"cond": np.array(cond)}
        outputs, executed = traced(result.model, feeds)
        assert same_bits(run_model(model, feeds), outputs)
        emulated = as_executed(result.model, None, "disable", Preparation(CPU))
        labels = [emulated.compiled.graph.ops[i].node.name for i in emulated.order.order]
        assert only(executed, labels) == [name for name in labels if name in set(executed)]
        timeline = emulated.timeline()
        assert max(naive_steps(emulated.compiled.problem, list(emulated.order.order))) == timeline.peak
        done.append(result.report.recomputed)

    run()
    assert done


LONGEST = 60.0
"""Seconds an answer may take: those that the worker may compute, on a machine that computes other things, too."""

OPS = ("Tanh", "MatMul", "Reshape", "Split", "If", "Loop", "Scan", "Dropout", "Cast", "Concat", "Einsum", "SequenceAt",
       "Conv", "Gemm", "Size", "Transpose", "Constant", "MaxPool", "Where", "Nonsense")  # fmt: skip


def mutate(model: onnx.ModelProto, generator: random.Random) -> None:
    """Change one thing, legal or not."""
    graph = model.graph
    nodes = graph.node
    node = generator.choice(nodes) if nodes else None
    names = [*(n for x in nodes for n in x.output), *(v.name for v in graph.input), ""]
    value = generator.choice([*graph.input, *graph.output, *graph.value_info])

    def some_shape() -> None:
        dims = value.type.tensor_type.shape.dim
        if dims and generator.random() < 0.7:
            generator.choice(dims).dim_value = generator.choice([0, 1, -1, 3, 2**31, 2**62, 64])
        elif dims and generator.random() < 0.5:
            generator.choice(dims).dim_param = "n"
        else:
            value.type.tensor_type.shape.dim.add().dim_value = generator.choice([1, 5])

    def some_tensor() -> None:
        if graph.initializer:
            tensor = generator.choice(graph.initializer)
            tensor.dims.append(generator.choice([0, -1, 2, 2**40])) if generator.random() < 0.5 else tensor.ClearField(
                "raw_data"
            )

    changes = [some_shape, some_tensor]
    changes.append(lambda: setattr(value.type.tensor_type, "elem_type", generator.randrange(0, 30)))
    changes.append(lambda: graph.output.pop() if len(graph.output) else None)
    changes.append(lambda: setattr(value, "name", generator.choice(names)))
    if node is not None:
        changes += [
            lambda: nodes.remove(node), lambda: nodes.append(node),
            lambda: setattr(node, "op_type", generator.choice(OPS)),
            lambda: setattr(node, "domain", generator.choice(["", "ai.onnx", "com.microsoft", "x"])),
            lambda: node.input.append(generator.choice(names)), lambda: node.output.append(generator.choice(names)),
            lambda: node.ClearField("input"), lambda: node.ClearField("attribute"),
            lambda: node.input.__setitem__(0, generator.choice(names)) if node.input else None,
            lambda: node.output.__setitem__(0, generator.choice(names)) if node.output else None,
            lambda: node.attribute.add(name="axis", i=generator.randrange(-9, 9), type=2),
            lambda: nodes.insert(0, nodes.pop()),
        ]  # fmt: skip
    generator.choice(changes)()


def digest(data: bytes) -> None:
    """All that is done with a file; a refusal is an answer, if it does not take for ever."""
    start = time.monotonic()
    try:
        onnx_remat.rewrite_model(data, "80%", selector="keep_all", verify="check", **QUICK)
    except OnnxRematError as error:
        assert str(error) and "Traceback" not in str(error)
    assert time.monotonic() - start < LONGEST


BASE = mlp(layers=3, batch=64, width=8)


def test_mutated_bytes_are_answered(pytestconfig, monkeypatch):
    # Without the runtime: what it makes of a broken file is its own affair, and slow.
    monkeypatch.setattr(runtime, "available", lambda: False)
    data = BASE.SerializeToString()

    @fuzz(pytestconfig, 150)
    @given(seed=st.integers(0, 2**32 - 1))
    def run(seed):
        generator = random.Random(seed)
        changed = bytearray(data)
        for _ in range(generator.randrange(1, 6)):
            place = generator.randrange(len(changed))
            kind = generator.randrange(4)
            if kind == 0:
                changed[place] = generator.randrange(256)
            elif kind == 1:
                del changed[place : place + generator.randrange(1, 50)]
            elif kind == 2:
                changed[place:place] = generator.randbytes(generator.randrange(1, 20))
            else:
                changed[place] ^= 1 << generator.randrange(8)
        digest(bytes(changed))

    run()


def test_mutated_models_are_answered(pytestconfig, monkeypatch):
    monkeypatch.setattr(runtime, "available", lambda: False)

    @fuzz(pytestconfig, 150)
    @given(seed=st.integers(0, 2**32 - 1))
    def run(seed):
        generator = random.Random(seed)
        model = onnx.ModelProto()
        model.CopyFrom(BASE)
        for _ in range(generator.randrange(1, 4)):
            mutate(model, generator)
        digest(model.SerializeToString())

    run()
