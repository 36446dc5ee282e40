"""Resize along one axis as a matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from onnx_remat.ort import runtime


def axis_matrix(attributes: Mapping[str, Any], opset: int, old: int, new: int, scale: float | None) -> np.ndarray:
    """Return the matrix of Resize along one axis. Resize is linear: the matrix is its result on the unit vectors.

    Parameters
    ----------
    attributes : mapping
        Attributes of the op, without ``axes`` and ``keep_aspect_ratio_policy``.
    opset, old, new : int
        Sizes of the axis before and after.
    scale : float or None
        The scale, if the op has scales as input; None if it has sizes.

    Returns
    -------
    array
        The matrix, of shape [new, old].
    """
    by_scale = scale is not None
    node = onnx.helper.make_node(
        "Resize", ["x", "", "scales" if by_scale else "", "" if by_scale else "sizes"], ["y"], **attributes
    )
    setting = (
        onnx.numpy_helper.from_array(np.asarray([1, 1, 1, scale], np.float32), "scales") if by_scale
        else onnx.numpy_helper.from_array(np.asarray([1, old, 1, new], np.int64), "sizes")
    )  # fmt: skip
    graph = onnx.helper.make_graph(
        [node], "axis",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, old, 1, old])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [setting],
    )  # fmt: skip
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=9)
    made = runtime.outputs(model, {"x": np.eye(old, dtype=np.float32).reshape(1, old, 1, old)})["y"]
    return np.asarray(made.reshape(old, new).T)
