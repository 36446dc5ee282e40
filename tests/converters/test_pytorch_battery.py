"""Operators through the PyTorch converter: each export is checked against torch, loss and every gradient.

Every second case, in groups, so that the run stays short; ``python -m tests.support.torch_battery`` runs them all.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

from onnx_remat.errors import ConversionError
from onnx_remat.ort import known_bugs
from tests.support import torch_battery
from tests.support.slow import few

ALWAYS = (
    "attention_pool", "added_amax", "amax_of_all", "nearest_rows", "matrix_exp", "pad_maxpool", "rrelu",
    *torch_battery.NUMBERS, "squeeze_nothing", "take", "put", "put_more", "index_reduce", "stable_sort", "repeats",
    "copysign", "sign_of_zeros", "soft_margin_far", "encoder_masked",
)  # what went wrong once  # fmt: skip
ALWAYS += tuple({"linear_cross_entropy"} & {*torch_battery.CASES})  # not in torch 2.9
NAMES = [name for name in torch_battery.CASES if name not in (*torch_battery.SLOW, *ALWAYS)][::2] + list(ALWAYS)


@pytest.mark.parametrize("start", few(range(0, len(NAMES), 20), [60]))
def test_forward_and_gradient(start):
    group = NAMES[start : start + 20]
    step = torch_battery.export(group)
    outputs = {value.name for value in step.graph.output}
    assert known_bugs.find(step) == ()
    assert all(any(f"grad.cases.{name}." in output for output in outputs) for name in group)


@pytest.mark.parametrize("name", torch_battery.REFUSED)
def test_what_has_no_rule_is_named(name):
    with pytest.raises(ConversionError, match=name):
        torch_battery.export([name.replace(".", "_")])


def test_at_least_sixty_operators():
    assert len(NAMES) >= 60 and len(torch_battery.CASES) >= 150
