"""Groups: what may be one kernel, and that it gives the same bits, over random graphs and by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_remat.fuse import groups, spaces
from onnx_remat.fuse.members import Candidate
from onnx_remat.fuse.ordered import OrderedStep
from onnx_remat.session.lean_graph import LeanNode
from tests.support.fusing import assert_same_bits, ordered_step, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")

F, B, L = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64


def build(nodes, inputs: Mapping[str, tuple], outputs, weights: Mapping[str, np.ndarray] | None = None):
    """A model; inputs by name as (type, shape) or a shape of floats; outputs' types are inferred."""
    formals = [
        helper.make_tensor_value_info(name, *(each if each and isinstance(each[1:2], tuple) and len(each) == 2
                                              and isinstance(each[1], tuple) else (F, each)))
        for name, each in inputs.items()
    ]  # fmt: skip
    given = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    made = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph(nodes, "g", formals, made, given)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    known = {value.name: value for value in (*inferred.graph.value_info, *inferred.graph.output)}
    del model.graph.output[:]
    model.graph.output.extend(known[name] for name in outputs)
    return model


def random_feeds(model, rng):
    feeds = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = tuple(d.dim_value for d in kind.shape.dim)
        if kind.elem_type == B:
            feeds[value.name] = rng.random(shape) < 0.5
        elif kind.elem_type == L:
            feeds[value.name] = rng.integers(-5, 6, shape)
        else:
            array = rng.standard_normal(shape).astype(np.float32)
            array[rng.random(shape) < 0.05] = rng.choice(np.float32([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-42]))
            feeds[value.name] = array
    return feeds


def node(op, reads, made, **attributes):
    return helper.make_node(op, reads, [made], **attributes)


# ---- spaces ----


@pytest.mark.parametrize("seed", range(60))
def test_strides_address_what_numpy_broadcasts(seed):
    rng = np.random.default_rng(seed)
    out = tuple(int(x) for x in rng.integers(1, 5, rng.integers(1, 5)))
    shapes = [tuple(1 if rng.random() < 0.5 else x for x in out)[rng.integers(0, len(out)) :] for _ in range(3)]
    shapes = [shape for shape in shapes if spaces.is_broadcast(shape, out)]
    cut = set().union(*(spaces.cuts(shape, out) for shape in shapes)) if shapes else set()
    extents = spaces.axes(prod(out), cut)
    assert prod(extents) == prod(out)
    places = np.indices(extents).reshape(len(extents), -1)
    for shape in shapes:
        wanted = np.broadcast_to(np.arange(prod(shape)).reshape(shape), out).ravel()
        np.testing.assert_array_equal(np.array(spaces.strides(shape, out, extents)) @ places, wanted)


# ---- kernels over broadcasts ----

BROADCASTS = [
    [(4, 6), (6,)], [(4, 6), (4, 1)], [(2, 3, 5, 7), (3, 1, 1)], [(2, 3, 5, 7), (1, 3, 1, 1), (7,)],
    [(2, 3, 5), (2, 1, 1), (3, 1), ()], [(8, 1, 4), (8, 3, 4)], [(5, 1), (1, 7)], [(3, 1, 2, 1), (1, 4, 1, 5)],
    [(1, 1, 33), (2, 1, 1), (1, 3, 1)], [(700, 3), (3,)], [(3, 700), (3, 1)], [(17, 129, 3), (129, 1)],
]  # fmt: skip


@pytest.mark.parametrize("shapes", BROADCASTS, ids=str)
def test_broadcasts(shapes):
    inputs = {f"x{i}": shape for i, shape in enumerate(shapes)}
    nodes, last = [node("Neg", ["x0"], "v0")], "v0"
    for i in range(1, len(shapes)):
        nodes.append(node("Sub" if i % 2 else "Mul", [last, f"x{i}"], f"v{i}"))
        last = f"v{i}"
    nodes += [node("Relu", [last], "a"), node("Add", ["a", last], "b")]
    model = build(nodes, inputs, ["b"])
    assert_same_bits(model, random_feeds(model, np.random.default_rng(1)))


def test_large_arrays_are_shared_by_threads():
    nodes = [node("Mul", ["x", "s"], "a"), node("Add", ["a", "b"], "c"), node("Relu", ["c"], "y")]
    model = build(nodes, {"x": (64, 40_001), "s": (64, 1), "b": (40_001,)}, ["y"])
    made = assert_same_bits(model, random_feeds(model, np.random.default_rng(1)), threads=3)
    assert made.kernels[0].size > 4 * made.kernels[0].grain


