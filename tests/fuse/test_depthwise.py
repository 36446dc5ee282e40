"""Gradients of the weights of depthwise convolutions, compared with ONNX Runtime's."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

from onnx_remat.fuse import convolutions, depthwise, onednn
from onnx_remat.fuse.convolution_forms import Steps, weight_gradients
from onnx_remat.fuse.kernel import FusedNode
from tests.fuse.test_convolutions import case, feeds_of, step
from tests.support.fusing import options, ordered_step, run, run_on_small_stack, session, why_not

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
    """All that the kernel can compute, also where others are faster."""
    monkeypatch.setattr(depthwise, "worthwhile", lambda of: True)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("one", CASES.values(), ids=CASES)
def test_gradients_of_weights(one, threads, anywhere):
    model = depthwise_step(*one[0], **one[1])
    feeds = feeds_of(model)
    assert_near(*gradients(model, feeds, threads))


@pytest.mark.parametrize("name", ["x", "t"])
@pytest.mark.parametrize("odd", [np.inf, np.nan])
def test_what_is_not_finite_reaches_the_entries_that_read_it_alone(name, odd, anywhere):
    """A window of 3 x 3 without padding reads each corner of an image in one entry."""
    model = depthwise_step(8, 16, (12, 12), [3, 3])
    feeds = feeds_of(model)
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
        assert_near(*gradients(model, feeds_of(model)))


def gradient_of(shape, channels, size, stride=1, pad=None):
    pad = size // 2 if pad is None else pad
    out = (shape[2] + 2 * pad - size) // stride + 1
    return onednn.Convolution(
        onednn.WEIGHTS, shape, (shape[0], channels, out, out), (size, size), (stride, stride), (1, 1),
        (pad, pad), (pad, pad), shape[1],
    )  # fmt: skip


@pytest.mark.skipif(bool(onednn.why_not()), reason="no oneDNN here")
@pytest.mark.parametrize(
    ("of", "here", "by_onednn"),
    [
        (gradient_of((8, 32, 24, 24), 32, 3), False, True),
        (gradient_of((8, 32, 24, 24), 32, 5), True, False),
        (gradient_of((8, 32, 56, 56), 32, 7), True, False),
        (gradient_of((128, 256, 7, 7), 256, 7, pad=0), False, False),  # one entry of output
        (gradient_of((64, 32, 40, 40), 32, 1, stride=2), False, False),  # copied more than read
        (gradient_of((16, 64, 14, 14), 128, 5), False, False),  # two outputs of each channel
    ],
)
def test_who_computes_a_gradient(of, here, by_onednn):
    assert (depthwise.is_possible(of) and depthwise.worthwhile(of)) == here
    assert (convolutions.worthwhile(of) and not here) == by_onednn


def test_copies_lie_on_the_smallest_of_stacks(anywhere):
    """Threads of Python may have 256 KiB; a kernel runs in the thread that runs the session, too."""
    model = depthwise_step(2, 4, (76, 76), [15, 15])
    of = next(weight_gradients(Steps(ordered_step(model)))).convolution
    assert depthwise._Copies.of(of).count > 0.9 * depthwise.MOST_COPIED
    assert run_on_small_stack(session(model)[0], feeds_of(model))
