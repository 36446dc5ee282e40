"""Any schedule of any graph, written down: same results to the last bit, that order, that memory, tidy names."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from onnx_remat import rewrite_model
from onnx_remat.errors import ModelError
from onnx_remat.ir.metadata import CONTROL_KEY, RECOMPUTE_KEY, SHAPES_KEY, TAG
from onnx_remat.measure import processes
from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Problem, Schedule, check_schedule
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Compiled, Preparation, prepare
from onnx_remat.plan.selectors import Request, get, names
from onnx_remat.write.control_edges import heavy_steps, light_limit
from onnx_remat.write.decided import Rewritten
from onnx_remat.write.private_buffers import unroll
from onnx_remat.write.realize import _is_absorbed, realize, settle
from tests.support.graphs import feeds_for, mlp, model_of, run_model, same_bits
from tests.support.slow import few

make = helper.make_node
FLOAT, BOOL = TensorProto.FLOAT, TensorProto.BOOL
SIDE = 32
FULL, HALF, IMAGE = (SIDE, SIDE), (SIDE // 2, SIDE), (1, 1, SIDE, SIDE)
STATED = Preparation(CPU)


class Builder:
    """A random training graph: values by kind, every op with a name, every float value that nobody reads an output."""

    def __init__(self, seed: int, layers: int) -> None:
        self.random = random.Random(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.values: dict[object, list[str]] = {FULL: ["x", "t"], HALF: [], IMAGE: [], "mask": [], "index": []}
        self.shapes: dict[str, tuple[int, ...]] = {"x": FULL, "t": FULL}
        self.transposed: set[str] = set()
        kinds = [self.unary] * 4 + [self.binary] * 4 + [self.matmul] * 2 + [self.scaled] + [
            self.view, self.transpose, self.split, self.concat, self.pool, self.unpool, self.choose, self.dropout,
            self.unmask,
        ]  # fmt: skip
        for _ in range(layers):
            self.random.choice(kinds)()

    def pick(self, kind: object = FULL) -> str:
        """Some value made so far, late ones more often: the past stays alive, as it does in training."""
        have = self.values[kind]
        return have[-1] if self.random.random() < 0.5 else self.random.choice(have)

    def add(self, op_type: str, inputs: list[str], *kinds: object, **attributes: object) -> list[str]:
        number = len(self.nodes)
        outputs = [f"v{number}.{i}" if kind else "" for i, kind in enumerate(kinds)]
        while outputs and not outputs[-1]:
            outputs.pop()
        self.nodes.append(make(op_type, inputs, outputs, name=f"n{number}.{op_type}", **attributes))
        for name, kind in zip(outputs, kinds, strict=False):
            if name:
                self.values[kind].append(name)
                if isinstance(kind, tuple):
                    self.shapes[name] = kind
        return outputs

    def unary(self) -> None:
        self.add(self.random.choice(["Tanh", "Sigmoid", "Neg", "Relu", "Abs", "Sin", "Softplus"]), [self.pick()], FULL)

    def binary(self) -> None:
        self.add(self.random.choice(["Add", "Sub", "Mul", "Max"]), [self.pick(), self.pick()], FULL)

    def matmul(self) -> None:
        """Never of two Transposes: such a product has no input that a control edge could pass through."""
        pair = [self.pick(), self.pick()]
        if all(name in self.transposed for name in pair):
            pair[1] = "t"
        product = self.add("MatMul", pair, FULL)[0]
        self.add("Mul", [product, "tenth"], FULL)

    def scaled(self) -> None:
        """Through a scalar: a light value between heavy ones."""
        number = len(self.nodes)
        self.nodes.append(make("ReduceMean", [self.pick()], [f"m{number}"], name=f"n{number}.mean", keepdims=0))
        self.add("Mul", [self.pick(), f"m{number}"], FULL)

    def view(self) -> None:
        if self.random.random() < 0.5:
            self.add("Identity", [self.pick()], FULL)
        else:
            self.add("Reshape", [self.pick(), "image"], IMAGE)

    def transpose(self) -> None:
        source = self.pick()
        if source not in self.transposed:
            self.transposed.update(self.add("Transpose", [source], FULL, perm=[1, 0]))

    def split(self) -> None:
        self.add("Split", [self.pick()], HALF, HALF, axis=0, num_outputs=2)

    def concat(self) -> None:
        if self.values[HALF]:
            self.add("Concat", [self.pick(HALF), self.pick(HALF)], FULL, axis=0)

    def pool(self) -> None:
        if self.values[IMAGE]:
            indices = "index" if self.random.random() < 0.6 else None
            self.add(
                "MaxPool", [self.pick(IMAGE)], IMAGE, indices, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[1, 1]
            )

    def unpool(self) -> None:
        if self.values["index"] and self.random.random() < 0.5:
            cast = self.add("Cast", [self.pick("index")], IMAGE, to=FLOAT)[0]
            self.add("Reshape", [cast, "plane"], FULL)
        elif self.values[IMAGE]:
            self.add("Reshape", [self.pick(IMAGE), "plane"], FULL)

    def choose(self) -> None:
        number, pair = len(self.nodes), [self.pick(), self.pick()]
        out = [helper.make_tensor_value_info(f"b{number}", FLOAT, FULL)]
        branches = [
            helper.make_graph([make(kind, pair, [f"b{number}"], name=f"n{number}.{kind}")], kind, [], out)
            for kind in ("Add", "Sub")
        ]
        self.add("If", ["cond"], FULL, then_branch=branches[0], else_branch=branches[1])

    def dropout(self) -> None:
        mask = "mask" if self.random.random() < 0.6 else None
        self.add("Dropout", [self.pick(), "ratio", "train"], FULL, mask, seed=self.random.randrange(1, 99))

    def unmask(self) -> None:
        if self.values["mask"]:
            self.add("Cast", [self.pick("mask")], FULL, to=FLOAT)

    def model(self) -> onnx.ModelProto:
        self.nodes.append(make("ReduceMean", [self.values[FULL][-1]], ["loss"], name="loss", keepdims=0))
        read = {name for node in self.nodes for name in node.input}
        read |= {n for node in self.nodes for a in node.attribute for inner in a.g.node for n in inner.input}
        outputs: dict[str, list[int]] = {"loss": []}
        outputs |= {n: list(s) for n, s in self.shapes.items() if n not in read and n not in ("x", "t")}
        inputs = {"x": list(FULL), "t": list(FULL), "cond": (BOOL, [])}
        constants = {
            "tenth": np.float32(0.1), "ratio": np.float32(0.3), "train": np.bool_(True),
            "image": np.array(IMAGE), "plane": np.array(FULL),
        }  # fmt: skip
        return model_of(self.nodes, inputs, outputs, constants)


def topological(problem: Problem, generator: random.Random) -> list[int]:
    """A random order of the ops."""
    made_by = problem.producer()
    waiting = {op: {int(made_by[v]) for v in problem.inputs(op) if made_by[v] >= 0} for op in range(problem.n_ops)}
    order: list[int] = []
    while waiting:
        ready = sorted(op for op, needs in waiting.items() if needs <= set(order))
        order.append(generator.choice(ready))
        del waiting[order[-1]]
    return order


def random_schedule(problem: Problem, seed: int, share: float) -> Schedule:
    """A random order with recomputes put in at random, as many as `share` of the ops, whether they help or not."""
    generator = random.Random(seed)
    order = list(range(problem.n_ops)) if generator.random() < 0.3 else topological(problem, generator)
    able = [op for op in range(problem.n_ops) if problem.recomputable[op]]
    idle_views = IdleViews(problem)
    for _ in range(round(share * problem.n_ops) if able else 0):
        op = generator.choice(able)
        place = generator.randint(order.index(op) + 1, len(order))
        longer = [*order[:place], op, *order[place:]]
        if not idle_views(longer):
            order = longer
    schedule = Schedule(tuple(order))
    check_schedule(problem, schedule)
    return schedule


class IdleViews:
    """Would some occurrence of a view be read by nobody? No selector plans that."""

    def __init__(self, problem: Problem) -> None:
        self.reads = [problem.inputs(op) for op in range(problem.n_ops)]
        self.makes = [problem.outputs(op) for op in range(problem.n_ops)]
        views = problem.out_values[problem.alias_slot >= 0]
        self.views = {int(v): bool(problem.is_output[v]) for v in views}

    def __call__(self, order: list[int]) -> bool:
        idle: dict[int, bool] = {}  # by view: is its latest occurrence unread so far?
        for op in order:
            for value in self.reads[op]:
                if value in self.views:
                    idle[value] = False
            for value in self.makes[op]:
                if value in self.views:
                    if idle.get(value):
                        return True
                    idle[value] = value in idle or not self.views[value]  # the first is what an output reads
        return any(idle.values())


@dataclass(frozen=True)
class Written:
    """A schedule and the file it became."""

    compiled: Compiled
    schedule: Schedule
    limit: int
    result: Rewritten

    @property
    def model(self) -> onnx.ModelProto:
        return self.result.model

    def step_names(self) -> list[str]:
        """Names of the nodes that the steps became, in the order of the schedule; a draw has its product's."""
        counts: dict[int, int] = {}
        out = []
        for op in self.schedule.order:
            number = counts[op] = counts.get(op, -1) + 1
            name = self.compiled.graph.ops[op].node.name
            out.append(f"{name}__remat{number}" if number else name)
        return out

    def heavy(self) -> list[str]:
        """Names of the steps whose place in the order is promised."""
        problem, ops = self.compiled.problem, self.compiled.graph.ops
        heavy = heavy_steps(problem, self.schedule, light_limit(problem, self.schedule, self.limit))
        moved = [_is_absorbed(self.compiled, ops[op]) for op in self.schedule.order]
        names = zip(self.step_names(), heavy, moved, strict=True)
        return list(dict.fromkeys(name for name, is_heavy, has_moved in names if is_heavy and not has_moved))