def test_steps_of_other_sizes_and_constants_share_kernels():
    texts = set()
    for rows, columns, number in [(5, 7, 0.5), (70, 300, 2.0)]:
        nodes = [node("Mul", ["x", "c"], "a"), node("Add", ["a", "b"], "y")]
        model = build(nodes, {"x": (rows, columns), "b": (columns,)}, ["y"], {"c": np.float32(number)})
        made = assert_same_bits(model, random_feeds(model, np.random.default_rng(1)))
        texts |= {kernel.text for kernel in made.kernels}
    assert len(texts) == 1


def test_views_are_looked_through():
    nodes = [node("Neg", ["x"], "a"), node("Reshape", ["a", "to"], "b"), node("Abs", ["b"], "c"),
             node("Reshape", ["c", "back"], "d"), node("Add", ["d", "a"], "y")]  # fmt: skip
    weights = {"to": np.array([6, 4]), "back": np.array([2, 3, 4])}
    model = build(nodes, {"x": (2, 3, 4)}, ["y"], weights)
    made = assert_same_bits(model, random_feeds(model, np.random.default_rng(1)))
    assert len(made.order) == 1  # no Reshape is left


def test_a_view_that_others_read_stays():
    nodes = [node("Neg", ["x"], "a"), node("Abs", ["a"], "c"), node("Reshape", ["c", "to"], "d"),
             node("Concat", ["d", "d"], "y", axis=0), node("Add", ["c", "a"], "z")]  # fmt: skip
    model = build(nodes, {"x": (2, 3, 4)}, ["y", "z"], {"to": np.array([6, 4])})
    made = assert_same_bits(model, random_feeds(model, np.random.default_rng(1)))
    assert len(made.order) == 3


def test_a_group_never_waits_for_itself():
    """a -> Transpose -> with a again: one group of both would have to run before and after the Transpose."""
    nodes = [node("Neg", ["x"], "a"), node("Abs", ["a"], "b"), node("Transpose", ["b"], "t"),
             node("Add", ["t", "b"], "c"), node("Mul", ["c", "a"], "y")]  # fmt: skip
    model = build(nodes, {"x": (5, 5)}, ["y"])
    made = assert_same_bits(model, random_feeds(model, np.random.default_rng(1)))
    assert len(made.kernels) == 2


# ---- lifetimes ----


def peak(ordered: OrderedStep, found=()) -> int:
    """Bytes alive at once, counted without the code that is tested; groups write over what they read last."""
    place = {member.at: group.place for group in found for member in group.members}
    inner = {m.made for group in found for m in group.members} - {name for group in found for name in group.makes}
    alive: dict[str, list[int]] = {}
    for i, step in enumerate(ordered.steps):
        at = place.get(i, i)
        for name in (*step.writes, *step.reads):
            owner = ordered.root.get(name, name)
            if owner in ordered.counted and owner not in inner and not all(n in ordered.root for n in step.writes):
                alive.setdefault(owner, []).append(at)
    for name in ordered.outputs:
        alive[ordered.root.get(name, name)].append(len(ordered.steps) - 1)
    at_once = np.zeros(len(ordered.steps), int)
    for name, places in alive.items():
        at_once[min(places) : max(places) + 1] += ordered.counted[name]
    for group in found:
        dying = [n for n in group.reads if n in ordered.counted and max(alive[n]) == group.place]
        for made in group.makes:
            kind = ordered.tensors[made].dtype, prod(ordered.tensors[made].shape)
            over = [n for n in dying if (ordered.tensors[n].dtype, prod(ordered.tensors[n].shape)) == kind
                    and n in group.plain]  # fmt: skip
            if over:
                dying.remove(over[0])
                at_once[group.place] -= ordered.counted[made]
    return int(at_once.max(initial=0))


def test_a_merge_that_would_raise_the_peak_is_not_made():
    """`small` is read late: computing it there would keep two large values alive up to the peak."""
    nodes = [node("Mul", ["x", "w"], "big"), node("Add", ["big", "x"], "a"), node("ReduceSum", ["a"], "r", keepdims=1),
             node("Transpose", ["x"], "t1"), node("MatMul", ["t1", "w"], "t2"), node("MatMul", ["t2", "t1"], "t3"),
             node("Mul", ["big", "t3"], "y")]  # fmt: skip
    model = build(nodes, {"x": (64, 64), "w": (64, 64)}, ["y", "r"])
    ordered = ordered_step(model)
    before = peak(ordered)
    found = groups.find(ordered)
    assert found and peak(ordered, found) <= before
    assert_same_bits(model, random_feeds(model, np.random.default_rng(1)))


