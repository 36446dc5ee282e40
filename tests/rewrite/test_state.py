"""`state_outputs`: steps whose outputs of state have names of their own."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from onnx_remat import rewrite_model
from onnx_remat.app.cli import main
from onnx_remat.errors import ModelError, UsageError
from onnx_remat.ir.model_io import load
from onnx_remat.ir.state import rename, with_state
from onnx_remat.units import parse_pairs
from tests.support.graphs import feeds_for, mlp, run_model

pytest.importorskip("onnxruntime")

LAYERS = 6
STATE = {f"w{i}": f"step/{i}" for i in range(LAYERS)}


def foreign() -> onnx.ModelProto:
    """An MLP's step whose new weights have other names."""
    model = mlp(layers=LAYERS, batch=8192, width=64)
    rename(model.graph, {f"new.{name}": output for name, output in STATE.items()})
    return model


def test_a_step_whose_state_is_named_trains_in_a_loop():
    from onnx_remat.training import Loop

    model = foreign()
    result = rewrite_model(model, "70%", state_outputs=STATE, effort=0.5)
    assert result.report.loop_after.donated == LAYERS and result.report.recomputed > 0
    outputs = [value.name for value in result.model.graph.output]
    assert set(outputs) == {"loss", *(f"new.{name}" for name in STATE)}
    feeds = feeds_for(model)
    loop = Loop(result, feeds)
    names = [value.name for value in model.graph.output]
    for _ in range(3):
        wanted = dict(zip(names, run_model(model, feeds, "all"), strict=True))
        np.testing.assert_allclose(loop.step(), wanted["loss"], rtol=1e-5)
        feeds = {**feeds, **{name: wanted[output] for name, output in STATE.items()}}
    for name in STATE:
        np.testing.assert_allclose(loop.state()[name], feeds[name], rtol=1e-5, atol=1e-6)


def test_the_given_model_keeps_its_names():
    model = foreign()
    before = model.SerializeToString()
    with_state(load(model), STATE)
    assert model.SerializeToString() == before


def test_a_budget_that_the_step_keeps_renames_its_state_all_the_same():
    result = rewrite_model(foreign(), "100%", state_outputs=STATE)
    assert "new.w0" in [value.name for value in result.model.graph.output]
    assert any("outputs renamed" in note for note in result.report.notes)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"v0": "step/0"}, "state v0=step/0: the model has no input 'v0'"),
        ({"w0": "step0"}, "state w0=step0: the model has no output 'step0'; did you mean 'step/0'?"),
        ({"w0": "step/0", "w1": "step/0"}, "state w1=step/0: output 'step/0' is already the next value of another"),
        ({"w0": "loss"}, "state w0=loss: the two differ in type or shape"),
    ],
)
def test_a_pair_that_is_no_state_is_refused(state, message):
    with pytest.raises((ModelError, UsageError)) as error:
        rewrite_model(foreign(), "70%", state_outputs=state)
    assert message in str(error.value)


def test_an_output_that_no_node_computes_and_a_name_that_is_taken_are_refused():
    text = "(float[4] w, float[4] x) => (float loss, float[4] next, float[4] w) { loss = ReduceSum <keepdims = 0> (x)\n"
    text += "y = Mul (w, x)  z = Neg (y)  next = Neg (z) }"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> g {text}')
    rename(model.graph, {"z": "new.w"})
    with pytest.raises(ModelError, match="no node computes output 'w'"):
        with_state(load(model), {"w": "w"})
    with pytest.raises(ModelError, match=r"another value is called 'new\.w'"):
        with_state(load(model), {"w": "next"})


@pytest.mark.parametrize("state", ["w=next", {"w": 1}, [("w", "next")]])
def test_state_is_a_mapping_of_names(state):
    with pytest.raises(UsageError, match="state_outputs must map inputs to outputs"):
        rewrite_model(foreign(), "70%", state_outputs=state)


def test_the_command_names_state(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(foreign(), "in.onnx")
    flags = [flag for name, output in STATE.items() for flag in ("--state", f"{name}={output}")]
    assert main(["in.onnx", "out.onnx", "--budget", "70%", "--effort", "0.3", "--json", "report.json", *flags]) == 0
    assert "new.w3" in [value.name for value in onnx.load("out.onnx").graph.output]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["loop_after"]["donated"] == LAYERS
    capsys.readouterr()
    assert main(["in.onnx", "more.onnx", "--budget", "70%", "--state", "w0"]) == 2
    assert "is not IN=OUT" in capsys.readouterr().err
    assert main(["in.onnx", "more.onnx", "--budget", "70%", "--state", "w0=a", "--state", "w0=b"]) == 2
    assert not (tmp_path / "more.onnx").exists()


def test_an_output_without_a_type_may_be_state_and_a_node_may_have_its_new_name():
    text = "(float[4] w, float[4] x) => (float loss, next) { loss = ReduceSum <keepdims = 0> (x)"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> g {text} next = Sub (w, x) }}')
    model.graph.output[1].ClearField("type")
    model.graph.node[1].name = "new.w"
    named = with_state(load(model), {"w": "next"}).model
    assert [value.name for value in named.graph.output] == ["loss", "new.w"]
    assert [(node.name, *node.output) for node in named.graph.node][1] == ("new.w", "new.w")


def test_an_output_without_a_shape_may_be_state():
    text = "(float[4] w, float[N] x) => (float loss, float next) { loss = ReduceSum <keepdims = 0> (x)"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> g {text} next = Neg (w) }}')
    model.graph.output[1].type.tensor_type.ClearField("shape")
    named = with_state(load(model), {"w": "next"}).model
    assert [value.name for value in named.graph.output] == ["loss", "new.w"]


def test_names_of_a_pair_may_contain_its_sign():
    assert parse_pairs(["layer=0/w=layer=0/w_next", "w=w_next"]) == {"layer=0/w": "layer=0/w_next", "w": "w_next"}
    for text in ("w", "w=", "=w", "="):
        with pytest.raises(UsageError, match="is not IN=OUT"):
            parse_pairs([text])