def write(model: onnx.ModelProto, schedule: Schedule | None = None, **more: object) -> Written:
    compiled = prepare(model, STATED)
    if schedule is None:
        schedule = random_schedule(compiled.problem, **more)  # type: ignore[arg-type]
    alone = replace(compiled.problem, poolable=np.zeros(compiled.problem.n_values, np.bool_))
    limit = simulate(alone, schedule).peak
    schedule = settle(compiled, alone, schedule, limit)
    metadata = {f"{TAG}version": "test", f"{TAG}budget_bytes": str(limit)}
    result = realize(compiled, schedule, limit, metadata)
    return Written(compiled, schedule, limit, result)


def traced(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> tuple[list[np.ndarray], list[str]]:
    """Outputs of a model on stock ONNX Runtime and the order its nodes ran in, optimisations off."""
    with tempfile.TemporaryDirectory() as folder:
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        outputs = session.run(None, feeds)
        return outputs, list(processes._executed(Path(session.end_profiling())))


def only(executed: Iterable[str], wanted: list[str]) -> list[str]:
    known = set(wanted)
    return [name for name in executed if name in known]


def properties(node: onnx.NodeProto) -> dict[str, str]:
    return {p.key: p.value for p in node.metadata_props}


bounded = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
seeds = st.integers(0, 2**32 - 1)


@bounded
@given(seed=seeds, layers=st.integers(3, 40), share=st.sampled_from([0.0, 0.2, 0.6, 1.2]), cond=st.booleans())
def test_any_schedule_computes_the_same_in_that_order(seed, layers, share, cond):
    model = Builder(seed, layers).model()
    onnx.checker.check_model(model, full_check=True)
    written = write(model, seed=seed, share=share)
    onnx.checker.check_model(written.model, full_check=True)
    feeds = feeds_for(model) | {"cond": np.array(cond)}
    outputs, executed = traced(written.model, feeds)
    assert same_bits(run_model(model, feeds), outputs)
    assert only(executed, written.heavy()) == written.heavy()
    emulated = as_executed(written.model, None, "disable", STATED)
    labels = [emulated.compiled.graph.ops[i].label for i in emulated.order.order]
    assert only(executed, labels) == labels


@bounded
@given(seed=seeds, layers=st.integers(3, 40), share=st.sampled_from([0.0, 0.2, 0.6, 1.2]))
def test_any_schedule_keeps_its_peak(seed, layers, share):
    """As executed, the file holds no more than the schedule does, buffers shared at will or not at all."""
    model = Builder(seed, layers).model()
    written = write(model, seed=seed, share=share)
    unrolled = unroll(written.compiled.problem, written.schedule)
    shared = simulate(unrolled.problem, range(unrolled.problem.n_ops)).peak
    assert shared == simulate(written.compiled.problem, written.schedule).peak
    executed = as_executed(written.model, None, "disable", STATED).timeline.peak
    assert executed <= max(shared, written.limit) * 1.01 + 48 * written.result.nodes_added


@bounded
@given(seed=seeds, layers=st.integers(3, 40), share=st.sampled_from([0.0, 0.3, 1.0]))
def test_what_is_written_is_tidy(seed, layers, share):
    """Unique names, a type for every new value, notes on every clone, and everything else as it was."""
    model = Builder(seed, layers).model()
    model.metadata_props.add(key="author", value="me")
    written = write(model, seed=seed, share=share)
    graph, schedule, compiled = written.model.graph, written.schedule, written.compiled
    assert len({n.name for n in graph.node}) == len(graph.node)
    made = [name for node in graph.node for name in node.output if name]
    assert len(set(made)) == len(made)
    assert graph.input == model.graph.input and graph.output == model.graph.output
    typed = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.output)}
    assert len(graph.value_info) == len({v.name for v in graph.value_info})
    stored = {p.key: p.value for p in written.model.metadata_props}
    left_open = json.loads(stored.pop(SHAPES_KEY))
    assert set(written.result.occurrences) <= set(typed) | set(left_open)
    assert set(typed).isdisjoint(left_open)
    unrolled = unroll(compiled.problem, schedule)
    known = list(compiled.graph.values)
    for name, source in zip(written.result.occurrences, unrolled.source, strict=True):
        tensor = compiled.tensors[known[source]]
        if name in left_open:
            assert left_open[name] == [tensor.dtype, *tensor.shape]
            continue
        assert typed[name].elem_type == tensor.dtype
        dims = [d.dim_value or int(d.dim_param.rpartition("=")[2]) for d in typed[name].shape.dim]
        assert tuple(dims) == tensor.shape
        assert all(d.dim_param.startswith(TAG) for d in typed[name].shape.dim if d.dim_param)

    nodes = {node.name: node for node in graph.node}
    originals = {node.name: node for node in model.graph.node}
    steps = written.step_names()
    inside = list(dict.fromkeys(steps))
    assert [n.name for n in graph.node if n.name in set(steps)] == inside  # the file lists them in that order
    products = 0
    for name, op in zip(steps, schedule.order, strict=True):
        label = compiled.graph.ops[op].node.name
        notes = properties(nodes[name])
        assert notes == ({} if name == label else {RECOMPUTE_KEY: label})
        if name != label and originals[label].op_type == "Dropout":  # spelled out
            assert nodes[name].op_type == "Div"
            products += 1
            continue
        assert nodes[name].op_type == originals[label].op_type
        assert nodes[name].attribute == originals[label].attribute or originals[label].op_type == "If"
    recomputed = [n for n in graph.node if RECOMPUTE_KEY in properties(n)]
    clones = [n for n in recomputed if n.name in set(steps)]
    spelled = [n.op_type for n in recomputed if n.name not in set(steps)]
    assert spelled == ["Cast", "Mul"] * products
    assert len(clones) == len(inside) - len(model.graph.node) == len(written.result.recomputed)
    assert not {n.op_type for n in clones} & {"Dropout", "If"}
    helpers = [n for n in graph.node if n.name not in set(steps) and RECOMPUTE_KEY not in properties(n)]
    assert {n.op_type for n in helpers} <= {"Size", "Mul", "Shape", "Unsqueeze"}
    assert all(properties(n).get(CONTROL_KEY, made[0]) in made for n in helpers)
    assert len(recomputed) + len(helpers) == written.result.nodes_added
    assert json.loads(stored.pop(f"{TAG}recomputed")) == [next(filter(None, n.output)) for n in clones]
    assert {n.output[0] for n in helpers}.issuperset(json.loads(stored.pop(f"{TAG}control_edges")))
    assert stored == {"author": "me", f"{TAG}version": "test", f"{TAG}budget_bytes": str(written.limit)}


