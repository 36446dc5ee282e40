"""The tensor that a ``Constant`` node states, in whichever form: ``value``, ``value_float``, ``value_ints``, ..."""

from __future__ import annotations

from typing import Final

import onnx
from onnx import TensorProto, helper

from onnx_remat.ir.opsets import STANDARD_DOMAINS

_FORMS: Final = {
    "value_float": ("f", TensorProto.FLOAT), "value_floats": ("floats", TensorProto.FLOAT),
    "value_int": ("i", TensorProto.INT64), "value_ints": ("ints", TensorProto.INT64),
    "value_string": ("s", TensorProto.STRING), "value_strings": ("strings", TensorProto.STRING),
}  # fmt: skip
"""Field and element type of the attributes that state numbers or texts; in the plural they are vectors."""


def tensor_of(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the tensor of a ``Constant``; None if its value is sparse, or for any other op.

    >>> tensor = tensor_of(onnx.parser.parse_node("r = Constant <value_float = 0.25> ()"))
    >>> tensor.data_type == TensorProto.FLOAT, tensor.dims, tensor.float_data
    (True, [], [0.25])
    """
    if node.op_type != "Constant" or node.domain not in STANDARD_DOMAINS or not node.output:
        return None
    tensor: onnx.TensorProto | None = None
    for attribute in node.attribute:
        if attribute.name == "value":
            tensor = attribute.t
        elif attribute.name in _FORMS:
            field, kind = _FORMS[attribute.name]
            stated, many = getattr(attribute, field), attribute.name.endswith("s")
            dims, entries = ([len(stated)], stated) if many else ([], [stated])
            tensor = helper.make_tensor(node.output[0], kind, dims, entries)
    return tensor
