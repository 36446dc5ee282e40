"""Values that are moved to the host and back: plans that may, the files they become, and who moves when."""

from __future__ import annotations

import json
from collections import Counter

import onnx
import pytest
from onnx import TensorProto, helper

from onnx_remat import rewrite_model
from onnx_remat.errors import BudgetInfeasibleError, UsageError
from onnx_remat.findings.check import check
from onnx_remat.findings.estimate import estimate
from onnx_remat.findings.explain import explain
from onnx_remat.ir.metadata import MOVES_KEY, entries
from onnx_remat.measure import verify
from onnx_remat.memory.buffers import simulate
from onnx_remat.memory.problem import Schedule, check_schedule
from onnx_remat.options import parse_options
from onnx_remat.ort import moves
from onnx_remat.ort.host_state import counted
from onnx_remat.ort.kernels.registry import kernels_of
from onnx_remat.ort.prepare import Compiled, Preparation, prepare
from onnx_remat.plan.request import Deadline
from onnx_remat.rewrite import offload, pipeline
from onnx_remat.rewrite.accounting import Goal, LoopMemory
from onnx_remat.rewrite.first_use import FirstUse
from onnx_remat.rewrite.offload import fit_with_moves
from onnx_remat.rewrite.original import begin
from onnx_remat.rewrite.pipeline import plan_model
from onnx_remat.rewrite.plans import as_it_is
from onnx_remat.session import lean_graph
from onnx_remat.session.copies import Stated
from onnx_remat.session.lean_graph import LeanNode
from onnx_remat.units import Budget, format_bytes
from onnx_remat.write.realize import realize
from tests.support.graphs import mlp, model_of

make = helper.make_node
LINK = moves.Link(1e12)
DEVICE = {"provider": "cuda", "run_by": "loop", "effort": 0.5}
FAST = "100TB"  # a second: moves take no time but that to start them


def net(layers: int = 12) -> onnx.ModelProto:
    return mlp(layers=layers, batch=4096, width=64)


def prepared(model: onnx.ModelProto, names: list[str] | None = None) -> Compiled:
    compiled = prepare(model, Preparation(kernels_of("cuda")))
    return compiled if names is None else moves.split(compiled, names, LINK)


@pytest.fixture(scope="module")
def moved():
    """A step rewritten to half of what it takes, with moves that cost next to nothing, and without."""
    model = mlp(layers=12, batch=4096, width=128)
    free = rewrite_model(model, "50%", offload=True, host_bandwidth=FAST, costs="t4", **DEVICE)
    return model, free, rewrite_model(model, "50%", costs="t4", **DEVICE)


def test_what_is_cheaper_to_move_is_moved(moved):
    _, free, plain = moved
    report = free.report
    assert report.loop_after.total <= report.budget
    assert report.extra_compute < plain.report.extra_compute
    assert plain.report.moved is None and report.moved is not None
    assert report.moved.share <= report.extra_compute
    nodes = Counter(node.op_type for node in free.model.graph.node)
    assert nodes[moves.DOWN] == nodes[moves.UP] == len(report.moved.values) > 0
    listed = {p.key: p.value for p in free.model.metadata_props}
    assert len(json.loads(listed[MOVES_KEY])) == len(report.moved.values)
    assert report.helpers() >= 0 and "to wait for" in report.verdict() and "the host keeps at most" in report.to_text()


def test_what_the_host_keeps_and_what_crosses_add_up(moved):
    _, free, _ = moved
    assert free.report.moved.nbytes == len(free.report.moved.values) * 4 * 4096 * 128
    assert 0 < free.report.loop_after.on_host <= free.report.moved.nbytes


def test_a_file_with_moves_is_planned_with_them_on_the_host(moved):
    """Its values lay on the device throughout, as its plan had it: what was moved was recomputed besides."""
    original = begin(moved[1].model, {**DEVICE, "costs": "t4"})
    peak = as_it_is(Goal(original.taken, original.memory)).timeline.peak
    assert peak < 1.3 * original.footprint.total


