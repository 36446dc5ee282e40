"""Half precision on the CPU: a rewrite rounds where the original does, whatever stands between two of its ops."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_remat import rewrite_model
from onnx_remat.ir.body import rename_captures
from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Schedule
from onnx_remat.ort import runtime
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Preparation, prepare
from onnx_remat.write.private_buffers import unroll
from onnx_remat.write.realize import realize, settle
from onnx_remat.write.rounding import Direct, _Term, _Terms, differing
from tests.support.graphs import feeds_for, run_model, same_bits
from tests.write.test_writer import random_schedule

SIDE = 32
SHAPE = f"[{SIDE},{SIDE}]"


def half_mlp(layers: int, batch: int, width: int) -> onnx.ModelProto:
    """A step all in float16: no op of it but Transpose has a half kernel."""
    weights = "".join(f", float16[{width},{width}] w{i}" for i in range(layers))
    renewed = "".join(f", float16[{width},{width}] new.w{i}" for i in range(layers))
    lines, x = [], "x"
    for i in range(layers):
        lines.append(f"z{i} = MatMul({x}, w{i})  a{i} = Tanh(z{i})  s{i} = Sigmoid(z{i})  c{i} = Mul(a{i}, s{i})")
        x = f"c{i}"
    lines.append(f"q = Mul({x}, {x})  loss = ReduceMean<keepdims = 0>(q)  g{layers} = Mul({x}, k)")
    for i in reversed(range(layers)):
        x = "x" if not i else f"c{i - 1}"
        lines.append(f"ga{i} = Mul(g{i + 1}, s{i})  gb{i} = Mul(g{i + 1}, a{i})  gz{i} = Add(ga{i}, gb{i})")
        lines.append(f"xt{i} = Transpose<perm = [1, 0]>({x})  dw{i} = MatMul(xt{i}, gz{i})  up{i} = Mul(dw{i}, k)")
        lines.append(
            f"new.w{i} = Sub(w{i}, up{i})  wt{i} = Transpose<perm = [1, 0]>(w{i})  g{i} = MatMul(gz{i}, wt{i})"
        )
    head = (
        f'<ir_version: 8, opset_import: ["" : 17]> g (float16[{batch},{width}] x{weights}) => (float16 loss{renewed})'
    )
    model = onnx.parser.parse_model(f"{head} {{ {' '.join(lines)} }}".replace("new.", "new_"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(0.01, np.float16), "k"))
    return model


@pytest.mark.parametrize("selector, budget", [pytest.param("auto", "65%", marks=pytest.mark.slow), ("revolve", "80%")])
def test_a_step_in_half_precision_keeps_its_bits(selector: str, budget: str) -> None:
    model = half_mlp(8, 512, 32)
    result = rewrite_model(model, budget, run_by="session", selector=selector, effort=0.3)
    assert result.report.control_edges and not [note for note in result.report.notes if "rounding" in note]
    feeds = feeds_for(model)
    assert same_bits(run_model(model, feeds), run_model(result.model, feeds))


def mixed(seed: int, ops: int) -> onnx.ModelProto:
    """A random graph of both precisions whose values are all read again, the other way round."""
    generator, lines = random.Random(seed), []
    values = {"h": ["x", "w"], "f": ["y"]}
    outputs = ["float16 loss"]

    def pick(kind: str) -> str:
        return generator.choice(values[kind][-5:])

    for i in range(ops):
        kind = generator.choice("hhhhf")
        a, b, new = pick(kind), pick(kind), f"v{i}"
        what = generator.randrange(8)
        if what < 2:
            lines.append(f"{new} = {generator.choice(['Tanh', 'Sigmoid', 'Neg', 'Softsign'])}({a})")
        elif what < 4:
            lines.append(f"{new} = {generator.choice(['Mul', 'Add', 'MatMul', 'Max'])}({a}, {b})")
        elif what < 5:
            lines.append(f"{new} = Transpose<perm = [1, 0]>({a})")
        elif what < 6:
            lines.append(f"{new}c = Concat<axis = 0>({a}, {b})  {new}l, {new}r = Split<axis = 0>({new}c)")
            lines.append(f"{new} = Add({new}l, {new}r)")
        else:
            kind = generator.choice("hf")
            lines.append(f"{new} = Cast<to = {10 if kind == 'h' else 1}>({pick('f' if kind == 'h' else 'h')})")
        values[kind].append(new)
    last, seen = "x", [(kind, v) for kind in "hf" for v in values[kind]]
    generator.shuffle(seen)
    for i, (kind, v) in enumerate(seen):
        if kind == "f":
            lines.append(f"b{i} = Cast<to = 10>({v})")
            v = f"b{i}"
        if generator.random() < 0.3:
            lines.append(f"t{i} = Transpose<perm = [1, 0]>({v})")
            v = f"t{i}"
        lines.append(f"g{i}p = {generator.choice(['Mul', 'Add', 'MatMul', 'Max'])}({last}, {v})  g{i} = Tanh(g{i}p)")
        last = f"g{i}"
        if generator.random() < 0.15:
            lines.append(f"o{i} = {generator.choice(['Transpose<perm = [1, 0]>', 'Neg'])}({last})")
            outputs.append(f"float16{SHAPE} o{i}")
    outputs += [f"float16{SHAPE} {v}" for v in values["h"][2:] if generator.random() < 0.06]
    lines.append(f"loss = ReduceMean<keepdims = 0>({last})")
    inputs = f"float16{SHAPE} x, float16{SHAPE} w, float{SHAPE} y"
    head = f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({", ".join(outputs)})'
    return onnx.parser.parse_model(f"{head} {{ {' '.join(lines)} }}")


def rounds_alike(model: onnx.ModelProto, schedule: Schedule, share: float) -> tuple[bool, bool]:
    """Write a schedule until no helper stands where it changes a rounding: is nothing said to differ, do bits agree?"""
    compiled = prepare(model, Preparation(CPU))
    alone = replace(compiled.problem, poolable=np.zeros(compiled.problem.n_values, np.bool_))
    limit = simulate(alone, schedule).peak
    schedule = settle(compiled, alone, schedule, limit)
    unrolled, direct, feeds = unroll(compiled.problem, schedule), Direct.of(compiled), feeds_for(model)
    expected = run_model(model, feeds)
    while True:
        written = realize(compiled, schedule, int(limit * share), {}, direct=direct.values)
        rounded = direct.differing(written, unrolled)
        equal = same_bits(expected, run_model(written.model, feeds))
        assert equal or rounded, "outputs differ, and nothing says so"
        if direct.values.issuperset(rounded):
            return not rounded, equal
        direct.values.update(rounded)


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 60), marks=pytest.mark.slow)], ids=["few", "many"])
def test_no_helper_stands_where_it_changes_a_rounding(seeds: range) -> None:
    """In any order; where ops run again, a copy may have other readers, and a note says what that changes."""
    noted = 0
    for seed in seeds:
        model = mixed(seed, 12)
        problem = prepare(model, Preparation(CPU)).problem
        assert rounds_alike(model, random_schedule(problem, seed, 0.0), 1.0) == (True, True), seed
        noted += not rounds_alike(model, random_schedule(problem, seed, 0.5), 0.5)[0]
    assert noted <= max(1, len(seeds) // 10), noted


def test_a_rounding_that_comes_back_is_found() -> None:
    """The helper alone, without a rewrite: what it reads, and what reads it, is to blame."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float16[4,4] x, int64[n] none) => (float16[4,4] z) {
        t = Tanh(x)  r = Transpose<perm = [1, 0]>(t)  z = Sigmoid(r) }"""
    before, after = onnx.parser.parse_model(text), onnx.parser.parse_model(text)
    after.graph.input[1].name = "onnx_remat.unseen_axes"
    after.graph.node.insert(1, helper.make_node("Unsqueeze", ["t", "onnx_remat.unseen_axes"], ["t__after"]))
    after.graph.node[2].input[0] = "t__after"
    loaded = [runtime.optimized(model, None, "disable") for model in (before, after)]
    origin = {name: name for name in ("x", "t", "r", "z")}
    assert differing(loaded[0], loaded[0], origin) == ()
    assert set(differing(loaded[0], loaded[1], origin)) == {"t", "r"}


def test_an_absent_output_is_not_what_an_absent_input_reads() -> None:
    """Two nodes, one with an absent input and one with an absent output, may change places."""
    head = """<ir_version: 8, opset_import: ["" : 17]>
        g (float16[4,4] x, float16 m, float[4,2,8] y, float[1,32,8] w) => (float16[4,4] c, float[4,1,2,8] h) {"""
    lines = ['c = Clip(x, "", m)', '"", h = LSTM<hidden_size = 8>(y, w, w)']
    before, after = (onnx.parser.parse_model(f"{head} {'  '.join(each)} }}") for each in (lines, lines[::-1]))
    assert differing(before, after, {name: name for name in ("x", "m", "y", "w", "c", "h")}) == ()


BRANCH = "If<then_branch = a () => (KIND[4,4] t) { t = Sin(V) }, else_branch = b () => (KIND[4,4] e) { e = Neg(V) }>(c)"
HALF_BRANCH = BRANCH.replace("KIND", "float16").replace("V", "h")
LOOP = """Loop<body = l (int64 i, bool on, float[4,4] s) => (bool go, float[4,4] sum, float16[4,4] each) {
        go = Identity(on)  sum = Add(s, f)  each = Cast<to = 10>(sum) }>(two, "", y)"""


@pytest.mark.parametrize(
    "lines, at, changes",
    [
        ("f = Cast<to = 1>(h)  z = " + BRANCH.replace("KIND", "float").replace("V", "f"), "h", True),
        ("f = Cast<to = 1>(h)  z, every = " + LOOP, "h", True),
        ("i = " + HALF_BRANCH + "  j = Tanh(i)  z = Cast<to = 1>(j)", "i", False),
        ("i = " + HALF_BRANCH + "  z = Cast<to = 1>(i)", "h", False),
    ],
    ids=["a branch reads it", "a loop reads it", "a branch makes it", "a branch reads and makes it"],
)
def test_a_rounding_that_a_body_sees_is_found(lines: str, at: str, changes: bool) -> None:
    """Said to differ where bits differ, and only there: a body that reads an outer value, or makes one in float16."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]> g (float16[4,4] x, float[4,4] y, bool c, int64[n] none)
        => (float[4,4] z) <int64 two = {{2}}> {{ h = Mul(x, x)  {lines} }}"""
    before, after = onnx.parser.parse_model(text), onnx.parser.parse_model(text)
    for model in (before, after):
        model.graph.input[3].name = "onnx_remat.unseen_axes"
    place = next(i for i, node in enumerate(after.graph.node) if at in node.output)
    for node in after.graph.node[place + 1 :]:
        node.input[:] = [f"{at}__after" if name == at else name for name in node.input]
        rename_captures(node, {at: f"{at}__after"})
    helper_node = helper.make_node("Unsqueeze", [at, "onnx_remat.unseen_axes"], [f"{at}__after"])
    after.graph.node.insert(place + 1, helper_node)
    feeds = {**feeds_for(before, n=0), "c": np.array(True)}
    assert same_bits(run_model(before, feeds), run_model(after, feeds)) != changes
    loaded = [runtime.optimized(model, None, "disable") for model in (before, after)]
    origin = {name: name for name in ("x", "y", "c", *(name for node in before.graph.node for name in node.output))}
    assert differing(loaded[0], loaded[0], origin) == ()
    assert set(differing(loaded[0], loaded[1], origin)) == ({"f", "h"} if changes else set())


@pytest.mark.parametrize(("op", "levels", "reads"), [("Transpose", 3000, 1), ("Max", 60, 2)])
def test_roundings_behind_long_and_branching_chains_of_copies(op: str, levels: int, reads: int) -> None:
    terms = _Terms()
    plain = rounded = terms.leaf("x")
    rounded = terms.rounded(rounded)
    for level in range(levels):
        plain = terms.number(_Term(op, (level,), (plain,) * reads))
        rounded = terms.number(_Term(op, (level,), (rounded,) * reads))
    assert plain != rounded
    assert terms.unrounded(rounded) == terms.unrounded(plain) == plain
    assert terms.rounded(plain) == rounded
