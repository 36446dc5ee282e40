"""ONNX's own backend tests, rewritten and through `Session` with every value in its slab: none comes out wrong.

The default run takes some of them, ``--slow`` a third; `python -m scripts.onnx_backend` prints what becomes of each.
"""

from __future__ import annotations

import os
import re

import numpy as np
import pytest
from onnx import helper

from onnx_remat.session import offsets
from tests.support import backend_cases, survivors
from tests.support.graphs import model_of
from tests.support.outcomes import REFUSED, RIGHT, TOO_LOW, WRONG, Outcome, session_outcome, stock

pytest.importorskip("onnxruntime")

ONCE_WRONG = (
    "node/test_attention_4d_causal_fp16_expanded", "node/test_causal_conv_with_state_silu_fp16",
    "pytorch-converted/test_Conv2d_depthwise",
)  # fmt: skip
"""Half precision where a kernel has none, and a convolution whose channels do not fill a block."""

_EVERY = 600

HOLD = (
    "is not a tensor of numbers", "is a sequence, whose size", "is a optional, whose size", "is a map, whose size",
    "the graph has no nodes", "pinning an order needs 13 or later", "symbolic dimensions are not bound",
)  # fmt: skip
"""Why a model may be refused: what no plan can be made of."""

UNKNOWN_SIZES = re.compile(
    r"test_(unique|center_crop_pad|affine_grid\w+expanded|\w+window\w*_expanded|sequence|if_seq|if_opt|loop11|string|range)"
)
"""Tests in which sizes depend on what is fed, or are unknown of what a sequence holds."""

UNKNOWN_IN_BODIES = re.compile(r"test_linear_attention_\w*(gqa|mqa|fp16)$")
"""Tests in which ONNX Runtime fuses nodes in a Scan's body, of whose results nobody then tells the shape."""


def unexpected(name: str, outcomes: dict[str, Outcome]) -> list[str]:
    """Columns that are neither right nor refused for a reason that holds."""
    found = []
    for column, outcome in outcomes.items():
        holds = outcome.kind == REFUSED and (
            any(reason in outcome.message for reason in HOLD)
            or (
                "cannot be inferred" in outcome.message
                and (UNKNOWN_SIZES.search(name) or UNKNOWN_IN_BODIES.search(name))
            )
        )
        if outcome.kind not in (RIGHT, TOO_LOW) and not holds:
            found.append(f"{name}, {column}: {outcome.kind}: {outcome.message}")
    return found


def test_some_of_them():
    found, counted = [], 0
    for number, name in enumerate(backend_cases.names()):
        if (number % _EVERY == 0 and not name.startswith("light/")) or name in ONCE_WRONG:
            answer = backend_cases.try_case(number)
            counted += not isinstance(answer, str)
            found += unexpected(name, answer) if not isinstance(answer, str) else []
    assert not found, "\n".join(found)
    assert counted >= 3


@pytest.mark.slow
def test_a_third_of_them():
    """All take 28 minutes of a processor, a quarter of what the slow tests take together."""
    found, counted, names = [], 0, backend_cases.names()
    for number, answer in survivors.answers(backend_cases.try_case, range(0, len(names), 3), seconds=300):
        assert not isinstance(answer, survivors.Died), f"{names[number]}: {answer}"
        counted += not isinstance(answer, str)
        found += unexpected(names[number], answer) if not isinstance(answer, str) else []
    assert not found, "\n".join(found)
    assert counted >= 560


def test_a_value_that_lies_where_another_is_still_read_is_seen(monkeypatch):
    """The judge of all of this, with a layout that puts every value at the same place and a replay that is silent."""
    honest = offsets._lay_out

    def wrong(lower, upper, size, *more):
        offsets, *rest = honest(lower, upper, size, *more)
        return offsets * 0, *rest

    make = helper.make_node
    nodes = [make("Exp", ["x"], ["a"]), make("Sin", ["x"], ["b"]), make("MatMul", ["a", "b"], ["y"])]
    model, feeds = model_of(nodes, {"x": [8, 8]}, {"y": [8, 8]}), {"x": np.ones((8, 8), np.float32)}
    expected = stock(model, "disable", feeds)
    assert session_outcome(model, "disable", feeds, expected) == Outcome(RIGHT)
    monkeypatch.setattr(offsets, "_lay_out", wrong)
    assert session_outcome(model, "disable", feeds, expected).kind == REFUSED  # the replay sees it
    monkeypatch.setattr("onnx_remat.session.replay.check", lambda *_: None)
    assert session_outcome(model, "disable", feeds, expected).kind == WRONG


def dies(job):
    if job == "ends":
        os._exit(3)
    while job == "hangs":
        pass
    return job


@pytest.mark.slow  # as are the tests that need it
def test_jobs_that_crash_or_hang_take_no_other_with_them():
    found = dict(survivors.answers(dies, ["ends", "a", "hangs", "b"], processes=1, seconds=1))
    assert found == {
        "a": "a", "b": "b", "ends": survivors.Died("exit status 3"),
        "hangs": survivors.Died("no answer in 1 seconds"),
    }  # fmt: skip
