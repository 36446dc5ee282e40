"""Gradients of the weights of depthwise convolutions, compared with ONNX Runtime's."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from onnx_remat.fuse import depthwise, onednn
from onnx_remat.fuse.nodes import FusedNode
from tests.fuse.test_convolutions import case, step
from tests.support.fusing import options, run, session, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")


def depthwise_step(batch, channels, size, kernel, **more):
    return step(**case(batch, channels, size, channels, kernel, group=channels, **more))


def gradients(model, feeds, threads=1):
    """The gradient of the weights, fused and as ONNX Runtime computes it."""
    opened, made = session(model, threads)
    names = [each.node.name for each in made.order if isinstance(each, FusedNode)]
    assert any(name.endswith("depthwise weights") for name in names), names
    plain = onnxruntime.InferenceSession(model.SerializeToString(), options(), ["CPUExecutionProvider"])
    return run(opened, feeds)["grad.w"], run(plain, feeds)["grad.w"]


def assert_near(got, wanted):
    finite = np.isfinite(wanted)
    np.testing.assert_array_equal(np.isfinite(got), finite)
    assert np.abs(got[finite] - wanted[finite]).max(initial=0) <= 2e-5 * np.abs(wanted[finite]).max(initial=0) + 1e-6


CASES = {
    "5 x 5": ((32, 24, (8, 8), [5, 5]), {"pads": [2] * 4}),
    "smaller than the window": ((32, 32, (4, 4), [5, 5]), {"pads": [2] * 4}),
    "7 x 7": ((4, 16, (28, 28), [7, 7]), {"pads": [3] * 4}),
    "strides": ((16, 16, (16, 16), [5, 5]), {"pads": [2] * 4, "strides": [2, 2]}),
    "uneven": ((16, 17, (19, 23), [4, 5]), {"pads": [1, 2, 2, 0], "strides": [3, 2]}),
    "dilations": ((8, 16, (24, 25), [5, 3]), {"pads": [4, 2, 3, 1], "dilations": [2, 3]}),
    "both": ((8, 16, (33, 31), [3, 5]), {"pads": [2, 0, 1, 3], "strides": [2, 3], "dilations": [3, 2]}),
    "no padding": ((8, 16, (21, 34), [5, 5]), {}),
    "one line": ((64, 16, (1, 300), [1, 9]), {"pads": [0, 4, 0, 4]}),
    "entries left over": ((16, 16, (18, 19), [5, 5]), {"strides": [4, 3]}),
}


@pytest.fixture
def anywhere(monkeypatch):
    """Windows of every size, also where oneDNN computes them."""
    monkeypatch.setattr(onednn, "why_not", lambda: "for this test")
    monkeypatch.setattr(depthwise, "LEAST_WORK_IN_GROUPS", 0)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("one", CASES.values(), ids=CASES)
def test_gradients_of_weights(one, threads, anywhere):
    model = depthwise_step(*one[0], **one[1])
    rng = np.random.default_rng(1)
    feeds = {v.name: rng.standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim], np.float32)
             for v in model.graph.input}  # fmt: skip
    assert_near(*gradients(model, feeds, threads))


@pytest.mark.parametrize("name", ["x", "t"])
@pytest.mark.parametrize("odd", [np.inf, np.nan])
def test_what_is_not_finite_reaches_the_entries_that_read_it_alone(name, odd, anywhere):
    """A window of 3 x 3 without padding reads each corner of an image in one entry."""
    model = depthwise_step(8, 16, (12, 12), [3, 3])
    rng = np.random.default_rng(1)
    feeds = {v.name: rng.standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim], np.float32)
             for v in model.graph.input}  # fmt: skip
    for channel, corner in enumerate([(0, 0), (0, -1), (-1, 0), (-1, -1), (5, -1), (-1, 5)]):
        feeds[name][2, channel, *corner] = odd
    got, wanted = gradients(model, feeds)
    assert np.isfinite(wanted).any()
    assert_near(got, wanted)


def test_random_ones(anywhere):
    rng = np.random.default_rng(7)
    for _ in range(25):
        kernel = rng.integers(1, 7, 2).tolist()
        if kernel == [1, 1]:
            continue
        strides, dilations = rng.integers(1, 4, 2).tolist(), rng.integers(1, 3, 2).tolist()
        pads = [int(rng.integers(0, k)) for k in (*kernel, *kernel)]
        size = [int(rng.integers(1 + d * (k - 1), 24)) for k, d in zip(kernel, dilations, strict=True)]
        model = depthwise_step(
            int(rng.integers(1, 5)), int(rng.integers(2, 6)), size, kernel, pads=pads, strides=strides,
            dilations=dilations,
        )  # fmt: skip
        feeds = {v.name: rng.standard_normal([d.dim_value for d in v.type.tensor_type.shape.dim], np.float32)
                 for v in model.graph.input}  # fmt: skip
        assert_near(*gradients(model, feeds))


def test_small_windows_are_left_to_onednn_where_it_is_installed():
    if onednn.why_not():
        pytest.skip("oneDNN is not installed")
    images = 8, 32, 24, 24
    found = {
        size: depthwise.worthwhile(
            onednn.Convolution(onednn.WEIGHTS, images, images, (size,) * 2, (1, 1), (1, 1), *[(size // 2,) * 2] * 2, 32)
        )
        for size in (3, 5, 7)
    }
    assert found == {3: False, 5: True, 7: True}
