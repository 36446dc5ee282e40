"""Models with random ops: outputs can be compared once both sides draw the same."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import parser

from onnx_remat import graph, runtime, shapes
from onnx_remat.chance import random_nodes, without_chance

MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
step (float[64, 8] x, float[64, 8] g) => (float[64, 8] y, float[64, 8] dx, float[64, 8] noise, float[64, 8] coin)
<float ratio = {0.25}, bool train = {1}> {
    y, mask = Dropout <seed = 3> (x, ratio, train)
    kept = Cast <to = 1> (mask)
    dx = Mul (g, kept)
    noise = RandomNormalLike (x)
    half = Sigmoid (noise)
    coin = Bernoulli (half)
}
"""


@pytest.fixture
def feeds() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal((64, 8)).astype(np.float32) for name in ("x", "g")}


def test_draws_are_fixed_and_still_random(feeds):
    model = parser.parse_model(MODEL)
    settled = without_chance(model, shapes.infer(graph.build(model), {}))
    onnx.checker.check_model(settled)
    assert [node.op_type for node in random_nodes(model)] == ["Dropout", "RandomNormalLike", "Bernoulli"]
    assert not random_nodes(settled)
    first, second = runtime.outputs(settled, feeds), runtime.outputs(settled, feeds)
    assert all(np.array_equal(first[name], second[name]) for name in first)
    mask = first["dx"] != 0
    assert 0.3 < mask.mean() < 0.7
    assert np.array_equal(first["y"], feeds["x"] * mask * 2)
    assert abs(first["noise"].mean()) < 0.3
    assert 0.8 < first["noise"].std() < 1.2
    assert set(np.unique(first["coin"])) == {0, 1}

