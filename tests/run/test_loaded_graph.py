"""What ONNX Runtime has once it has loaded a step is what was laid out, whatever it changes while it loads."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from onnx_remat import Session
from tests.support.graphs import run_model, same_bits
from tests.support.outcomes import everything_bound

pytest.importorskip("onnxruntime")

LEVELS = ("disable", "basic", "all")
HEAD = '<ir_version: 8, opset_import: ["" : 17]>'


def filled(kind, shape, rng):
    if kind == onnx.TensorProto.BOOL:
        return np.array(True)
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    return (
        rng.integers(-99, 99, shape).astype(dtype) if dtype.kind in "iu" else rng.standard_normal(shape).astype(dtype)
    )


def feeds_of(model):
    rng, stored = np.random.default_rng(0), {tensor.name for tensor in model.graph.initializer}
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    kinds = {v.name: v.type.tensor_type.elem_type for v in model.graph.input}
    return {name: filled(kinds[name], shape, rng) for name, shape in shapes.items() if name not in stored}


def assert_right(model, level):
    feeds = feeds_of(model)
    wanted = run_model(model, feeds, level)
    with everything_bound(), Session(model, level=level) as session:
        for _ in range(2):
            assert same_bits(session.run(feeds).values(), wanted)


@pytest.mark.parametrize("channels", [4, 24, 36])
def test_channels_are_padded_to_whole_blocks(channels):
    """Filters of depthwise convolutions; the runtime's own shape inference forgets the padding."""
    weights = np.random.default_rng(0).standard_normal((channels, 1, 3, 3)).astype(np.float32)
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"], group=channels), helper.make_node("Tanh", ["c"], ["y"])]
    x, y = (helper.make_tensor_value_info(n, 1, s) for n, s in (("x", [2, channels, 9, 9]), ("y", [2, channels, 7, 7])))
    graph = helper.make_graph(nodes, "g", [x], [y], [numpy_helper.from_array(weights, "w")])
    for opset in (7, 17):
        opsets = [helper.make_opsetid("", opset)]
        assert_right(helper.make_model(graph, opset_imports=opsets, ir_version=8), "all")
