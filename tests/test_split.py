"""Splitting a step: both parts one after the other are the step, to the last bit; what cannot be split is named."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from onnx_remat import ModelError, UsageError, rewrite_model
from onnx_remat.app import cli
from onnx_remat.ir import phases, shapes
from onnx_remat.ir.graph import build
from onnx_remat.ir.model_io import Source
from onnx_remat.ort.host_state import with_state_on_host
from onnx_remat.session.copies import Stated
from onnx_remat.split import accumulating, split_step
from tests.support.graphs import SAMPLES, feeds_for, mlp, model_of, run_model, same_bits
from tests.support.slow import few
from tests.support.updated import momentum, updated

MAKE = helper.make_node


def one_after_the_other(parts, feeds):
    """All that both parts output."""
    values = dict(feeds)
    for model in (parts.gradients, parts.update):
        onnx.checker.check_model(model)
        given = {value.name: values[value.name] for value in model.graph.input if value.name in values}
        made = run_model(model, given)
        values |= {f"out:{o.name}": a for o, a in zip(model.graph.output, made, strict=True)}
        values |= {o.name: a for o, a in zip(model.graph.output, made, strict=True) if o.name.startswith("grad.")}
    return {name[4:]: array for name, array in values.items() if name.startswith("out:")}


def assert_same(model, parts, feeds):
    names = [value.name for value in model.graph.output]
    made = one_after_the_other(parts, feeds)
    assert same_bits([made[name] for name in names], run_model(model, feeds))


def unlabelled(model):
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        del node.metadata_props[:]
    return copy


@pytest.mark.parametrize(
    "path", few(SAMPLES, [path for path in SAMPLES if path.stem != "deep_mlp"]), ids=lambda path: path.stem
)
@pytest.mark.parametrize("labels", [True, False])
def test_the_parts_of_a_sample_compute_the_sample(path, labels):
    model = onnx.load(path) if labels else unlabelled(onnx.load(path))
    parts = split_step(model)
    renewed = sum(value.name.startswith("new.") for value in model.graph.output)
    assert len(parts.parameters) == renewed == len(parts.update.graph.output)  # plain SGD: all of them are parameters
    assert_same(model, parts, feeds_for(model))


def clipped():
    """Two weights, momentum and a global clip: every new value depends on every gradient."""
    nodes = [
        MAKE("MatMul", ["x", "a"], ["h"]), MAKE("MatMul", ["h", "b"], ["y"]), MAKE("Sub", ["y", "t"], ["e"]),
        MAKE("Mul", ["e", "e"], ["ee"]), MAKE("ReduceMean", ["ee"], ["loss"], keepdims=0),
        MAKE("Transpose", ["h"], ["hT"]), MAKE("MatMul", ["hT", "e"], ["gb"]), MAKE("Transpose", ["b"], ["bT"]),
        MAKE("MatMul", ["e", "bT"], ["gh"]), MAKE("Transpose", ["x"], ["xT"]), MAKE("MatMul", ["xT", "gh"], ["ga"]),
        MAKE("ReduceSumSquare", ["ga"], ["na"], keepdims=0), MAKE("ReduceSumSquare", ["gb"], ["nb"], keepdims=0),
        MAKE("Sum", ["na", "nb"], ["n"]), MAKE("Sqrt", ["n"], ["norm"]), MAKE("Div", ["one", "norm"], ["c"]),
    ]  # fmt: skip
    for p in "ab":
        nodes += [
            MAKE("Mul", [f"g{p}", "c"], [f"gc{p}"]), MAKE("Mul", [f"m.{p}", "one"], [f"mm{p}"]),
            MAKE("Add", [f"mm{p}", f"gc{p}"], [f"new.m.{p}"]), MAKE("Mul", [f"new.m.{p}", "rate"], [f"s{p}"]),
            MAKE("Sub", [p, f"s{p}"], [f"new.{p}"], name=f"turn.{p}"),
        ]  # fmt: skip
    square = [8, 8]  # of the batch too: shapes alone tell nothing here
    state = dict.fromkeys(["a", "b", "m.a", "m.b"], square)
    outputs = {"loss": [], **{f"new.{name}": square for name in state}}
    return model_of(nodes, state | {"x": square, "t": square, "rate": [1]}, outputs, {"one": np.float32(0.9)})


def test_clipping_and_momentum_are_the_updates():
    model = clipped()
    parts = split_step(model)
    assert parts.parameters == ("a", "b")
    assert [value.name for value in parts.gradients.graph.output] == ["loss", "grad.a", "grad.b"]
    assert {"m.a", "m.b", "rate", "grad.a", "grad.b"} <= {value.name for value in parts.update.graph.input}
    assert "ReduceSumSquare" in {node.op_type for node in parts.update.graph.node}
    assert_same(model, parts, feeds_for(model))


def test_all_of_an_update_of_numbers_is_the_optimizers():
    nodes = [
        MAKE("Mul", ["x", "a"], ["h"]),
        MAKE("Add", ["h", "b"], ["y"]),
        MAKE("ReduceMean", ["y"], ["loss"], keepdims=0),
    ]
    nodes += [MAKE("ReduceMean", ["x"], ["ga"], keepdims=0), MAKE("Sub", ["a", "ga"], ["new.a"])]
    nodes += [MAKE("ReduceSum", ["x"], ["gb"], keepdims=0), MAKE("Sub", ["b", "gb"], ["new.b"])]
    outputs = {"loss": [], "new.a": [], "new.b": []}
    graph = build(split_step(model_of(nodes, {"x": [4], "a": [], "b": []}, outputs)).update)
    assert set(phases.split(graph, shapes.infer(graph))) == {phases.OPTIMIZER}


def small(nodes, outputs, state=("w",), more=None):
    square = [4, 4]
    head = [MAKE("Mul", ["x", "w"], ["h"]), MAKE("Tanh", ["h"], ["y"]), MAKE("ReduceMean", ["y"], ["loss"], keepdims=0)]
    inputs = dict.fromkeys([*state, "x"], square) | (more or {})
    return model_of([*head, *nodes], inputs, {"loss": []} | outputs, {"k": np.float32(0.1)})


GRADIENT = [MAKE("Mul", ["y", "x"], ["g"], name="back")]
SGD = [MAKE("Mul", ["g", "k"], ["s"]), MAKE("Sub", ["w", "s"], ["new.w"], name="turn")]


def test_running_statistics_stay_with_the_gradients_and_counts_go_where_they_are_read():
    nodes = [
        *GRADIENT, *SGD, MAKE("Mul", ["mean", "k"], ["mk"]), MAKE("Add", ["mk", "y"], ["new.mean"]),
        MAKE("Add", ["seen", "k"], ["new.seen"]), MAKE("Mul", ["ema", "k"], ["ek"]),
        MAKE("Add", ["ek", "new.w"], ["new.ema"]),
    ]  # fmt: skip
    model = small(nodes, {f"new.{n}": [4, 4] for n in ("w", "mean", "seen", "ema")}, ("w", "mean", "seen", "ema"))
    parts = split_step(model)
    assert [value.name for value in parts.gradients.graph.output] == ["loss", "new.mean", "new.seen", "grad.w"]
    assert [value.name for value in parts.update.graph.output] == ["new.w", "new.ema"]
    assert_same(model, parts, feeds_for(model))


def test_an_average_of_old_weights_is_renewed_once_per_update():
    """And one of that, but not what the forward pass reads, as a weight's spectral norm does."""
    nodes = [
        *GRADIENT, *SGD, MAKE("Mul", ["w", "k"], ["wk"]), MAKE("Add", ["ema", "wk"], ["new.ema"]),
        MAKE("Mul", ["ema", "k"], ["ek"]), MAKE("Add", ["slow", "ek"], ["new.slow"]),
        MAKE("Mul", ["u", "w"], ["new.u"]), MAKE("Add", ["h", "u"], ["hu"]),
    ]  # fmt: skip
    names = ("w", "ema", "slow", "u")
    model = small(nodes, {f"new.{n}": [4, 4] for n in names}, names)
    tanh = next(node for node in model.graph.node if node.op_type == "Tanh")
    tanh.input[0] = "hu"
    model.graph.node.insert(1, model.graph.node.pop())
    parts = split_step(model)
    assert [value.name for value in parts.gradients.graph.output] == ["loss", "new.u", "grad.w"]
    assert [value.name for value in parts.update.graph.output] == ["new.w", "new.ema", "new.slow"]
    assert_same(model, parts, feeds_for(model))


