"""Slices of one value side by side, copied by one kernel of a CUDA device, which tests simulate."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from onnx_remat.fuse import columns
from onnx_remat.fuse.columns import _progressions
from tests.fuse.test_cuda import assert_same, pytestmark  # noqa: F401
from tests.fuse.test_groups import build, node
from tests.support import fusing, warps


def windows(shape, starts, extents, axes, steps=None, view=(), axis=-1, dtype=1, more=()):
    """Slices of a value that begin at `starts`, each as a view of that shape if one is given, concatenated."""
    nodes, names, weights = [], [], {"axes": np.array(axes), "steps": np.array(steps or [1] * len(axes))}
    for i, start in enumerate(starts):
        end = [s + step * (n - 1) + 1 for s, n, step in zip(start, extents, weights["steps"], strict=True)]
        weights |= {f"from{i}": np.array(start), f"to{i}": np.array(end)}
        nodes.append(node("Slice", ["x", f"from{i}", f"to{i}", "axes", "steps"], f"s{i}"))
        names.append(f"s{i}")
        if view:
            weights["view"] = np.array(view)
            nodes.append(node("Reshape", [names.pop(), "view"], f"v{i}"))
            names.append(f"v{i}")
    nodes.append(node("Concat", names, "y", axis=axis))
    return build([*nodes, *more], {"x": (dtype, shape)}, ["y", *(made.output[0] for made in more)], weights)


def grid(*extents, by=1):
    return list(itertools.product(*(range(0, n * by, by) for n in extents)))


LATER = [node("Softmax", ["x"], "z", axis=-1)]
CASES = {
    "a window": windows((2, 6, 7, 4), grid(3, 3), (4, 5), (1, 2), view=(40, 4)),
    "one with strides and dilations": windows(
        (2, 9, 9, 3), grid(3, 2, by=2), (2, 3), (1, 2), [3, 2], view=(12, 3), more=LATER
    ),
    "a signal": windows((3, 10, 2), grid(4), (7,), (1,), view=(21, 2)),
    "a volume": windows((2, 4, 5, 6, 2), grid(2, 3, 2), (3, 3, 5), (1, 2, 3), view=(90, 2)),
    "one row of a window": windows((2, 6, 7, 4), [(1, 0), (1, 1), (1, 2)], (4, 5), (1, 2), view=(40, 4)),
    "rows of a matrix": windows((2, 3, 6, 6), grid(2, 2), (4, 4), (2, 3), [1, 1], view=(2, 1, 48), axis=1),
    "no view": windows((4, 9), [(0,), (2,), (4,)], (5,), (1,), axis=0),
    "another axis": windows((4, 6, 5), [(0,), (3,)], (3,), (1,), axis=2),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_windows_lie_side_by_side(case):
    x = np.random.default_rng(0).standard_normal([d.dim_value for d in case.graph.input[0].type.tensor_type.shape.dim])
    assert_same(case, {"x": x.astype(np.float32)}, exact=True, kernels=1)


@pytest.mark.parametrize("dtype", [7, 9, 10, 16])
def test_elements_of_any_size(dtype):
    model = windows((2, 6, 7, 4), grid(3, 3), (4, 5), (1, 2), view=(40, 4), dtype=dtype)
    x = (np.random.default_rng(0).standard_normal((2, 6, 7, 4)) * 3).astype(warps.STORED[dtype])
    made = warps.fused(model)
    assert len(made.kernels) == 1
    if dtype != 16:  # ONNX Runtime on a CPU slices no bfloat16
        assert_same(model, {"x": x}, exact=True, kernels=1)


@pytest.mark.parametrize(
    "model",
    [
        windows((4, 9), [(0,), (1,), (3,)], (6,), (1,), axis=0),
        windows((4, 9), [(3,), (1,)], (6,), (1,), axis=0),
        windows((4, 9), [(0,), (1,)], (8,), (1,), axis=0, more=[node("Softmax", ["s0"], "z", axis=-1)]),
        windows((2, 6, 4), grid(3), (4,), (1,), view=(4, 8), axis=1),
    ],
    ids=["no regular distances", "backwards", "read elsewhere", "a view of other axes"],
)
def test_others_are_left_to_onnx_runtime(model):
    assert not any("columns" in each.node.name for each in warps.fused(model).order if not isinstance(each, int))


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("later", [False, True])
def test_small_slices_stay_if_the_value_would_live_longer(later, between):
    model = windows((4, 9), [(0,), (1,)], (2,), (1,), axis=0, more=LATER * later)
    if between:
        concat = next(i for i, each in enumerate(model.graph.node) if each.op_type == "Concat")
        model.graph.node.insert(concat, node("Softmax", ["other"], "o", axis=-1))
        model.graph.input.add().CopyFrom(model.graph.input[0])
        model.graph.input[1].name = "other"
        model.graph.output.add().name = "o"
    assert len(warps.fused(model).kernels) == (later or not between)


def test_slices_of_an_input_that_is_renewed_stay():
    ordered = fusing.ordered_step(CASES["a window"])
    assert len(columns.find(ordered)) == 1
    assert not columns.find(replace(ordered, renewed={"new.x": "x"}))


def test_progressions():
    assert _progressions([5]) == () and _progressions([5, 7]) == ((2, 2),)
    assert _progressions([0, 1, 2, 8, 9, 10, 16, 17, 18]) == ((3, 8), (3, 1))
    assert _progressions([0, 1, 2, 3, 4, 5]) == ((6, 1),)
    assert _progressions([0, 1, 2, 8, 9]) is None and _progressions([0, 1, 8, 10]) is None
    assert _progressions([3, 2]) is None and _progressions([0, 1, 8, 9, 2, 3]) is None