@pytest.mark.parametrize("late", [False, True])
def test_new_state_is_written_when_nobody_reads_the_old_any_more(late):
    nodes = [node("Mul", ["g", "rate"], "d"), node("Sub", ["w", "d"], "new.w")]
    reading = node("MatMul", ["w", "g"], "m")
    nodes = [*nodes, reading] if late else [reading, *nodes]
    model = build(nodes, {"w": (8, 8), "g": (8, 8)}, ["new.w", "m"], {"rate": np.float32(0.1)})
    ordered = replace(ordered_step(model), renewed={} if late else {"new.w": "w"})
    (group,) = groups.find(ordered)
    assert group.makes == ("new.w",) and "w" in group.plain


def test_state_that_is_broadcast_into_what_renews_it_is_not_fused_with_it():
    nodes = [node("Add", ["w", "x"], "a"), node("Mul", ["a", "b"], "c"), node("Mul", ["w", "k"], "new.w"),
             node("Add", ["new.w", "c"], "y")]  # fmt: skip
    inputs = {"w": (4,), "x": (3, 4), "b": (3, 4), "k": (4,)}
    model = build(nodes, inputs, ["new.w", "y"])
    ordered = replace(ordered_step(model), renewed={"new.w": "w"})
    for group in groups.find(ordered):
        reads_old = [m for m in group.members if any(read.name == "w" for read in m.inputs)]
        assert "new.w" not in group.makes or "w" in Candidate(tuple(reads_old)).plain


# ---- random graphs ----

UNARY = ("Neg", "Abs", "Relu", "Sqrt", "Reciprocal", "Sign", "Floor", "LeakyRelu", "Identity")
BINARY = ("Add", "Sub", "Mul", "Div")
COMPARE = ("Less", "Greater", "Equal", "GreaterOrEqual")


def random_model(rng: np.random.Generator):
    """Elementwise nodes among others, values of a few shapes that broadcast to one another, views, truth values."""
    rank = int(rng.integers(1, 5))
    full = tuple(int(x) for x in rng.choice([1, 2, 3, 4, 7, 16], rank))
    if rng.random() < 0.1:
        full = (*full[:-1], 517)
    narrower = [tuple(1 if rng.random() < 0.4 else x for x in full) for _ in range(2)]
    shapes = [full, full, full, *narrower, narrower[0][int(rng.integers(0, rank)) :], ()]
    inputs: dict[str, tuple] = {f"x{i}": (F, shape) for i, shape in enumerate(shapes)}
    inputs["mask"] = (B, full)
    kinds = dict(inputs)
    nodes, weights = [], {"rows": np.array([prod(full)]), "back": np.array(full, np.int64)}

    def out_of(*names):
        return np.broadcast_shapes(*(kinds[name][1] for name in names))

    def pick(kind):
        names = [name for name, each in kinds.items() if each[0] == kind]
        latest = names[-4:] if rng.random() < 0.6 else names
        return str(rng.choice(latest))

    for i in range(int(rng.integers(2, 24))):
        made, draw = f"v{i}", rng.random()
        try:
            if draw < 0.3:
                a = pick(F)
                nodes.append(node(str(rng.choice(UNARY)), [a], made))
                kinds[made] = F, kinds[a][1]
            elif draw < 0.65:
                a, b = pick(F), pick(F)
                kinds[made] = F, out_of(a, b)
                nodes.append(node(str(rng.choice(BINARY)), [a, b], made))
            elif draw < 0.75:
                a, b = pick(F), pick(F)
                kinds[made] = B, out_of(a, b)
                nodes.append(node(str(rng.choice(COMPARE)), [a, b], made))
            elif draw < 0.85:
                c, a, b = pick(B), pick(F), pick(F)
                kinds[made] = F, out_of(c, a, b)
                nodes.append(node("Where", [c, a, b], made))
            elif draw < 0.9:
                a = pick(B)
                kinds[made] = F, kinds[a][1]
                nodes.append(node("Cast", [a], made, to=F))
            else:
                wide = [name for name, each in kinds.items() if each == (F, full)]
                a = str(rng.choice(wide))
                if draw < 0.93 or rank == 1:
                    nodes.append(node("Reshape", [a, "rows"], made + "f"))
                    nodes.append(node(str(rng.choice(UNARY)), [made + "f"], made + "n"))
                    nodes.append(node("Reshape", [made + "n", "back"], made))
                    kinds[made] = F, full
                elif draw < 0.97:
                    nodes.append(node("ReduceMax", [a], made, keepdims=1, axes=[0]))
                    kinds[made] = F, (1, *full[1:])
                else:
                    nodes.append(node("Softmax", [a], made, axis=0))
                    kinds[made] = F, full
        except ValueError:  # shapes that do not go together
            kinds.pop(made, None)
    read = {name for each in nodes for name in each.input}
    made = [name for each in nodes for name in each.output if name in kinds]
    outputs = [name for name in made if name not in read or rng.random() < 0.1]
    used = {name: each for name, each in inputs.items() if name in read}
    weights = {name: array for name, array in weights.items() if name in read}
    return build(nodes, used, outputs, weights) if outputs else None


