"""Which updates shard, and what a rank's part of one is; jobs that cannot start. No processes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_remat import ModelError, UsageError
from onnx_remat.distributed.flat import lay_out, layout_of
from onnx_remat.distributed.parts import prepare_apart
from onnx_remat.distributed.sharding import Sharding
from onnx_remat.split import split_step
from tests.support.adam import adam, first_state
from tests.support.graphs import feeds_for, model_of, run_model, same_bits
from tests.support.ranks import ROOT

MAKE = helper.make_node


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shards_together_are_the_update_to_the_last_bit(ranks):
    update = split_step(adam()).update
    flats = layout_of(update, ranks)
    sharding = Sharding.of(update, flats, ranks)
    feeds = feeds_for(update) | {"rate": np.array(0.01, np.float32), "count.steps": np.array(4, np.float32)}
    feeds |= {name: np.abs(a) for name, a in feeds.items() if name.startswith("v.")}
    wanted = dict(zip([o.name for o in update.graph.output], run_model(update, feeds), strict=True))
    made = {name: np.full_like(array, np.nan) for name, array in wanted.items()}
    for rank in range(ranks):
        pieces, model = sharding.pieces(rank), sharding.model(rank)
        onnx.checker.check_model(model, full_check=True)
        given = {}
        for value in model.graph.input:
            piece = pieces.get(value.name.removeprefix("grad."))
            whole = feeds[value.name]
            given[value.name] = whole if piece is None else whole.reshape(-1)[piece.start : piece.stop]
        for output, array in zip(model.graph.output, run_model(model, given), strict=True):
            piece = pieces.get(output.name.removeprefix("new."))
            if piece is None:
                made[output.name][...] = array
            else:
                made[output.name].reshape(-1)[piece.start : piece.stop] = array
    assert same_bits(made.values(), wanted.values())
    sizes = [sum(p.stop - p.start for n, p in sharding.pieces(rank).items() if n[:2] == "m.") for rank in range(ranks)]
    assert max(sizes) <= flats[0].size // ranks


def update_of(nodes, state=("w", "v"), shape=(4, 4), constants=None):
    names = [n for node in nodes for n in node.output if n.startswith("new.")]
    inputs = {name: list(shape) for p in state for name in (p, f"grad.{p}")} | {"m": list(shape)}
    read = {name for node in nodes for name in node.input}
    inputs = {name: kind for name, kind in inputs.items() if name in read}
    return model_of(nodes, inputs, {name: list(shape) for name in names}, constants or {})


SUB = [MAKE("Sub", [p, f"grad.{p}"], [f"new.{p}"]) for p in "wv"]


@pytest.mark.parametrize(
    ("nodes", "constants", "message"),
    [
        (
            [MAKE("Mul", ["grad.w", "grad.v"], ["c"], name="both"), MAKE("Sub", ["w", "c"], ["new.w"]), SUB[1]], {},
            r"node 'both' .Mul. reads the gradients of 'v' and 'w'; leave a clip out of the step and pass clip_norm",
        ),
        (
            [MAKE("ReduceL2", ["grad.w"], ["n"], name="norm"), MAKE("Div", ["grad.w", "n"], ["s"]),
             MAKE("Sub", ["w", "s"], ["new.w"]), SUB[1]], {},
            r"node 'norm' .ReduceL2., which .*'w' needs, is not elementwise",
        ),
        (
            [MAKE("Mul", ["grad.w", "k"], ["s"]), MAKE("Sub", ["w", "s"], ["new.w"]), SUB[1]],
            {"k": np.ones((4, 4), np.float32)}, "it reads the constant 'k'; train without zero",
        ),
        (
            [MAKE("Add", ["m", "grad.w"], ["s"]), MAKE("Sub", ["w", "s"], ["new.w"]),
             MAKE("Add", ["m", "grad.v"], ["r"]), MAKE("Sub", ["v", "r"], ["new.v"])], {},
            "'w' and 'v' are both renewed by 'm'",
        ),
    ],
)  # fmt: skip
def test_what_does_not_shard_is_named(nodes, constants, message):
    update = update_of(nodes, constants=constants)
    with pytest.raises(ModelError, match=message) as refusal:
        Sharding.of(update, layout_of(update, 2), 2)
    assert "\n" not in str(refusal.value)


def with_a_rate(shapes, *more):
    """Return an update of some parameters by their gradients times ``rate``, an input of one element that it keeps."""
    nodes, inputs, outputs = list(more), {"rate": [1]}, {}
    for name, shape in shapes.items():
        nodes += [
            MAKE("Mul", [f"grad.{name}", "rate"], [f"s.{name}"]),
            MAKE("Sub", [name, f"s.{name}"], [f"new.{name}"]),
        ]
        inputs |= {name: shape, f"grad.{name}": shape}
        outputs[f"new.{name}"] = shape
    return model_of(nodes, inputs, outputs)


@pytest.mark.parametrize("shapes", [{"a": [1], "w": [8]}, {"a": [1], "b": [1], "w": [8]}])
def test_a_rate_beside_parameters_of_one_element_is_the_rate_of_all(shapes):
    update = with_a_rate(shapes)
    sharding = Sharding.of(update, layout_of(update, 2), 2)
    assert sharding.inputs == {name: (name,) for name in shapes}


def test_a_number_that_one_parameter_renews_and_another_reads_does_not_shard():
    update = with_a_rate({"a": [1], "w": [8]}, MAKE("Add", ["rate", "grad.a"], ["new.rate"], name="renew"))
    update.graph.output.append(helper.make_tensor_value_info("new.rate", 1, [1]))
    with pytest.raises(ModelError, match="'a' and 'w' are both renewed by 'rate'"):
        Sharding.of(update, layout_of(update, 2), 2)


def test_flat_buffers_are_dense_aligned_and_of_one_type_each():
    kinds = {"a": ("float32", (5, 7)), "h": ("float16", (3,)), "b": ("float32", ()), "c": ("float32", (0, 4))}
    wide, half = lay_out(kinds, ranks=3)
    assert (wide.dtype, half.dtype, wide.size % 48, half.size % 96) == ("float32", "float16", 0, 0)
    buffer = wide.reserve()
    views = wide.views(buffer)
    assert [(name, view.shape) for name, view in views.items()] == [("a", (5, 7)), ("b", ()), ("c", (0, 4))]
    assert all(view.ctypes.data % 64 == 0 for view in views.values())
    views["b"][...] = 3
    assert buffer.sum() == 3
    owned = [(slot.name, start, stop) for rank in range(3) for slot, start, stop in wide.owned(rank, 3)]
    assert owned == [("a", 0, 32), ("a", 32, 35), ("b", 48, 49)]


def test_without_a_job_nothing_starts():
    pytest.importorskip("torch")
    from onnx_remat import distributed

    with pytest.raises(UsageError, match="start it with torchrun"):
        distributed.DataParallel(adam(), first_state(adam()))


def test_a_step_that_ends_at_gradients_and_budgets_that_are_too_low_are_refused():
    from onnx_remat.distributed import prepare
    from onnx_remat.errors import BudgetInfeasibleError

    with pytest.raises(ModelError, match="already ends at gradients"):
        prepare(split_step(adam()).gradients)
    with pytest.raises(BudgetInfeasibleError, match=r"no memory is left .* the update, its state and the engine take"):
        prepare(adam(), 3_000_000, effort=0.5)
    with pytest.raises(BudgetInfeasibleError, match=r"pass a larger budget$"):
        prepare(adam(), 3_000_000, ranks=2, zero=True, effort=0.5)


ALONE = """
import sys
import numpy as np
from onnx_remat import UsageError, distributed
from onnx_remat.split import split_step
from tests.support.graphs import feeds_for
from tests.test_split import clipped