def test_a_file_that_is_written_again_states_what_is_on_the_host_and_its_shape():
    """An empty one, as of a value without bytes, would let its copies copy nothing."""
    nodes = [make("Exp", ["x"], ["e"]), make(moves.DOWN, ["e"], ["home"]), make(moves.UP, ["home"], ["back"])]
    stated = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8]) for name in ("e", "home", "back")]
    model = model_of([*nodes, make("Neg", ["back"], ["y"])], {"x": [8]}, {"y": [8]}, value_info=stated)
    compiled = counted(prepared(model))
    written = realize(compiled, Schedule((0, 1, 2, 3)), 1 << 20, {}).model
    shapes = {v.name: [dim.dim_value for dim in v.type.tensor_type.shape.dim] for v in written.graph.value_info}
    assert shapes == {"e": [8], "home": [8], "back": [8]}
    assert json.loads(entries(written)[MOVES_KEY]) == ["back"]


def test_copies_for_a_convolution_on_the_host_are_no_moves():
    nodes = [
        make(moves.DOWN, ["x"], ["down"]), make("ConvTranspose", ["down", "k"], ["up"], pads=[0, 0, 1, 1]),
        make(moves.UP, ["up"], ["there"]), make("Exp", ["there"], ["y"]),
    ]  # fmt: skip
    model = model_of(nodes, {"x": [1, 2, 4, 4], "k": [2, 2, 2, 2]}, {"y": [1, 2, 4, 4]})
    assert begin(model, {**DEVICE, "costs": "t4"}).taken > 0


def test_copies_are_planned_where_a_device_runs_some():
    """What a file says of copies is no copy, and on the CPU a copy changes nothing."""
    with_copies = [make(moves.DOWN, ["x"], ["home"]), make(moves.UP, ["home"], ["e"])]
    plans = []
    for nodes, provider in ((with_copies, "cuda"), (with_copies, "cpu"), ([make("Exp", ["x"], ["e"])], "cuda")):
        model = model_of([*nodes, make("Neg", ["e"], ["y"])], {"x": [8]}, {"y": [8]})
        Stated(1e9, "t4", 1).put(model)
        plans.append(begin(model, {**DEVICE, "provider": provider}).memory.may_copy)
    assert plans == [True, False, False]


@pytest.mark.parametrize(("given", "costs"), [({}, "l4"), ({"costs": "t4"}, "t4")])
def test_kernels_beside_copies_are_timed_by_the_device_that_a_file_names(given, costs):
    nodes = [make(moves.DOWN, ["x"], ["home"]), make(moves.UP, ["home"], ["e"]), make("Neg", ["e"], ["y"])]
    model = model_of(nodes, {"x": [8]}, {"y": [8]})
    Stated(1e9, "l4", 1).put(model)
    assert LoopMemory.stated(prepared(model), parse_options({**DEVICE, **given})) == Stated(1e9, costs, 1)


@pytest.mark.slow
def test_outputs_are_equal_to_the_last_bit_on_the_cpu(moved, tmp_path):
    """Copies between device and host change nothing, and on the CPU nothing happens."""
    model, free, _ = moved
    onnx.save(model, tmp_path / "before.onnx")
    free.save(tmp_path / "after.onnx")
    assert verify.bitwise(tmp_path / "before.onnx", tmp_path / "after.onnx").startswith("bitwise equal")


@pytest.mark.slow
def test_the_same_call_writes_the_same_file(moved):
    model, free, _ = moved
    again = rewrite_model(model, "50%", offload=True, host_bandwidth=FAST, costs="t4", **DEVICE)
    assert again.model.SerializeToString() == free.model.SerializeToString()