def test_parameters_that_share_a_gradient_have_an_input_each():
    nodes = [
        MAKE("Add", ["w", "v"], ["wv"]), MAKE("Mul", ["x", "wv"], ["y"]),
        MAKE("ReduceMean", ["y"], ["loss"], keepdims=0),
        MAKE("Mul", ["y", "x"], ["g"]), MAKE("Sub", ["w", "g"], ["new.w"]), MAKE("Sub", ["v", "g"], ["new.v"]),
    ]  # fmt: skip
    model = model_of(nodes, {"w": [4], "v": [4], "x": [4]}, {"loss": [], "new.w": [4], "new.v": [4]})
    parts = split_step(model)
    reads = {node.output[0]: list(node.input) for node in parts.update.graph.node}
    assert reads == {"new.w": ["w", "grad.w"], "new.v": ["v", "grad.v"]}
    assert_same(model, parts, feeds_for(model))


@pytest.mark.parametrize(
    ("nodes", "outputs", "state", "message"),
    [
        ([MAKE("Mul", ["y", "x"], ["grad.w"])], {"grad.w": [4, 4]}, ("w",), "already ends at gradients .'grad.w'"),
        ([], {}, ("w",), "no output new.<name> renews"),
        (
            [*GRADIENT, MAKE("Mul", ["m", "y"], ["mk"], name="mix"), MAKE("Add", ["mk", "g"], ["new.m"]),
             MAKE("Sub", ["w", "new.m"], ["new.w"])],
            {"new.w": [4, 4], "new.m": [4, 4]}, ("w", "m"), "node 'mix' .Mul. mixes 'm', state of the optimizer",
        ),
        (
            [*GRADIENT, MAKE("Mul", ["g", "y"], ["s"]), MAKE("MatMul", ["s", "w"], ["new.w"], name="turn")],
            {"new.w": [4, 4]}, ("w",), "update of 'w' reads more .* node 'turn' .MatMul.",
        ),
        (
            [*GRADIENT, MAKE("Add", ["mean", "y"], ["new.mean"]), MAKE("Mul", ["mean", "k"], ["r"]),
             MAKE("Mul", ["g", "r"], ["s"], name="late"), MAKE("Sub", ["w", "s"], ["new.w"])],
            {"new.w": [4, 4], "new.mean": [4, 4]}, ("w", "mean"), "of the update reads 'mean', which is renewed before",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_named(nodes, outputs, state, message):
    with pytest.raises(ModelError, match=message) as refusal:
        split_step(small(nodes, outputs, state))
    assert "\n" not in str(refusal.value)


def test_a_noise_that_both_parts_would_draw_is_refused():
    noise = MAKE("RandomNormal", [], ["z"], shape=[4, 4], name="noise")
    nodes = [noise, *GRADIENT, MAKE("Mul", ["g", "k"], ["s"]), MAKE("Sub", ["z", "s"], ["new.w"])]
    model = small([*nodes, MAKE("Identity", ["z"], ["noise"])], {"new.w": [4, 4], "noise": [4, 4]})
    with pytest.raises(ModelError, match=r"both parts need the outputs of node 'noise' .RandomNormal."):
        split_step(model)


def test_a_default_of_what_steps_renew_is_named_where_it_prevents_a_split():
    model = small([*GRADIENT, *SGD], {"new.w": [4, 4]})
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4), np.float32), "w"))
    with pytest.raises(ModelError, match=r"input 'w', which .*, has a default value: remove its initializer"):
        split_step(model)