feeds = {name: np.asarray(array) for name, array in feeds_for(clipped()).items()}
state = {name: feeds[name] for name in ("a", "b", "m.a", "m.b")}
batch = {name: feeds[name] for name in ("x", "t")}

def main():
    training = distributed.DataParallel(clipped(), state)
    training.step(batch | {"rate": feeds["rate"]})
    training.step(batch)  # the rate stays
    for wrong in ({"seed": "a"}, {"progress": print}, {"nonsense": 1}):
        try:
            distributed.DataParallel(clipped(), state, **wrong)
        except UsageError as error:
            print(error)
    training.step({"x": feeds["x"]})  # whose targets?

sys.exit(distributed.run(main))
"""


@pytest.mark.slow
def test_a_rank_alone_refuses_batches_that_lack_an_input_and_wrong_options():
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == UsageError.exit_code
    for line, start in zip(
        done.stdout.splitlines(), ("seed must be a whole", "progress is", "unknown option"), strict=True
    ):
        assert line.startswith(start)
    assert "no value for input 't'" in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (None, {}, "a model is a path, bytes or"),
        (adam(), {"ranks": 0, "zero": True}, "ranks must be at least 1"),
        (adam(), {"nonsense": 1}, "unknown option 'nonsense'"),
    ],
)
def test_what_cannot_be_prepared_is_refused_before_it_is(step, options, message):
    with pytest.raises(UsageError, match=message):
        prepare_apart(step, None, **options)


@pytest.mark.slow
def test_a_refusal_names_a_budget_of_the_whole_rank():
    from onnx_remat.distributed import prepare
    from onnx_remat.errors import BudgetInfeasibleError

    model = adam(batch=2048, width=64)
    options = {"effort": 0.5}
    with pytest.raises(BudgetInfeasibleError, match="no plan found for a rank's") as found:
        prepare(model, "60%", **options)
    advised = found.value.settings["budget"]
    assert min(advised, found.value.best_peak_bytes) > found.value.lower_bound_bytes
    assert prepare(model, advised, **options).recompute > 0


def test_parts_know_their_loss_and_state_by_other_names():
    from onnx_remat.distributed import prepare
    from onnx_remat.ir.state import rename

    model = adam()
    state = {value.name: value.name.removeprefix("new.") for value in model.graph.output if value.name != "loss"}
    rename(model.graph, {"loss": "error", **{new: f"next/{old}" for new, old in state.items()}})
    parts = prepare(model, state_outputs={old: f"next/{old}" for old in state.values()}, loss="error")
    assert parts.loss == "error" and parts.update == prepare(adam()).update
    with pytest.raises(UsageError, match="ranks train by sessions of their own: leave run_by= out"):
        prepare(adam(), run_by="session")


ERRORS = """
import sys
import numpy as np
from onnx_remat import BudgetInfeasibleError, UsageError, distributed
from onnx_remat.ir.state import rename
from tests.support.graphs import feeds_for
from tests.test_split import clipped

