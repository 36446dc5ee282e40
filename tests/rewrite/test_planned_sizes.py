"""A step whose batch is open, from the command line to training: the file knows what it was planned for."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from onnx_remat.app.cli import main
from onnx_remat.errors import UsageError
from onnx_remat.findings.explain import explain
from onnx_remat.ir.metadata import DIMS_KEY
from onnx_remat.session.session import Session
from onnx_remat.session.training import Loop
from tests.support.graphs import feeds_for, mlp, session_of
from tests.support.slow import few

PLANNED, OTHER = 4096, 96
GIVEN = [(None, PLANNED), ({"batch": PLANNED}, PLANNED), ({"batch": OTHER}, OTHER)]
"""Sizes given when the file is opened, and the batch that it is then opened for."""


@pytest.fixture(scope="module")
def step():
    return mlp(layers=8, batch=PLANNED, width=64, dims="batch")


@pytest.fixture(scope="module")
def planned(step, tmp_path_factory):
    home = tmp_path_factory.mktemp("planned")
    onnx.save(step, home / "in.onnx")
    flags = ["--budget", "80%", "--dim", f"batch={PLANNED}", "--effort", "0.3", "-q"]
    assert main([str(home / "in.onnx"), str(home / "out.onnx"), *flags]) == 0
    return home / "out.onnx"


def test_the_file_is_open_and_knows_the_size(planned):
    model = onnx.load(planned)
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    known = {p.key: p.value for p in model.metadata_props}
    assert json.loads(known[DIMS_KEY]) == {"batch": PLANNED}
    assert explain(planned).recomputed


def outputs(model, feeds):
    session = session_of(model)
    return dict(zip((value.name for value in session.get_outputs()), session.run(None, feeds), strict=True))


@pytest.mark.parametrize("dims, batch", few(GIVEN, GIVEN[2:], several=True))
def test_a_session_opens_it(step, planned, dims, batch):
    feeds = feeds_for(step, batch=batch)
    expected = outputs(step, feeds)
    with Session(planned, dims=dims) as session:
        assert next(value.shape for value in session.inputs if value.name == "x") == (batch, 64)
        made = session.run(feeds)
        with pytest.raises(UsageError, match="'x'"):
            session.run(feeds | {"x": feeds["x"][1:]})
    for name, value in expected.items():
        np.testing.assert_allclose(made[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dims, batch", few(GIVEN, GIVEN[2:], several=True))
def test_a_loop_trains_it(step, planned, dims, batch):
    feeds = feeds_for(step, batch=batch)
    data = {name: feeds[name] for name in ("x", "t")}
    state = {name: value for name, value in feeds.items() if name not in data}
    loop, losses, expected = Loop(planned, feeds, dims=dims), [], []
    for _ in range(3):
        losses.append(loop.step(data))
        made = outputs(step, data | state)
        expected.append(float(made["loss"]))
        state = {name: made[f"new.{name}"] for name in state}
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    for name, value in state.items():
        np.testing.assert_allclose(loop.view(name), value, rtol=1e-3, atol=1e-6)


def test_commands_take_the_size_from_the_file_or_from_the_flag(planned, capsys):
    shown = []
    for flags in ([], ["--dim", f"batch={PLANNED}"], ["--dim", f"batch={OTHER}"]):
        assert main(["explain", str(planned), *flags]) == 0
        shown.append(capsys.readouterr().out)
        assert main(["check", str(planned), "--no-run", *flags]) == 0
        assert "keeps" in capsys.readouterr().out
    assert shown[0] == shown[1] != shown[2]


def test_a_size_of_another_name_is_refused(planned):
    with pytest.raises(UsageError, match=r"no symbolic dimension 'bach'.*did you mean 'batch'"):
        Loop(planned, {}, dims={"bach": OTHER})
