"""Biases of products on a device as nodes of their own, which kernels add where they read the product.

ONNX Runtime's Gemm for CUDA writes the bias to every row of its result, in a launch of its own, before it multiplies.
An Add behind the product moves as many bytes even if no kernel takes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx

    from onnx_remat.ir.shapes import Tensor
    from onnx_remat.session.lean_graph import LeanNode
    from onnx_remat.session.offsets import Program

PRODUCT = "/product"
"""What the name of a product ends in that stands for another value, after the name of that."""

_FLOAT = 1  # of onnx.TensorProto; half precision would be rounded twice


def result_of(name: str) -> str:
    """Return the name of the value that a product stands for, an empty text if it stands for none."""
    return name.removesuffix(PRODUCT) if name.endswith(PRODUCT) else ""


_OPTIONAL_BIAS = 11
"""Opset from which on a Gemm may lack its bias."""


def divided(program: Program, opset: int, renewed: Container[str] = ()) -> Program:
    """Return a program in which an Add follows each Gemm that had a bias, and whose result one node alone reads.

    A result with several readers stays: the backward section may compute other values again from it, since it is in
    memory. So does one of `renewed`, which lies in the memory of an input: its product would need a buffer.
    """
    from onnx import NodeProto, helper

    from onnx_remat.session import lean_graph, offsets

    if opset < _OPTIONAL_BIAS:
        return program

    views = program.root
    readers = Counter(
        views.get(name, name)
        for step in program.steps
        if not step.writes or not all(name in views for name in step.writes)
        for name in dict.fromkeys(step.reads)
    )
    steps: list[LeanNode] = []
    more: dict[str, Tensor] = {}
    for step in program.steps:
        made = step.node.output[0] if step.node.output else ""
        product = made + PRODUCT
        alone = readers[made] == 1 and made not in program.outputs and made not in renewed
        if not alone or not _has_bias(step.node) or program.tensors[made].dtype != _FLOAT or product in program.tensors:
            steps.append(step)
            continue
        node, tensor = NodeProto(), program.tensors[made]
        node.CopyFrom(step.node)
        del node.input[2:]
        node.output[0] = product
        add = helper.make_node("Add", [product, step.node.input[2]], [made], f"{node.name}/bias")
        steps += [lean_graph.LeanNode(node), lean_graph.LeanNode(add)]
        more[product] = tensor
    if not more:
        return program
    tensors = {**program.tensors, **more}
    made_again = offsets.program(steps, tensors, program.inputs, program.outputs, program.kernels, opset)
    return replace(made_again, on_host=program.on_host)


def _has_bias(node: onnx.NodeProto) -> bool:
    if node.op_type != "Gemm" or node.domain not in ("", "ai.onnx") or len(node.input) < 3 or not node.input[2]:
        return False
    return all(each.f == 1 for each in node.attribute if each.name == "beta")