def recomputing(model: onnx.ModelProto, *labels: str) -> Written:
    """The file that runs the named ops a second time, in that order, right behind the last op of the forward pass."""
    compiled = prepare(model, STATED)
    number = {op.label: op.index for op in compiled.graph.ops}
    order = list(range(compiled.problem.n_ops))
    place = number["mean"] + 1
    return write(model, Schedule((*order[:place], *(number[label] for label in labels), *order[place:])))


def test_names_that_are_taken_are_avoided():
    """The model has values and nodes called just as the clones and control edges would be."""
    model = mlp(layers=3, batch=64, width=16)
    plain = recomputing(model, "mm0", "act0", "mm1", "act1")
    new = {n.name for n in plain.model.graph.node} - {n.name for n in model.graph.node}
    taken = {"z0__remat1", "a0__remat1", "mm0__remat1", "onnx_remat.no_axes", *new}
    for name in sorted(taken):
        if name != "mm0__remat1":
            model.graph.node.append(make("Identity", ["x"], [name], name=f"make {name}"))
            model.graph.output.append(helper.make_tensor_value_info(name, FLOAT, [64, 16]))
    model.graph.node.append(make("Neg", ["x"], ["neg"], name="mm0__remat1"))
    model.graph.output.append(helper.make_tensor_value_info("neg", FLOAT, [64, 16]))
    written = recomputing(model, "mm0", "act0", "mm1", "act1")
    onnx.checker.check_model(written.model, full_check=True)
    assert "z0__remat1_2" in written.result.occurrences
    assert len({n.name for n in written.model.graph.node}) == len(written.model.graph.node)
    feeds = feeds_for(model)
    assert same_bits(run_model(model, feeds), run_model(written.model, feeds))