@pytest.mark.parametrize("output", [False, True])
def test_an_input_without_readers_stays_with_its_default(output):
    model = small([*GRADIENT, *SGD], {"new.w": [4, 4]} | ({"unread": [2]} if output else {}), more={"unread": [2]})
    model.graph.initializer.append(numpy_helper.from_array(np.ones(2, np.float32), "unread"))
    gradients = split_step(model).gradients
    onnx.checker.check_model(gradients)
    feeds = feeds_for(model)
    made = run_model(gradients, {name: feeds[name] for name in "wx"})
    assert not output or same_bits([made[1]], [np.ones(2, np.float32)])


def test_sums_grow_by_weighed_gradients():
    parts = split_step(clipped())
    step = accumulating(parts.gradients)
    onnx.checker.check_model(step)
    feeds = feeds_for(clipped())
    given = {value.name: feeds[value.name] for value in parts.gradients.graph.input}
    loss, *gradients = run_model(parts.gradients, given)
    sums = [np.full_like(g, 3) for g in gradients]
    more = {"grad.a": sums[0], "grad.b": sums[1], "gradient_weight": np.array(0.25, np.float32)}
    made = run_model(step, given | more)
    assert same_bits(made, [loss, *(s + np.float32(0.25) * g for s, g in zip(sums, gradients, strict=True))])


