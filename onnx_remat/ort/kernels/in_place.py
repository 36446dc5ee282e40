"""Kernels that may write an output in place of one of their inputs.

ONNX Runtime itself overwrites an input only if the kernel declares it (``MayInplace``, `base.Kernels.inplace`). Kernels
that compute element by element, and read an element before they write it, also give the same bits if their output is
bound to the memory of an input, though they do not declare it. ``tests/ort/test_in_place.py`` runs every entry both
ways, on the CPU. On CUDA the same operators use templates (``unary_elementwise_impl.cuh``,
``binary_elementwise_impl.cuh``, ``where_impl.cu``), in which every thread reads its elements and then writes those of
the same indices: this is known from the source code, not from a run.
"""

from __future__ import annotations

from typing import Final

import onnx

from onnx_remat.ort.kernels.base import Kernels, key

UNARY: Final = ("Abs", "Ceil", "Exp", "Floor", "Identity", "Log", "Neg", "Reciprocal", "Sign", "Sqrt")
"""Standard operators of one input, measured on the CPU."""

BINARY: Final = ("Add", "Div", "Mul", "Sub")
"""Standard operators of two inputs, measured on the CPU over either; the other one may be broadcast."""

CPU_ONLY: Final = {"Gemm": (2,), "Max": (0,), "Min": (0,)}
"""Input slots of kernels that were measured on the CPU alone; Max and Min only with two inputs.

Before opset 8, Max and Min copy their first input to the output, and then read the second one. Gemm copies its third
input to the output, and adds the product there (``gemm.cc``), except in half precision.
"""


_CHOICE: Final = {"Where": (1, 2)}
"""Input slots of kernels that choose between inputs; the condition may be broadcast."""


def may_overwrite(kernels: Kernels, node: onnx.NodeProto, slot: int, out: int, dtype: int) -> bool:
    """Whether a node's output may overwrite one of its inputs of equal shape and element type.

    Parameters
    ----------
    kernels : Kernels
    node : onnx.NodeProto
    slot, out : int
        Input and output slot.
    dtype : int
        Element type of either (``onnx.TensorProto``).

    Examples
    --------
    >>> from onnx_remat.ort.kernels.cpu import CPU
    >>> nodes = [onnx.helper.make_node(op, ["a", "b"], ["c"]) for op in ("Sub", "MatMul")]
    >>> [may_overwrite(CPU, node, 0, 0, onnx.TensorProto.FLOAT) for node in nodes]
    [True, False]
    """
    if (slot, out) in kernels.may_inplace(node, dtype):
        return True
    domain, op_type = key(node)
    if domain or out or (kernels.name != "cpu" and op_type == "Identity"):
        return False
    if op_type in CPU_ONLY:
        several = op_type in ("Max", "Min") and len(node.input) != 2
        half = op_type == "Gemm" and dtype not in (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)
        return kernels.name == "cpu" and not several and not half and slot in CPU_ONLY[op_type]
    return (
        (op_type in UNARY and slot == 0) or (op_type in BINARY and slot in (0, 1)) or slot in _CHOICE.get(op_type, ())
    )