def test_readers_read_the_latest_occurrence():
    written = recomputing(mlp(layers=3, batch=64, width=16), "mm0", "act0", "mm0", "act0")
    nodes = {n.name: n for n in written.model.graph.node}
    assert nodes["mm1"].input[0] == "a0"  # before the recompute
    held = {n.output[0]: n.input[0] for n in nodes.values() if n.op_type == "Unsqueeze"}
    assert {held.get(name, name) for name in nodes["aa0"].input} == {"a0__remat2"}  # after it
    assert held.get(nodes["act0__remat2"].input[0], nodes["act0__remat2"].input[0]) == "z0__remat2"
    assert written.result.recomputed == ("mm0", "act0", "mm0", "act0")


def test_labels_of_recomputes_say_backward():
    model = mlp(layers=2, batch=64, width=16)
    for node in model.graph.node:
        node.metadata_props.add(key="phase", value="forward" if node.name.startswith(("mm", "act")) else "backward")
        node.metadata_props.add(key="origin", value=node.name)
    nodes = {n.name: properties(n) for n in recomputing(model, "mm0", "act0").model.graph.node}
    assert nodes["act0"] == {"phase": "forward", "origin": "act0"}
    assert nodes["act0__remat1"] == {"phase": "backward", "origin": "act0", RECOMPUTE_KEY: "act0"}


