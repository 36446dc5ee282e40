"""Products of a step without nodes that only rearrange operands and results: the same numbers, names and order."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import helper, numpy_helper

pytest.importorskip("onnx_ir")
import onnx_ir as ir
from onnx_remat.converters.passes.simplify import simplify

from onnx_remat.ort import runtime
from tests.support.slow import few

BATCHES, HEADS = 2, 3


def parsed(text):
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]>\n{text}')
    return onnx.shape_inference.infer_shapes(model, data_prop=True)


def simplified(model, feeds):
    """A model of labelled nodes after the pass has run twice, if it is valid and computes the same."""
    for node in model.graph.node:
        node.metadata_props.add(key="phase", value="forward")
    expected, made = runtime.outputs(model, feeds), ir.from_proto(model)
    for _ in range(2):
        simplify(made)
    proto = ir.to_proto(made)
    onnx.checker.check_model(proto, full_check=True)
    assert all(any(p.key == "phase" for p in node.metadata_props) for node in proto.graph.node)
    got = runtime.outputs(proto, feeds)
    assert [*got] == [*expected]
    for name, wanted in expected.items():
        scale = max(1.0, float(np.abs(wanted).max()))
        np.testing.assert_allclose(got[name], wanted, rtol=0, atol=1e-4 * scale, err_msg=name)
    return proto


def random_products(rng):
    """Products, transposes, reshapes to one axis of matrices and back, and factors, of which some are outputs."""
    nodes, inputs, shapes, constants = [], {}, {}, {}

    def value(op, reads, shape, **attributes):
        name = f"v{len(nodes)}"
        nodes.append(helper.make_node(op, reads, [name], **attributes))
        shapes[name] = tuple(shape)

    def constant(array):
        name = f"c{len(constants)}"
        constants[name] = np.asarray(array)
        return name

    for lead in ((BATCHES, HEADS), (BATCHES * HEADS,), (1, HEADS), ()):
        inputs[f"x{len(inputs)}"] = (*lead, *(int(size) for size in rng.choice([2, 4], 2)))
    factors = {"scale": (), "one": (1,)}
    shapes |= inputs
    for _ in range(16):
        x = [*shapes][-1 - min(int(rng.geometric(0.3)) - 1, len(shapes) - 1)]
        shape, kind = shapes[x], rng.integers(7)
        rank = len(shape)
        if kind < 2:
            order = [*range(rank - 2), rank - 1, rank - 2] if rng.random() < 0.8 else rng.permutation(rank).tolist()
            value("Transpose", [x], [shape[axis] for axis in order], perm=order)
        elif kind < 4:
            factor = ["scale", "one", constant(np.float32(0.5))][rng.integers(3)]
            reads = [x, factor] if rng.random() < 0.7 else [factor, x]
            value("Div" if reads[0] == x and rng.random() < 0.4 else "Mul", reads, shape)
        elif kind == 4 and rank > 2:
            flat = (-1, *shape[2:]) if rank == 4 else (BATCHES, -1, *shape[1:])
            if rank == 4 or shape[0] == BATCHES * HEADS:
                value("Reshape", [x, constant(np.array(flat))], np.zeros(shape, bool).reshape(flat).shape)
        else:
            fits = [y for y in shapes if shapes[y][-2] == shape[-1]]
            rng.shuffle(fits)
            for y in fits[:1]:
                try:
                    lead = np.broadcast_shapes(shape[:-2], shapes[y][:-2])
                except ValueError:
                    break
                value("MatMul", [x, y], (*lead, shape[-2], shapes[y][-1]))
    read = {name for node in nodes for name in node.input}
    made = [name for name in shapes if name not in inputs]
    kept = [name for name in made if name not in read or rng.random() < 0.15]
    given = inputs | factors
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(name, 1, given[name]) for name in given],
        [helper.make_tensor_value_info(name, 1, shapes[name]) for name in kept],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
        value_info=[helper.make_tensor_value_info(name, 1, shapes[name]) for name in made if name not in kept],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return model, {name: np.asarray(rng.standard_normal(shape) + 0.1, np.float32) for name, shape in given.items()}


@pytest.mark.parametrize("first", few(range(0, 200, 20), [0]))
def test_random_products(first):
    for seed in range(first, first + 20):
        simplified(*random_products(np.random.default_rng(seed)))


def test_an_attentions_products_read_what_they_can_include():
    made = simplified(
        parsed("""g (float[2, 3, 8, 4] q, float[2, 3, 8, 4] k, float[6, 8, 8] d)
            => (float[6, 8, 8] s, float[2, 3, 8, 4] g)
        <int64[3] left = {6, 8, 4}, int64[3] right = {6, 4, 8}, int64[4] back = {2, 3, 4, 8}, float half = {0.5}> {
            kt = Transpose <perm = [0, 1, 3, 2]> (k)  ks = Mul (kt, half)
            a = Reshape (q, left)  b = Reshape (ks, right)  s = MatMul (a, b)
            at = Transpose <perm = [0, 2, 1]> (a)  e = MatMul (at, d)
            f = Reshape (e, back)  h = Mul (f, half)  g = Transpose <perm = [0, 1, 3, 2]> (h)
        }"""),
        {name: np.random.default_rng(0).standard_normal(shape).astype(np.float32)
         for name, shape in {"q": (2, 3, 8, 4), "k": (2, 3, 8, 4), "d": (6, 8, 8)}.items()},
    )  # fmt: skip
    assert Counter(node.op_type for node in made.graph.node)["MatMul"] == 2


@pytest.mark.parametrize(
    ("taken", "text"),
    [
        ("y.flat", """g (float[2, 3, 4, 5] x, float[2, 3, 5, 4] w) => (float loss)
        <int64[3] left = {6, 4, 5}, int64[3] right = {6, 5, 4}> {
            a = Reshape (x, left)  b = Reshape (w, right)  y = MatMul (a, b)
            taken = Sigmoid (y)  q = Mul (taken, y)  loss = ReduceMean <keepdims = 0> (q) }"""),
        ("s.turned", """g (float[6, 2, 3] x, float[6, 2, 5] w) => (float loss) <float half = {0.5}> {
            t = Transpose <perm = [0, 2, 1]> (x)  s = Mul (t, half)  y = MatMul (s, w)
            taken = Sigmoid (y)  q = Mul (taken, y)  loss = ReduceMean <keepdims = 0> (q) }"""),
    ],
)  # fmt: skip
def test_names_that_the_model_has_are_not_given_to_new_values(taken, text):
    model = parsed(text)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [taken if name == "taken" else name for name in names]
    next(value for value in model.graph.value_info if value.name == "taken").name = taken
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    simplified(model, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})


def test_the_output_of_a_body_stays_in_the_body():
    model = parsed("""g (float[2, 3] x, float[2, 3] w, bool c) => (float loss) <float half = {0.5}> {
        t = Transpose <perm = [1, 0]> (x)  s = Mul (t, half)
        y = If (c) <then_branch = a () => (float[2, 3] o) { o = Transpose <perm = [1, 0]> (s) },
                    else_branch = b () => (float[2, 3] p) { p = Identity (x) }>
        q = Mul (y, w)  loss = ReduceMean <keepdims = 0> (q) }""")
    feeds = {name: np.ones((2, 3), np.float32) for name in "xw"} | {"c": np.array(True)}
    simplified(model, feeds)