@pytest.mark.slow
def test_a_slow_link_is_not_used_where_recompute_does_it(moved):
    model, _, plain = moved
    result = rewrite_model(model, "50%", offload=True, host_bandwidth="1MB", costs="t4", **DEVICE)
    assert result.report.moved is None
    # Where values may move, what a kernel computes again has its price: the search finds another plan.
    assert result.report.extra_compute <= 1.25 * plain.report.extra_compute


@pytest.mark.slow
def test_a_plan_leaves_room_for_its_copies():
    """The first one takes the whole budget: its kernels waited for a quarter of the copies' time."""
    model = mlp(layers=12, batch=4096, width=512)
    report = rewrite_model(model, "50%", offload=True, host_bandwidth="25GB", costs="t4", **DEVICE).report
    assert report.moved.covered > 0.97 and report.extra_compute < 0.005
    assert report.loop_after.total <= report.budget


@pytest.mark.slow
def test_a_plan_without_room_does_not_end_the_search(monkeypatch):
    """Where no plan for less memory is found, the next one is for the whole budget again, at a higher price."""
    asked, planned = [], offload.fit

    def fit(goal, *rest):
        asked.append(goal.allowed)
        if goal.allowed < asked[0]:
            raise BudgetInfeasibleError("less than the budget", asked[0], 0)
        return planned(goal, *rest)

    monkeypatch.setattr(offload, "fit", fit)
    model = mlp(layers=12, batch=4096, width=512)
    report = rewrite_model(model, "50%", offload=True, host_bandwidth="25GB", costs="t4", **DEVICE).report
    assert len(asked) == 4 and asked[2] < asked[0] == asked[1] == asked[3]
    assert report.moved and report.loop_after.total <= report.budget


@pytest.mark.slow
def test_budgets_below_any_recompute_are_kept():
    model = mlp(layers=12, batch=8192, width=256)
    with pytest.raises(BudgetInfeasibleError, match="impossible"):
        rewrite_model(model, "33%", **DEVICE)
    result = rewrite_model(model, "33%", offload=True, **DEVICE)
    assert result.report.loop_after.total <= result.report.budget and result.report.moved
    with pytest.raises(BudgetInfeasibleError, match=r"impossible.*proved"):
        rewrite_model(model, "20%", offload=True, **DEVICE)


def test_a_budget_that_is_kept_already_moves_nothing():
    result = rewrite_model(net(), "100%", offload=True, host_bandwidth=FAST, **DEVICE)
    assert result.report.moved is None and result.report.extra_compute == 0


@pytest.mark.slow
def test_a_file_is_tried_by_the_bytes_it_is_judged_by_and_kept_unless_there_is_a_better_one():
    """``auto`` once searched below the file it had tried: +20 % of time was answered with +210 %."""
    original = begin(mlp(layers=3, batch=4096, width=64), {**DEVICE, "offload": True, "effort": 0.01, "verify": "none"})
    tried = pipeline._tried(original.job(Budget(fraction=0.8), Deadline()), FirstUse())
    assert tried.nbytes == original.memory.taken(tried.made.executed)[0] > tried.made.footprint.total
    job = original.job(Budget(bytes=original.memory.least), Deadline())  # too little for any plan
    assert fit_with_moves(job.goal, pipeline._work(job), tried.made).plan is tried.made.plan


def test_no_budget_is_called_impossible_that_moves_can_keep():
    """Whether the plan moves anything or not: here nothing has to."""
    kept, plain = (rewrite_model(net(), "100%", offload=offload, **DEVICE).report for offload in (True, False))
    assert kept.impossible_below < plain.impossible_below and kept.lower_bound < plain.lower_bound
    found = estimate(net(), offload=True, provider="cuda", run_by="loop")
    assert found.impossible_below == kept.impossible_below


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"offload": True}, "provider='cuda', run_by='loop'"),
        ({"offload": True, "provider": "cuda", "run_by": "session"}, "provider='cuda', run_by='loop'"),
        ({"host_bandwidth": "1GB", "provider": "cuda", "run_by": "loop"}, "is for offload=True and offload_state=True"),
        ({"offload": True, "provider": "cuda", "run_by": "loop", "costs": "cpu"}, "set host_bandwidth="),
        ({"offload": "yes", "provider": "cuda", "run_by": "loop"}, "True or False"),
        ({"offload": True, "provider": "cuda", "run_by": "loop", "host_bandwidth": "fast"}, "not a bandwidth"),
        ({"offload": True, "provider": "cuda", "run_by": "loop", "host_bandwidth": "50%"}, "not a bandwidth"),
    ],
)
def test_what_cannot_be_meant_is_refused(given, words):
    with pytest.raises(UsageError, match=words):
        parse_options(given)