def test_a_recompute_makes_all_that_its_original_makes():
    """A second MaxPool without its indices would be another kernel. Where nobody reads them, they are freed at once."""
    pool = make("MaxPool", ["h"], ["p", "i"], name="pool", kernel_shape=[3, 3], pads=[1, 1, 1, 1])
    nodes = [
        make("Tanh", ["x"], ["h"], name="tanh"),
        pool,
        make("Cast", ["i"], ["early"], name="early", to=FLOAT),
        make("ReduceMean", ["p"], ["loss"], name="mean", keepdims=0),
        make("Mul", ["p", "x"], ["late"], name="late"),
        make("Exp", ["late"], ["later"], name="later"),
    ]
    shape = [1, 1, 64, 64]
    model = model_of(nodes, {"x": shape}, {"loss": [], "early": shape, "later": shape})
    written = recomputing(model, "pool")
    again = next(n for n in written.model.graph.node if n.name == "pool__remat1")
    assert list(again.output) == ["p__remat1", "i__remat1"]
    assert [n.op_type for n in written.model.graph.node if "i__remat1" in n.input] == ["Unsqueeze"]
    executed = as_executed(written.model, None, "disable", STATED)
    order = [executed.compiled.graph.ops[op] for op in executed.order.order]
    place = next(i for i, op in enumerate(order) if op.label == "pool__remat1")
    assert order[place + 1].inputs[0] == "i__remat1"
    reordered = write(model, Schedule((0, 1, 1, 2, 3, 4, 5)))
    again = next(n for n in reordered.model.graph.node if n.name == "pool__remat1")
    assert list(again.output) == ["p__remat1", "i__remat1"]
    feeds = feeds_for(model)
    for some in (written, reordered):
        onnx.checker.check_model(some.model, full_check=True)
        assert same_bits(run_model(model, feeds), run_model(some.model, feeds))


@pytest.mark.parametrize("opset", [15, 17, 20])
def test_a_recomputed_batch_normalization_updates_its_statistics_once(opset):
    """Its kernel writes the running statistics where they lie, in the caller's arrays even: a recompute gets copies."""
    nodes = [
        make("Tanh", ["x"], ["h"], name="tanh"),
        make("BatchNormalization", ["h", "s", "b", "m", "v"], ["y", "new.m", "new.v"], name="norm", training_mode=1),
        make("ReduceMean", ["y"], ["loss"], name="mean", keepdims=0),
        make("Mul", ["y", "x"], ["late"], name="late"),
    ]
    shape = [2, 4, 16, 16]
    channels = {name: [4] for name in "sbmv"}
    outputs = {"loss": [], "late": shape, "new.m": [4], "new.v": [4]}
    model = model_of(nodes, {"x": shape, **channels}, outputs, opset=opset)
    written = recomputing(model, "norm")
    again = next(n for n in written.model.graph.node if n.name == "norm__remat1")
    assert len(again.output) == 3
    feeds = feeds_for(model)
    before = {name: array.copy() for name, array in feeds.items()}
    expected = run_model(model, feeds)
    for level in ("disable", "basic", "all"):
        assert same_bits(expected, run_model(written.model, feeds, level))
    assert same_bits(before.values(), feeds.values())


