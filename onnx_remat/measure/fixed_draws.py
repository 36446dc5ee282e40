"""Make a model deterministic: the same random draws in the original and the rewritten model, to compare their outputs.

ONNX Runtime's generators keep state between nodes and runs, so two runs of a model with Dropout differ even with a
seed. A random node's outputs (for Dropout: its mask) depend on shapes only, so they can be drawn in advance.

Some of ONNX Runtime's kernels have data races: their results depend on how threads interleave. On one thread they do
not.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_remat.ir import dropout
from onnx_remat.ir.body import bodies
from onnx_remat.ir.graph import constants
from onnx_remat.ir.metadata import TAG
from onnx_remat.ir.opsets import opset_of
from onnx_remat.ir.shapes import Tensor
from onnx_remat.ort.kernels.base import Kernels, OpKey, key


def random_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the nodes of the main graph whose outputs differ from run to run."""
    stated = constants(model.graph)
    return [node for node in model.graph.node if dropout.is_random_node(node, opset_of(model, node.domain), stated)]


def drawing_bodies(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the nodes of the main graph in whose bodies nodes draw: `without_chance` does not change these.

    A body's node may run any number of times, on shapes that are known only then.

    Examples
    --------
    >>> noisy = onnx.parser.parse_model('''<ir_version: 9, opset_import: ["" : 20]>
    ...     g (float[2] x, bool c) => (float[2] y) { y = If (c) <
    ...         then_branch = a () => (float[2] n) { n = RandomNormalLike (x) },
    ...         else_branch = b () => (float[2] m) { m = Neg (x) }> }''')
    >>> [node.op_type for node in drawing_bodies(noisy)]
    ['If']
    """
    stated = constants(model.graph)
    return [
        node
        for node in model.graph.node
        if any(
            dropout.is_random_node(inner, opset_of(model, inner.domain), seen)
            for body in bodies(node)
            for inner, seen in _nodes(body, stated)
        )
    ]


def race_warnings(model: onnx.ModelProto, kernels: Kernels) -> tuple[str, ...]:
    """Return one warning per kind of op that makes results differ from run to run on several threads.

    Bodies of If, Loop and Scan are included. ONNX forbids repeated indices for a ScatterND without a reduction; one
    with constant, distinct indices is safe.

    Examples
    --------
    >>> from onnx_remat.ort.kernels.cpu import CPU
    >>> text = '''<ir_version: 9, opset_import: ["" : 20]>
    ...     g (float[2, 3] x, int64[4, 1] i, float[4, 3] u) => (y) { y = ScatterND <reduction = "add"> (x, i, u) }'''
    >>> [line.partition(":")[0] for line in race_warnings(onnx.parser.parse_model(text), CPU)]
    ["ScatterND sums into 'y'"]
    """
    found: dict[OpKey, list[onnx.NodeProto]] = {}
    for node, seen in _nodes(model.graph, {}):
        if key(node) in kernels.races and not (node.op_type == "ScatterND" and _safe_scatter(node, seen)):
            found.setdefault(key(node), []).append(node)
    return tuple(
        f"{kind[1]} sums into {nodes[0].output[0]!r}"
        + (f" and in {len(nodes) - 1} more nodes" if len(nodes) > 1 else "")
        + f": on more than one thread ONNX Runtime's {kernels.name.upper()} kernel {kernels.races[kind]}. "
        "So outputs of both the original and the result may differ from run to run; "
        "with intra_op_num_threads = 1 they do not"
        for kind, nodes in found.items()
    )


def _nodes(
    graph: onnx.GraphProto, outer: Mapping[str, onnx.TensorProto]
) -> Iterator[tuple[onnx.NodeProto, Mapping[str, onnx.TensorProto]]]:
    """Yield every node, including those of bodies, with the constants in its scope."""
    seen = {**outer, **constants(graph)}
    for node in graph.node:
        yield node, seen
        for body in bodies(node):
            yield from _nodes(body, seen)


def _safe_scatter(node: onnx.NodeProto, seen: Mapping[str, onnx.TensorProto]) -> bool:
    """Do no two threads of a ScatterND write the same entry?"""
    reduction = next((attribute.s for attribute in node.attribute if attribute.name == "reduction"), b"none")
    indices = seen.get(node.input[1])
    if reduction == b"none":
        return True
    if indices is None or indices.data_location == TensorProto.EXTERNAL:
        return False
    rows = numpy_helper.to_array(indices)
    rows = rows.reshape(-1, rows.shape[-1])
    # A negative index counts from the end and may equal another index.
    return bool(rows.min(initial=0) >= 0) and len(np.unique(rows, axis=0)) == len(rows)


def without_chance(model: onnx.ModelProto, tensors: Mapping[str, Tensor]) -> onnx.ModelProto:
    """Return a copy in which every random node is replaced by draws that its name determines.

    Parameters
    ----------
    model : onnx.ModelProto
        The original or the rewritten model: names of random nodes' outputs are the same in both.
    tensors : mapping of str to Tensor
        Shapes of the original's values.

    Returns
    -------
    onnx.ModelProto
        Dropout becomes a product with a fixed mask, scaled as its kernel does (by one half where the ratio is known
        only at run time); generators become constants, drawn with their attributes; Bernoulli compares its
        probabilities with a constant.
    """
    settled = onnx.ModelProto()
    settled.CopyFrom(model)
    nodes = list(settled.graph.node)
    stated = constants(model.graph)
    del settled.graph.node[:]
    for node in nodes:
        random = dropout.is_random_node(node, opset_of(model, node.domain), stated)
        settled.graph.node.extend(_settle(node, tensors, stated) if random else [node])
    return settled


def with_draws_shown(model: onnx.ModelProto) -> tuple[onnx.ModelProto, tuple[str, ...]]:
    """Return a copy that also outputs all draws of random nodes in the main graph, and the names of these outputs.

    The draw of a Dropout is its mask, which the copy names where the original does not. A Dropout whose ratio or mode
    is known only at run time is not changed, here and in `with_draws_given`.
    """
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    drawn: list[str] = []
    for node in _with_a_draw(shown):
        if node.op_type == "Dropout":
            node.output[:] = [node.output[0], _mask(node)]
        drawn.append(node.output[-1])
    known = {value.name for value in shown.graph.output}
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in drawn if name not in known)
    return shown, tuple(drawn)


def with_draws_given(model: onnx.ModelProto, drawn: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    """Return a copy that takes the draws of another run as inputs; names as of `with_draws_shown`.

    Examples
    --------
    >>> noisy = onnx.parser.parse_model('''<ir_version: 9, opset_import: ["" : 20]>
    ...     g (float[2] x) => (float[2] y) { n = RandomNormalLike (x)  y = Add (x, n) }''')
    >>> [value.name for value in with_draws_given(noisy, {"n": np.zeros(2, np.float32)}).graph.input]
    ['x', 'n']
    """
    given = onnx.ModelProto()
    given.CopyFrom(model)
    nodes, stated = list(given.graph.node), constants(model.graph)
    known = (*given.graph.value_info, *given.graph.output, *given.graph.input)
    dtypes = {value.name: value.type.tensor_type.elem_type for value in known}
    random = {node.output[0] for node in _with_a_draw(model)}
    del given.graph.node[:]
    for node in nodes:
        if node.output[0] not in random:
            given.graph.node.append(node)
        elif node.op_type == "Dropout":
            given.graph.node.extend(_product(node, _mask(node), dtypes[node.output[0]], stated))
    given.graph.input.extend(
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(values.dtype), values.shape)
        for name, values in drawn.items()
    )
    return given


def _settle(
    node: onnx.NodeProto, tensors: Mapping[str, Tensor], stated: Mapping[str, onnx.TensorProto]
) -> list[onnx.NodeProto]:
    first = tensors[node.output[0]]
    draw = np.random.default_rng(zlib.crc32(node.output[0].encode()))
    if node.op_type == "Dropout":
        mask = _mask(node)
        drawn = draw.random(first.shape) < _keep(node, stated)
        return [_constant(mask, drawn, TensorProto.BOOL), *_product(node, mask, first.dtype, stated)]
    stem = f"{TAG}chance.{node.output[0]}"
    if node.op_type == "Bernoulli":
        return [
            _constant(f"{stem}.drawn", draw.random(first.shape), TensorProto.FLOAT),
            helper.make_node("Cast", [node.input[0]], [f"{stem}.chances"], to=TensorProto.FLOAT),
            helper.make_node("Less", [f"{stem}.drawn", f"{stem}.chances"], [f"{stem}.happened"]),
            helper.make_node("Cast", [f"{stem}.happened"], [node.output[0]], to=first.dtype),
        ]
    given = {attribute.name: attribute.f for attribute in node.attribute}
    if node.op_type in ("RandomNormal", "RandomNormalLike"):
        values = given.get("mean", 0.0) + given.get("scale", 1.0) * draw.standard_normal(first.shape)
    elif node.op_type in ("RandomUniform", "RandomUniformLike"):
        values = draw.uniform(given.get("low", 0.0), given.get("high", 1.0), first.shape)
    else:
        values = draw.random(first.shape)
    if node.op_type == "Multinomial":
        values = np.round(values)
    return [_constant(node.output[0], values, first.dtype)]


def _with_a_draw(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """Return the random nodes whose outputs are determined by their draws."""
    stated = constants(model.graph)
    return [
        node
        for node in random_nodes(model)
        if node.op_type != "Dropout"
        or (dropout.training_mode(node, stated) and dropout.kept_share(node, stated) is not None)
    ]


def _mask(node: onnx.NodeProto) -> str:
    """Return the name of a Dropout's mask, even where the node does not output it."""
    return "".join(node.output[1:2]) or f"{TAG}chance.{node.output[0]}.mask"


def _keep(node: onnx.NodeProto, stated: Mapping[str, onnx.TensorProto]) -> np.float32:
    return dropout.kept_share(node, stated) or np.float32(0.5)


def _product(
    node: onnx.NodeProto, mask: str, dtype: int, stated: Mapping[str, onnx.TensorProto]
) -> list[onnx.NodeProto]:
    """Return the nodes that apply a Dropout's mask, as the kernel computes it."""
    stem = f"{TAG}chance.{node.output[0]}"
    return [
        helper.make_node("Cast", [mask], [f"{stem}.factor"], to=dtype),
        _constant(f"{stem}.keep", np.asarray(_keep(node, stated)), dtype),
        helper.make_node("Mul", [node.input[0], f"{stem}.factor"], [f"{stem}.masked"]),
        helper.make_node("Div", [f"{stem}.masked", f"{stem}.keep"], [node.output[0]]),
    ]


def _constant(name: str, values: np.ndarray, dtype: int) -> onnx.NodeProto:
    array = values.astype(helper.tensor_dtype_to_np_dtype(dtype))
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name))