feeds = {name: np.asarray(array) for name, array in feeds_for(clipped()).items()}
state = {name: feeds[name] for name in ("a", "b", "m.a", "m.b")}
batch = {name: feeds[name] for name in ("x", "t", "rate")}

def main():
    try:
        distributed.DataParallel(clipped(), state, budget=3_000_000)
    except BudgetInfeasibleError as error:
        print(error.best_peak_bytes)
    named = clipped()
    rename(named.graph, {"loss": "error"})
    training = distributed.DataParallel(named, state)
    print(training.step(batch))
    for wrong in (lambda: training.step([batch, batch], weight=[1, 2, 3]),
                  lambda: distributed.DataParallel(training.parts, state, budget="60%")):
        try:
            wrong()
        except UsageError as error:
            print(error)

sys.exit(distributed.run(main))
"""


@pytest.mark.slow
def test_errors_of_a_job_are_of_their_own_kind():
    pytest.importorskip("torch")
    done = subprocess.run([sys.executable, "-c", ERRORS], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found, loss, weights, planned = done.stdout.splitlines()
    assert int(found) > 3_000_000 and float(loss) > 0
    assert weights == "2 batches need as many weights, or one for all, not 3"
    assert planned == "budget= has no effect on parts: pass it to prepare"


def test_single_numbers_that_are_vectors_are_not_cut():
    """A count of steps of each parameter, and a rate of all."""
    nodes = [
        MAKE("Add", ["count", "one"], ["new.count"]), MAKE("Div", ["grad.w", "new.count"], ["a"]),
        MAKE("Mul", ["a", "rate"], ["b"]), MAKE("Sub", ["w", "b"], ["new.w"]), MAKE("Mul", ["grad.v", "rate"], ["c"]),
        MAKE("Sub", ["v", "c"], ["new.v"]),
    ]  # fmt: skip
    inputs = {name: [4, 4] for name in ("w", "v", "grad.w", "grad.v")} | {"count": [1], "rate": [1]}
    outputs = {"new.w": [4, 4], "new.v": [4, 4], "new.count": [1]}
    update = model_of(nodes, inputs, outputs, {"one": np.ones(1, np.float32)})
    sharding = Sharding.of(update, layout_of(update, 2), 2)
    assert {name for rank in range(2) for name in sharding.pieces(rank)} == {"w", "v"}
    for rank in range(2):
        shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in sharding.model(rank).graph.input}
        assert all(shapes.get(name, [1]) == [1] for name in ("count", "rate"))