def test_a_batch_normalization_is_never_recomputed_where_its_statistics_are_read():
    """They lie where the old ones lay: a second run would update them twice."""
    nodes = [
        make("BatchNormalization", ["x", "s", "b", "m", "v"], ["y", "m1", "v1"], name="norm", training_mode=1),
        make("ReduceMean", ["y"], ["loss"], name="mean", keepdims=0),
        make("Neg", ["m1"], ["m2"], name="reader"),
    ]
    channels = {name: [4] for name in "sbmv"}
    model = model_of(nodes, {"x": [2, 4, 8, 8], **channels}, {"loss": [], "m2": [4]}, opset=17)
    assert prepare(model, STATED).table.recomputable == (False, True, True)


def test_a_recomputed_max_pool_does_to_nan_and_zeros_what_its_original_does():
    """ONNX Runtime's kernel without Indices takes NaN and the signs of zeros another way."""
    nodes = [
        make("Identity", ["x"], ["h"], name="same"),
        make("MaxPool", ["h"], ["p", "i"], name="pool", kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        make("Cast", ["i"], ["early"], name="early", to=FLOAT),
        make("ReduceMean", ["p"], ["loss"], name="mean", keepdims=0),
        make("Neg", ["p"], ["late"], name="late"),
    ]
    shape = [2, 2, 32, 32]
    model = model_of(nodes, {"x": shape}, {"loss": [], "early": shape, "late": shape})
    written = recomputing(model, "pool")
    values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 1e-45], np.float32)
    feeds = {"x": np.random.default_rng(0).choice(values, shape)}
    for level in ("disable", "basic", "all"):
        assert same_bits(run_model(model, feeds, level), run_model(written.model, feeds, level))


def test_bodies_read_the_latest_occurrence_of_what_they_capture():
    """Also bodies within bodies; what a body defines itself keeps its name."""

    def branch(nodes, output):
        return helper.make_graph(nodes, "b", [], [helper.make_tensor_value_info(output, FLOAT, [8, 8])])

    deeper = make(
        "If", ["cond"], ["d"], name="deeper",
        then_branch=branch([make("Exp", ["h"], ["a0"])], "a0"), else_branch=branch([make("Neg", ["x"], ["b0"])], "b0"),
    )  # fmt: skip
    nodes = [
        make("Tanh", ["x"], ["h"], name="tanh"),
        make("ReduceMean", ["h"], ["loss"], name="mean", keepdims=0),
        make(
            "If", ["cond"], ["y"], name="choose",
            then_branch=branch([deeper, make("Mul", ["d", "h"], ["c0"])], "c0"),
            else_branch=branch([make("Sin", ["h"], ["e0"])], "e0"),
        ),
    ]  # fmt: skip
    model = model_of(nodes, {"x": [8, 8], "cond": (BOOL, [])}, {"loss": [], "y": [8, 8]})
    written = recomputing(model, "tanh")
    text = str(next(n for n in written.model.graph.node if n.name == "choose"))
    assert text.count('"h__remat1"') == 3 and '"h"' not in text
    assert '"h"' in str(model.graph.node[2])  # the caller's model is left alone
    for cond in (True, False):
        feeds = feeds_for(model) | {"cond": np.array(cond)}
        assert same_bits(run_model(model, feeds), run_model(written.model, feeds))


def test_metadata_of_an_earlier_rewrite_is_replaced():
    model = mlp(layers=2, batch=64, width=16)
    model.metadata_props.add(key=f"{TAG}version", value="0.0")
    model.metadata_props.add(key=f"{TAG}other", value="stale")
    stored = {p.key: p.value for p in recomputing(model, "act0").model.metadata_props}
    assert stored[f"{TAG}version"] == "test" and f"{TAG}other" not in stored


def test_old_opsets_are_refused():
    nodes = [
        make("Tanh", ["x"], ["a"], name="one"),
        make("Tanh", ["x"], ["b"], name="two"),
        make("Mul", ["a", "b"], ["c"], name="mul"),
        make("ReduceSum", ["c"], ["loss"], name="mean", keepdims=0),
    ]
    model = model_of(nodes, {"x": [64, 64]}, {"loss": []}, opset=12, ir_version=7)
    with pytest.raises(ModelError, match="opset 12; pinning an order needs 13 or later"):
        write(model, Schedule((1, 0, 2, 3)))