def test_random_groups(request):
    """20,000 of them: ``pytest tests/fuse/test_groups.py -k random --fuzz 20000``."""
    count = request.config.getoption("--fuzz") or 25
    fused = 0
    for seed in range(count):
        rng = np.random.default_rng([seed, 36])
        model = random_model(rng)
        if model is None:
            continue
        try:
            made = assert_same_bits(model, random_feeds(model, rng), least_fused=0, threads=1 + seed % 2)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        ordered = ordered_step(model)
        found = groups.find(ordered)
        assert peak(ordered, found) <= peak(ordered), seed
        fused += sum(len(group.members) for group in found)
        assert len(made.kernels) == sum(not isinstance(each, int) for each in made.order)
    assert fused > 3 * count


def test_what_a_body_reads_keeps_its_buffer():
    nodes = [node("Neg", ["x"], "a"), node("Abs", ["a"], "b"), node("Mul", ["b", "x"], "y")]
    ordered = ordered_step(build(nodes, {"x": (4, 4)}, ["y"]))
    (whole,) = groups.find(ordered)
    assert whole.makes == ("y",)
    bodied = replace(ordered, steps=[*ordered.steps, LeanNode(helper.make_node("If", ["c"], ["z"]), ("a",))])
    tensors = {**ordered.tensors, "z": ordered.tensors["y"], "c": ordered.tensors["y"]}
    (whole,) = groups.find(replace(bodied, tensors=tensors))
    assert whole.makes == ("a", "y")


def test_a_value_whose_memory_an_op_writes_is_left_alone():
    """As of an InPlaceAccumulator: what reads the value before must not be moved behind the op that writes it."""
    nodes = [
        node("Neg", ["x"], "a"),
        node("Abs", ["a"], "b"),
        node("Softmax", ["a"], "s", axis=0),
        node("Add", ["b", "s"], "y"),
    ]
    ordered = ordered_step(build(nodes, {"x": (4, 4)}, ["y"]))
    shared = replace(ordered, root={"s": "a"})
    assert all(read.name != "a" for group in groups.find(shared) for member in group.members for read in member.inputs)


@pytest.mark.parametrize("condition", [(1,), (1, 1), (3, 1), (1, 5), (3, 5)])
@pytest.mark.parametrize("other", [(), (3, 1), (1, 5), (3, 5)])
@pytest.mark.parametrize("first", [(), (3, 1), (1, 5), (3, 5)])
def test_the_sign_of_a_zero_that_where_chooses_is_onnx_runtimes(condition, first, other):
    """It depends on what is repeated along the last axis."""
    shapes = {"c": (B, condition), "x": (F, first), "y": (F, other), "z": (F, (3, 5))}
    nodes = [node("Where", ["c", "x", "y"], "w"), node("Neg", ["w"], "n"), node("Mul", ["n", "z"], "p")]
    model = build(nodes, shapes, ["p"])
    for chosen in (True, False):
        feeds = {"c": np.full(condition, chosen), "z": np.ones((3, 5), np.float32)}
        feeds |= {name: np.full(shapes[name][1], np.float32(-0.0)) for name in "xy"}
        assert_same_bits(model, feeds, least_fused=0)