def test_a_plan_alone_has_no_moves():
    with pytest.raises(UsageError, match="rewrite_model"):
        plan_model(net(), "50%", offload=True, **DEVICE)


def test_a_plan_that_moves_nothing_is_what_it_was():
    """Split and adjoined, the order runs the same ops, holds as much at its peak, and costs nothing more."""
    plain = prepared(net())
    names = moves.movable(plain)
    split = prepared(net(), names)
    assert len(split.graph.ops) == len(plain.graph.ops) + len(names) > len(plain.graph.ops)
    order = plain.default_order()
    carried = moves.carried(order.order, plain, split)
    check_schedule(split.problem, carried)
    assert carried.late_moves(split.problem) == [] and carried.overhead(split.problem) == 0
    back = moves.carried(carried.order, split, plain)
    assert back == order


def test_what_runs_again_is_moved_instead_and_what_that_needed_does_not_run():
    """h is computed again from a, which is computed again for nothing else: one move, and neither runs twice."""
    nodes = [
        make("Exp", ["x"], ["a"], name="a"),
        make("Neg", ["a"], ["h"], name="h"),
        make("Exp", ["h"], ["y"], name="y"),
        make("Mul", ["y", "h"], ["z"], name="z"),
    ]
    for node in nodes:
        node.metadata_props.add(key="phase", value="backward" if node.name == "z" else "forward")
    model = model_of(nodes, {"x": [256, 256]}, {"z": [256, 256]})
    plain, split = prepared(model), prepared(model, ["h"])
    carried = moves.carried((0, 1, 2, 0, 1, 3), plain, split)
    labels = [split.graph.ops[op].node.op_type for op in carried.order]
    assert labels == ["Exp", "Neg", "Move", "Exp", "Move", "Mul"]
    nbytes = 4 * 256 * 256
    assert carried.overhead(split.problem) == pytest.approx(LINK.seconds(nbytes) / plain.problem.cost.sum())
    found = moves.moved(split, carried)
    assert (found.values, found.nbytes) == (("h",), nbytes)
    assert found.share == pytest.approx(carried.overhead(split.problem))


@pytest.fixture
def read_thrice() -> tuple[onnx.ModelProto, Compiled]:
    """`a` may be moved, and is read by the next op and by the last two; `s` has nothing to do with it."""
    ops = ["Neg x > a", "Exp a > b", "Neg b > c", "Exp x > s", "Mul c a > d", "Mul d a > e", "Add e s > y"]
    parts = [op.replace(">", "").split() for op in ops]
    nodes = [make(kind, reads, [made], name=made) for kind, *reads, made in parts]
    model = model_of(nodes, {"x": [256, 256]}, {"y": [256, 256]})
    return model, prepared(model, ["a"])


