"""Domains and opset versions of a model. The standard domain's two names, ``""`` and ``"ai.onnx"``, become one."""

from __future__ import annotations

from typing import Final

import onnx

STANDARD: Final = ""
STANDARD_DOMAINS: Final = (STANDARD, "ai.onnx")


def canonical(domain: str) -> str:
    """Return the canonical name of a domain.

    >>> canonical("ai.onnx"), canonical("com.microsoft")
    ('', 'com.microsoft')
    """
    return STANDARD if domain in STANDARD_DOMAINS else domain


def is_op(node: onnx.NodeProto, *ops: str) -> bool:
    """Whether a node is one of some standard operators.

    >>> is_op(onnx.helper.make_node("Exp", ["x"], ["y"], domain="ai.onnx"), "Exp", "Log")
    True
    """
    return node.op_type in ops and node.domain in STANDARD_DOMAINS


def opsets_of(model: onnx.ModelProto) -> dict[str, int]:
    """Return the versions of the domains that a model imports, by canonical name.

    >>> opsets_of(onnx.ModelProto(opset_import=[onnx.helper.make_opsetid("ai.onnx", 20)]))
    {'': 20}
    """
    return {canonical(o.domain): o.version for o in reversed(model.opset_import)}


def opset_of(model: onnx.ModelProto, domain: str = STANDARD) -> int:
    """Return the version of a domain that a model imports, 0 if it does not import the domain.

    >>> model = onnx.ModelProto(opset_import=[onnx.helper.make_opsetid("ai.onnx", 20)])
    >>> opset_of(model), opset_of(model, "com.microsoft")
    (20, 0)
    """
    return next((o.version for o in model.opset_import if canonical(o.domain) == canonical(domain)), 0)


def one_name_for_the_standard(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the standard domain always "": onnx's own inference rejects the alias "ai.onnx".

    Where it has the alias, the result is a copy. ONNX Runtime refuses the alias in functions and bodies itself.

    >>> aliased = onnx.helper.make_node("Exp", ["x"], ["y"], domain="ai.onnx")
    >>> made = one_name_for_the_standard(onnx.ModelProto(graph=onnx.GraphProto(node=[aliased])))
    >>> made.graph.node[0].domain
    ''
    """
    if all(entry.domain != "ai.onnx" for entry in (*model.opset_import, *model.graph.node)):
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for entry in (*copy.opset_import, *copy.graph.node):
        entry.domain = canonical(entry.domain)
    return copy
