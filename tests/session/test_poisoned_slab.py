"""Dead bytes of the slab hold NaN patterns: a layout that is right does not read them, one that is wrong does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

from onnx_remat.session import plan_session
from onnx_remat.session.offsets import lifetimes
from onnx_remat.session.plan_session import SessionRequest
from tests.support import poisoned
from tests.support.graphs import feeds_for, mlp, run_model
from tests.support.outcomes import RIGHT, WRONG

pytest.importorskip("onnxruntime")


@pytest.fixture
def step():
    model = mlp(layers=3, batch=16, width=8)
    feeds = feeds_for(model)
    return model, feeds, dict(zip([v.name for v in model.graph.output], run_model(model, feeds, "all"), strict=True))


def test_a_right_layout_reads_no_dead_byte(step):
    assert poisoned.outcome(step[0], SessionRequest(donate=True), *step[1:]).kind == RIGHT


def test_every_two_values_that_are_alive_at_once_show_when_they_share_memory(step, monkeypatch):
    arrange, wrong, tried = plan_session.arrange, 0, 0
    monkeypatch.setattr(plan_session, "arrange", lambda *args: shared(arrange(*args), tried))
    model, feeds, _ = step
    plain = run_model(model, feeds, "disable")  # a small gradient shows in the last bits alone
    wanted = dict(zip([v.name for v in model.graph.output], plain, strict=True))
    for tried in range(0, 200, 20):  # noqa: B007 - read by the layout above
        wrong += poisoned.outcome(model, SessionRequest(level="disable", donate=True), feeds, wanted).kind == WRONG
    assert wrong == 10


def shared(made, number):
    """A layout with a value moved onto another one that is still read after it is made."""
    bound, names = made.offsets, [place.name for place in made.offsets.placements]
    start, end = lifetimes(made.program, names)
    pairs = [(a, b) for a in names for b in names if start[b] < start[a] < end[b]]
    over, under = pairs[number % len(pairs)]
    offset = next(place.offset for place in bound.placements if place.name == under)
    places = tuple(replace(p, offset=offset) if p.name == over else p for p in bound.placements)
    return replace(made, offsets=replace(bound, placements=places, height=2 * bound.height))


def test_a_value_read_behind_its_end_shows(tmp_path, monkeypatch):
    """As it would where ONNX Runtime ran nodes in another order than planned."""
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[8,8] x) => (float[8,8] y) {
        a = Tanh(x)  b = Exp(a)  c = MatMul(b, b)  d = Add(c, a)  y = MatMul(d, d) }"""
    model, feeds = onnx.parser.parse_model(text), {"x": np.full((8, 8), 0.1, np.float32)}
    wanted = {"y": run_model(model, feeds, "disable")[0]}
    ends = poisoned.offsets.lifetimes

    def shorter(program, names):
        start, end = ends(program, names)
        return start, end | {"a": 1} if "a" in end else end

    assert poisoned.outcome(model, SessionRequest(level="disable"), feeds, wanted).kind == RIGHT
    monkeypatch.setattr(poisoned.offsets, "lifetimes", shorter)
    assert poisoned.outcome(model, SessionRequest(level="disable"), feeds, wanted).kind == WRONG