@pytest.fixture(scope="module")
def with_everything_random() -> onnx.ModelProto:
    """An MLP whose activations pass through Dropout, noise and an If, each large and read again by backward."""
    model = mlp(layers=4, batch=64, width=16, seed_dropout=3)
    shape = [64, 16]
    for i in range(3):
        out = [helper.make_tensor_value_info(f"o{i}", FLOAT, shape)]
        branches = [helper.make_graph([make(op, [f"d{i}"], [f"o{i}"])], op, [], out) for op in ("Neg", "Identity")]
        for node in model.graph.node:
            if node.name == f"mm{i + 1}":
                node.input[0] = f"r{i}"
        place = next(k for k, node in enumerate(model.graph.node) if node.name == f"mm{i + 1}")
        for node in reversed([
            make("RandomNormal", [], [f"rand{i}"], name=f"rand{i}", shape=shape, seed=1.0),
            make("If", ["cond"], [f"if{i}"], name=f"if{i}", then_branch=branches[0], else_branch=branches[1]),
            make("Add", [f"if{i}", f"rand{i}"], [f"r{i}"], name=f"noise{i}"),
        ]):  # fmt: skip
            model.graph.node.insert(place, node)
        model.graph.node.append(make("Mul", [f"if{i}", f"rand{i}"], [f"late{i}"], name=f"late{i}"))
        model.graph.output.append(helper.make_tensor_value_info(f"late{i}", FLOAT, shape))
    model.graph.input.append(helper.make_tensor_value_info("cond", BOOL, []))
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.mark.parametrize("selector", names())
def test_random_ops_and_bodies_are_never_cloned(selector, with_everything_random):
    compiled = prepare(with_everything_random, STATED)
    problem = replace(compiled.problem, poolable=np.zeros(compiled.problem.n_values, np.bool_))
    before = simulate(problem, compiled.default_order()).peak
    anchors = tuple(op.index for op in compiled.graph.ops if op.node.op_type == "MatMul")
    kept = tuple(compiled.problem.outputs(op)[0] for op in anchors)
    kinds = set()
    for budget in (0, int(before * 0.8)):
        request = Request(
            problem, budget, compiled.default_order(), effort=1.0, work=1000, checkpoints=kept, anchors=anchors
        )
        schedule = get(selector)(request)
        check_schedule(problem, schedule)
        written = write(with_everything_random, schedule)
        kinds |= {n.op_type for n in written.model.graph.node if RECOMPUTE_KEY in properties(n)}
        feeds = feeds_for(with_everything_random) | {"cond": np.array(True)}
        assert same_bits(run_model(with_everything_random, feeds), run_model(written.model, feeds))
    assert not kinds & {"Dropout", "RandomNormal", "If"}
    assert kinds or selector in ("keep_all", "collection", "speed")  # a list of results to keep need not help


def test_an_input_with_a_default_counts_twice():
    """The session holds the default, and the caller what is fed instead."""
    model = model_of(
        [make("Mul", ["x", "w"], ["y"], name="mul"), make("ReduceMean", ["y"], ["loss"], name="mean", keepdims=0)],
        {"x": [64, 64], "w": [64, 64]}, {"loss": []},
    )  # fmt: skip
    before = prepare(model, STATED).problem.base_bytes
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((64, 64), np.float32), "w"))
    assert prepare(model, STATED).problem.base_bytes == before + 64 * 64 * 4
    model.ir_version = 3  # every initializer had to be an input then, and no caller could feed it
    assert prepare(model, STATED).problem.base_bytes == before


@pytest.mark.parametrize("between", few(["", "Identity", "Cast"], ["Identity"]))
def test_a_dropout_that_onnx_runtime_keeps_for_its_place_stays(between):
    """It takes out those whose masks nobody reads, in training too, but for those that read graph inputs.

    It looks for them after it has taken out what changes nothing.
    """
    model = mlp(layers=6, batch=512, width=64)
    constants = {"ratio": np.float32(0.5), "train": np.bool_(True)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, name) for name, a in constants.items())
    if between:
        model.graph.node.append(make(between, ["x"], ["same"], **({"to": FLOAT} if between == "Cast" else {})))
    model.graph.node.extend([
        make("Dropout", ["same" if between else "x", "ratio", "train"], ["dropped"], name="drop", seed=3),
        make("Sub", ["dropped", "t"], ["apart"], name="apart"),
        make("ReduceSum", ["apart"], ["sum"], name="sum", keepdims=0),
    ])  # fmt: skip
    model.graph.output.append(helper.make_tensor_value_info("sum", FLOAT, []))
    result = rewrite_model(model, "75%", run_by="session", effort=0.5)
    assert result.recomputed
    feeds = feeds_for(model)
    for level in ("disable", "basic"):
        assert same_bits(run_model(model, feeds, level), run_model(result.model, feeds, level))


