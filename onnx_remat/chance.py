"""Take chance out of a model: the same draws in the original and the rewritten one, so that outputs can be compared.

ONNX Runtime's generators keep state between nodes and runs, so two runs of a model with Dropout differ even with a
seed. A random node's outputs depend on shapes alone (for Dropout: its mask), so they can be drawn beforehand.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_remat import ops
from onnx_remat.shapes import Tensor


def random_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Nodes of the main graph whose outputs differ from run to run."""
    return [node for node in model.graph.node if ops.facts(node.domain, node.op_type).random]


def without_chance(model: onnx.ModelProto, tensors: Mapping[str, Tensor]) -> onnx.ModelProto:
    """A copy in which every random node gives way to draws fixed by its name.

    Parameters
    ----------
    model : onnx.ModelProto
        The original, or what was made of it: names of random nodes' outputs are the same in both.
    tensors : mapping of str to Tensor
        Shapes of the original's values.

    Returns
    -------
    onnx.ModelProto
        Dropout becomes a product with a fixed mask of one half, scaled by two; generators become constants.
    """
    settled = onnx.ModelProto()
    settled.CopyFrom(model)
    nodes = list(settled.graph.node)
    del settled.graph.node[:]
    for node in nodes:
        settled.graph.node.extend(_settle(node, tensors) if ops.facts(node.domain, node.op_type).random else [node])
    return settled


def _settle(node: onnx.NodeProto, tensors: Mapping[str, Tensor]) -> list[onnx.NodeProto]:
    first = tensors[node.output[0]]
    draw = np.random.default_rng(zlib.crc32(node.output[0].encode()))
    if node.op_type == "Dropout":
        mask = draw.random(first.shape) < 0.5
        scale = f"{node.output[0]}.scale"
        kept = [_constant(f"{node.output[0]}.mask", mask, TensorProto.BOOL)]
        kept += [helper.make_node("Identity", [kept[0].output[0]], [name]) for name in node.output[1:2] if name]
        return [
            *kept,
            _constant(scale, mask * 2.0, first.dtype),
            helper.make_node("Mul", [node.input[0], scale], [node.output[0]]),
        ]
    values = draw.standard_normal(first.shape) if "Normal" in node.op_type else draw.random(first.shape)
    if node.op_type in ("Bernoulli", "Multinomial"):
        values = np.round(values)
    return [_constant(node.output[0], values, first.dtype)]


def _constant(name: str, values: np.ndarray, dtype: int) -> onnx.NodeProto:
    array = values.astype(helper.tensor_dtype_to_np_dtype(dtype))
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name))
