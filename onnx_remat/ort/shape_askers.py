"""What ONNX Runtime knows of shapes that onnx does not, for `ir.shapes.infer`; nothing where it is not installed."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import TensorProto

from onnx_remat.ir.native import stated
from onnx_remat.ir.shapes import UNSEEN, Asker, Types, stating
from onnx_remat.ort import runtime


def _by_loading(model: onnx.ModelProto, names: Sequence[str], known: Types) -> Types:
    """ONNX Runtime's own inference, which knows its contrib ops, from what is known by now."""
    asking = stating(model, known)
    # Nobody reads these once they are seen through, and of a model of IR version 3 ONNX Runtime refuses such ones.
    kept = [weight for weight in asking.graph.initializer if not weight.name.startswith(UNSEEN)]
    del asking.graph.initializer[:]
    asking.graph.initializer.extend(kept)
    return {
        name: onnx.helper.make_tensor_type_proto(_ELEMENTS[kind], dims)
        for name, (kind, dims) in runtime.infer_shapes(asking, names).items()
        if kind in _ELEMENTS and dims and all(isinstance(dim, int) for dim in dims)  # [] may also mean: no idea
    }


_ELEMENTS = {f"tensor({name.lower()})": number for name, number in TensorProto.DataType.items()}


def _symbolically(model: onnx.ModelProto, _names: Sequence[str], _known: Types) -> Types:
    """ONNX Runtime's symbolic inference, which propagates more values; it needs sympy."""
    inferred = runtime.infer_shapes_symbolically(model)
    return stated(inferred.graph) if inferred is not None else {}


SHAPE_ASKERS: Sequence[Asker] = (_by_loading, _symbolically)
"""In the order they are to be asked."""