@pytest.mark.parametrize("copies", ["Identity", "Dropout"])
@pytest.mark.parametrize("kind, opset", [("int8", 21), ("int8", 23), ("int8", 20), ("uint8", 21), ("int16", 21)])
def test_quantized_steps_load_at_every_level(kind, opset, copies):
    """From opset 21 on ONNX Runtime cannot load an Unsqueeze behind a DequantizeLinear of int8, nor behind a copy."""
    lines, x = [], "x"
    for i in range(6):
        lines.append(f"q{i} = QuantizeLinear({x}, s, z)  e{i} = DequantizeLinear(q{i}, s, z)")
        lines.append(f"d{i} = {copies}(e{i})  t{i} = Tanh(d{i})")
        x = f"t{i}"
    for i in reversed(range(6)):
        lines.append(f"p{i} = Mul({x}, d{i})  g{i} = Exp(p{i})")
        x = f"g{i}"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}]> g (float[64,64] x) => (float loss) '
        f"<float s = {{0.05}}, {kind} z = {{3}}> {{ {' '.join(lines)}  loss = ReduceMean<keepdims = 0>({x}) }}"
    )
    feeds, edges = feeds_for(model), 0
    for seed, share in enumerate((0.0, 0.0, 0.5, 0.9)):
        written = write(model, seed=seed, share=share)
        edges += written.result.control_edges
        assert same_bits(run_model(model, feeds), run_model(written.model, feeds))
        for level in ("basic", "all"):
            (before,), (after,) = (run_model(each, feeds, level) for each in (model, written.model))
            assert np.allclose(before, after, rtol=1e-3)
    assert edges


def noisy(layers: int = 6) -> onnx.ModelProto:
    """A step without inputs, which draws its data itself."""
    shape = [256, 64]
    nodes = [helper.make_node("RandomNormal", [], ["h0"], shape=shape, seed=1.0)]
    nodes += [helper.make_node("Tanh", [f"h{i}"], [f"h{i + 1}"]) for i in range(layers)]
    for i in reversed(range(layers)):
        read = f"g{i + 1}" if i < layers - 1 else f"h{layers}"
        nodes.append(helper.make_node("Mul", [read, f"h{i + 1}"], [f"g{i}"]))
    nodes.append(helper.make_node("ReduceMean", ["g0"], ["loss"], keepdims=0))
    return model_of(nodes, {}, {"loss": []})


def test_a_step_without_inputs_is_refused_in_a_line():
    with pytest.raises(ModelError, match="the model has no input, from whose size an order is pinned"):
        rewrite_model(noisy(), "60%", run_by="session", effort=0.3)


def in_old_form(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same step in IR version 3, in which every initializer is an input, too."""
    old = onnx.ModelProto()
    old.CopyFrom(model)
    old.ir_version = 3
    old.graph.input.extend(helper.make_tensor_value_info(w.name, w.data_type, w.dims) for w in old.graph.initializer)
    return old


@pytest.mark.parametrize("run_by", few(["session", "loop"], ["session"]))
def test_a_step_in_the_oldest_ir_version_is_rewritten(run_by):
    model = in_old_form(mlp(layers=6, batch=4096, width=32))
    made = rewrite_model(model, "80%", run_by=run_by, effort=0.3)
    assert made.report.recomputed
    onnx.checker.check_model(made.model)
    feeds = feeds_for(model)
    assert same_bits(run_model(model, feeds), run_model(made.model, feeds))


def in_bfloat16(layers: int = 6) -> onnx.ModelProto:
    """A step all of whose inputs are of a type of which ONNX Runtime's CPU kernels know no size."""
    kind = (TensorProto.BFLOAT16, [256, 64])
    nodes = [helper.make_node("Cast", ["x"], ["h0"], to=FLOAT)]
    nodes += [helper.make_node("Tanh", [f"h{i}"], [f"h{i + 1}"]) for i in range(layers)]
    for i in reversed(range(layers)):
        read = f"g{i + 1}" if i < layers - 1 else f"h{layers}"
        nodes.append(helper.make_node("Mul", [read, f"h{i + 1}"], [f"g{i}"]))
    nodes.append(helper.make_node("ReduceMean", ["g0"], ["loss"], keepdims=0))
    return model_of(nodes, {"x": kind}, {"loss": []})


def test_a_step_whose_inputs_are_all_of_bfloat16_is_rewritten():
    made = rewrite_model(in_bfloat16(), "70%", run_by="session", effort=0.3)
    assert made.report.recomputed and made.report.control_edges
    (size,) = (node for node in made.model.graph.node if node.op_type == "Size")
    (cast,) = (node for node in made.model.graph.node if node.output[0] == size.input[0])
    assert (cast.op_type, list(cast.input)) == ("Cast", ["x"])