def test_a_gradient_that_is_a_constant_is_summed():
    """That of a sum of weights, say."""
    ones = {"grad.w": np.ones(4, np.float32)}
    model = model_of([MAKE("ReduceSum", ["w"], ["loss"], keepdims=0)], {"w": [4]}, {"loss": [], "grad.w": [4]}, ones)
    step = accumulating(model)
    onnx.checker.check_model(step)
    before = np.full(4, 3, np.float32)
    feeds = {"w": np.ones(4, np.float32), "grad.w": before, "gradient_weight": np.array(0.5, np.float32)}
    loss, total = run_model(step, feeds)
    assert loss == 4 and same_bits([total], [np.full(4, 3.5, np.float32)])


def test_outputs_besides_stay_with_the_gradients_under_their_names():
    model = clipped()
    shapes = {"y": [8, 8], "ga": [8, 8], "norm": [], "gcb": [8, 8]}
    model.graph.output.extend(helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items())
    parts = split_step(model)
    assert [value.name for value in parts.gradients.graph.output] == ["loss", "y", "ga", "grad.a", "grad.b"]
    assert_same(model, parts, feeds_for(model))
    sums = accumulating(parts.gradients)
    onnx.checker.check_model(sums)
    assert [value.name for value in sums.graph.output] == ["loss", "y", "ga", "new.grad.a", "new.grad.b"]


def test_a_gradient_that_is_an_output_by_our_name_is_there_once():
    model = clipped()
    for node in model.graph.node:
        for place in (node.input, node.output):
            place[:] = ["grad.a" if name == "ga" else name for name in place]
    model.graph.output.append(helper.make_tensor_value_info("grad.a", 1, [8, 8]))
    parts = split_step(model)
    assert [value.name for value in parts.gradients.graph.output] == ["loss", "grad.a", "grad.b"]
    assert_same(model, parts, feeds_for(model))


def test_parts_of_a_step_with_state_on_the_host_say_how_copies_of_it_run():
    model = with_state_on_host(Source(updated(momentum, "m"), None), {"m0": "new.m0"}).model
    said = Stated(1e9, "t4", 1)
    said.put(model)
    parts = split_step(model)
    assert Stated.of(parts.update) == said
    assert Stated.of(parts.gradients) is None  # it copies nothing


