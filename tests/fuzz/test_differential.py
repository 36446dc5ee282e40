"""Random steps over the converters' vocabulary, original against result, on hostile feeds; see tests.support.steps.

The default run compares a few files; ``--fuzz N`` those of N steps. `python -m scripts.fuzz_coverage N` prints what was
covered, by op and role.
"""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest

from onnx_remat.write import writer
from tests.support.differential import Coverage, Difference, rows, try_step
from tests.support.graphs import run_model
from tests.support.steps import TABLE, Steps, hostile_feeds

_FEW, _SECONDS = 12, 25.0


def test_results_do_what_their_originals_do(pytestconfig):
    steps, start, files = pytestconfig.getoption("--fuzz"), time.process_time(), 0
    coverage: Coverage = Counter()
    for seed in range(steps or _FEW):
        files += try_step(seed, coverage)
        if not steps and time.process_time() - start > _SECONDS:
            break
    assert files >= 2
    assert {role for _, role in coverage} >= {"recomputed", "moved", "private"}


def test_the_oracle_sees_a_value_that_comes_back_as_another(monkeypatch):
    """A writer that copies the wrong value down is found out."""
    honest = writer._Writer._move

    def wrong(self, here, there):
        count = len(self._down)
        honest(self, here, there)
        if len(self._down) > count:
            at, node = self._down[-1]
            like = self.tensors[here.op.outputs[0]]
            others = [n for n in self._made_at if n in self.tensors and n not in node.input and n not in node.output]
            same = [n for n in others if (self.tensors[n].dtype, self.tensors[n].shape) == (like.dtype, like.shape)]
            if same:
                node.input[0] = same[0]
                self._down[-1] = max(at, self._made_at[same[0]]), node

    monkeypatch.setattr(writer._Writer, "_move", wrong)
    with pytest.raises(Difference, match="moves"):
        for seed in range(40):
            try_step(seed, Counter())


def test_the_oracle_sees_a_recompute_without_its_control_edge_value(monkeypatch):
    """A writer that reads the first input where it should read another is found out."""
    honest = writer._Writer._write_node

    def wrong(self, here, draw):
        honest(self, here, draw)
        if here.number and here.op.node.op_type == "Sub":
            node = self.nodes[-1]
            node.input[:] = [node.input[1], node.input[0]]

    monkeypatch.setattr(writer._Writer, "_write_node", wrong)
    with pytest.raises(Difference):
        for seed in range(40):
            try_step(seed, Counter(), ["Sub"])


@pytest.mark.parametrize("name", ["MaxPool", "Log", "BitShift"])
def test_hostile_feeds_are_hostile(name):
    """They reach the outputs as NaN, but do not drown all of them."""
    model = Steps(3, 3, 1, [name]).model()
    feeds = hostile_feeds(model, 0, 0.02)
    values = np.concatenate([feeds[n].ravel() for n in ("x", "y")])
    assert np.isnan(values).any() and np.isinf(values).any() and np.signbit(values[values == 0]).any()
    assert any(np.isfinite(made).all() for made in run_model(model, hostile_feeds(model, 0, 0.0)))


def test_the_table_of_ops_is_broad():
    assert len(TABLE) >= 110
    assert [row[0] for row in rows(Counter())] == sorted(TABLE)
