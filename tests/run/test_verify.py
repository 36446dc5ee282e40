"""What the checks of a measured run look at."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_remat.errors import VerificationError
from onnx_remat.run import verify
from tests.support.graphs import model_of

pytest.importorskip("onnxruntime")


def saved(path, op_type):
    nodes = [
        helper.make_node(op_type, ["x"], ["y"], name="one"),
        helper.make_node("ReduceMean", ["x"], ["loss"], name="mean", keepdims=0),
    ]
    onnx.save(model_of(nodes, {"x": [64, 64]}, {"loss": [], "y": [64, 64]}), path)
    return path


def test_hostile_feeds_show_what_plain_ones_hide(tmp_path):
    """On numbers between -0.2 and 0.2 a Clip at 3e4 is the identity."""
    first = saved(tmp_path / "a.onnx", "Identity")
    model = onnx.load(first)
    model.graph.node[0].op_type = "Clip"
    model.graph.node[0].input.extend(["low", "high"])
    for name, bound in (("low", -3e4), ("high", 3e4)):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(bound), name))
    onnx.save(model, tmp_path / "b.onnx")
    assert verify.bitwise(first, first) == "bitwise equal"
    with pytest.raises(VerificationError, match="'y' is not bitwise equal"):
        verify.bitwise(first, tmp_path / "b.onnx")


def test_the_sign_of_zero_counts_and_what_a_nan_carries_does_not():
    assert not verify._same_bits(np.float32([0.0]), np.float32([-0.0]))
    assert verify._same_bits(np.float32([np.nan, 1]), np.float32([-np.nan, 1]))
    assert not verify._same_bits(np.float32([np.nan]), np.float32([1]))