@pytest.mark.parametrize("late", [False, True])
def test_every_move_is_a_copy_down_where_the_value_was_made_and_one_up_where_it_is_read(late, read_thrice):
    """Back twice; three times, where an op comes between the value and its first move."""
    model, split = read_thrice
    number = {op.label if not moves.is_move(op) else "move": op.index for op in split.graph.ops}
    words = "a s move b c move d move e y" if late else "a move s b c move d move e y"
    order = Schedule(tuple(number[word] for word in words.split()))
    check_schedule(split.problem, order)
    assert order.late_moves(split.problem) == ([number["move"]] if late else [])
    again = 3 if late else 2
    written = realize(split, order, 1 << 30, {})
    assert (written.moved, written.recomputed) == (("a",) * again, ())
    assert moves.moved(split, order).nbytes == again * 4 * 256 * 256
    nodes = list(written.model.graph.node)
    kinds = [node.op_type for node in nodes if node.op_type in (moves.DOWN, moves.UP)]
    assert kinds == [moves.DOWN, moves.UP] * again
    maker = {name: node for node in nodes for name in node.output}
    readers = [node for node in nodes if node.name in ("b", "d", "e")]
    came_back = [any(maker[name].op_type == moves.UP for name in node.input if name in maker) for node in readers]
    assert came_back == [late, True, True]
    verify.check(model, written.model)


def test_moves_join_their_ops_where_that_keeps_the_limit():
    split = prepared(net(), ["a0", "a1"])
    problem = split.problem
    order = list(moves.adjoined(problem, split.default_order().order).order)
    late = Schedule(tuple(order)).late_moves(problem)
    assert late == [] and sorted(order) == list(range(problem.n_ops))
    peak = simulate(problem, order).peak
    assert moves.adjoined(problem, order, peak).order == tuple(order)


def test_a_session_copies_down_at_once_and_up_when_it_is_read():
    """Whatever the order in the file; a view of what comes back waits with it."""
    kinds = kernels_of("cuda")
    steps = [
        LeanNode(make("Exp", ["x"], ["v"])),
        LeanNode(make("Neg", ["v"], ["w"])),
        LeanNode(make(moves.DOWN, ["v"], ["home"])),
        LeanNode(make(moves.UP, ["home"], ["back"])),
        LeanNode(make("Reshape", ["back", "shape"], ["view"])),
        LeanNode(make("Exp", ["w"], ["y"])),
        LeanNode(make("Mul", ["y", "view"], ["z"])),
    ]
    found = [step.node.op_type for step in lean_graph.moved_when_due(steps, kinds)]
    assert found == ["Exp", moves.DOWN, "Neg", "Exp", moves.UP, "Reshape", "Mul"]
    others = [step for step in steps if step.node.op_type not in (moves.DOWN, moves.UP, "Reshape")]
    assert lean_graph.moved_when_due(others, kinds) == others


def test_copies_of_the_runtimes_own_stay_where_they_are():
    """What a node on the host makes comes up at once, as ONNX Runtime has it."""
    steps = [
        LeanNode(make("Exp", ["x"], ["v"])),
        LeanNode(make(moves.DOWN, ["v"], ["home"])),
        LeanNode(make("Acos", ["home"], ["there"])),
        LeanNode(make(moves.UP, ["there"], ["back"])),
        LeanNode(make("Neg", ["v"], ["w"])),
        LeanNode(make("Mul", ["w", "back"], ["z"])),
    ]
    assert lean_graph.moved_when_due(steps, kernels_of("cuda")) == steps


@pytest.mark.slow
def test_the_other_commands_know_of_moves(moved, tmp_path):
    """`explain` counts them, `check` misses those that a tool took out."""
    _, free, _ = moved
    path = tmp_path / "moved.onnx"
    free.save(path)
    count = len(free.report.moved.values)
    text = explain(path).to_text()
    assert f"{count} values are moved to the host and back, {format_bytes(free.report.moved.nbytes)} in each" in text
    found = check(path, run=False, provider="cuda")
    assert (found.moved, found.moved_lost) == (count, ())
    assert f"all {count} moves to the host and back are in place" in found.to_text()
    model = onnx.load(path)
    copy = next(node for node in model.graph.node if node.op_type == moves.UP)
    copy.op_type = "Identity"
    onnx.save(model, path)
    assert check(path, run=False, provider="cuda").moved_lost == (copy.output[0],)