def test_parts_of_a_rewritten_step_make_none_of_its_promises():
    model = rewrite_model(clipped(), "100%", run_by="session").model
    model.metadata_props.add(key="onnx_remat.budget_bytes", value="1")
    model.metadata_props.add(key="author", value="somebody")
    model.metadata_props.add(key="onnx_remat.shapes", value="{}")
    parts = split_step(model)
    for part in (parts.gradients, parts.update):
        assert [prop.key for prop in part.metadata_props] == ["author", "onnx_remat.shapes"]


@pytest.mark.parametrize("loss", ["h", "x", "nothing"])
def test_a_loss_is_an_output(loss):
    with pytest.raises(UsageError, match=f"no output '{loss}' to take as the loss"):
        split_step(clipped(), loss=loss)


def test_symbolic_batches_stay_symbolic():
    model = mlp(layers=2, batch=8, width=8, dims="n")
    parts = split_step(model)
    assert parts.gradients.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "n"
    assert_same(model, parts, feeds_for(model, n=5))


@pytest.mark.slow
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_module_with_all_sorts_of_state(clip):
    """Tied weights, BatchNormalization, a frozen layer, AdamW with a rate that is an input, a clip of all gradients."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("onnxscript")
    from onnx_remat.converters.pytorch import export_training_step, initial_feeds

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.norm = torch.nn.Embedding(11, 8), torch.nn.BatchNorm1d(8)
            self.inner, self.frozen = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.norm(torch.tanh(self.frozen(self.inner(self.words(x))))) @ self.words.weight.T

    torch.manual_seed(0)
    module, batch = Tied(), (torch.randint(0, 11, (8,)), torch.randint(0, 11, (8,)))
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=torch.tensor(1e-3))
    loss = torch.nn.functional.cross_entropy
    model = export_training_step(module, batch, loss, optimizer, clip_norm=clip)
    feeds = initial_feeds(model, module, optimizer) | {"input.0": batch[0].numpy(), "input.1": batch[1].numpy()}
    feeds["learning_rate"] = np.array(1e-3, np.float32)
    for step in (model, unlabelled(model)):
        parts = split_step(step)
        assert {*parts.parameters} == {"words.weight", "inner.weight", "inner.bias", "norm.weight", "norm.bias"}
        left = [value.name for value in parts.gradients.graph.output]
        assert [name for name in left if name.startswith("new.")] == [
            f"new.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
        ]
        assert_same(step, parts, feeds)


def test_the_command_writes_both_or_none(tmp_path, capsys):
    onnx.save(mlp(layers=2, batch=8, width=8), tmp_path / "train.onnx")
    assert cli.main(["split", str(tmp_path / "train.onnx"), "--accumulate"]) == 0
    assert "gradients of 2 parameters" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(tmp_path / "train.gradients.onnx")
    assert [value.name for value in session.get_outputs()] == ["loss", "new.grad.w0", "new.grad.w1"]
    assert cli.main(["split", str(tmp_path / "train.onnx")]) == 2
    assert "exists: pass --force" in capsys.readouterr().err
    again = [str(tmp_path / name) for name in ("train.update.onnx", "a.onnx", "b.onnx")]
    assert cli.main(["split", *again]) == 4
    assert not (tmp_path / "a.onnx").exists()


def test_gradients_of_parameters_with_symbolic_sizes_stay_symbolic():
    model = mlp(layers=2, batch=8, width=8)
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_param = "n" if dim.dim_value == 8 else dim.dim_param
    parts = split_step(model)
    for values in (parts.gradients.graph.output, parts.update.graph.input):
        dims = {v.name: [d.dim_param for d in v.type.tensor_type.shape.dim] for v in values if v.name.startswith("g")}
        assert dims == {"grad.w0": ["n", "n"], "grad.w1": ["n", "n"]}
    assert_same(model, parts, feeds_for(model, n=5))
