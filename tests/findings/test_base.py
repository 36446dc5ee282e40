"""What findings share: a schema of each its own, the layout of JSON, lines of text, what a file says of its plan."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace

import onnx
import pytest

from onnx_remat.app.bench import Benchmark
from onnx_remat.errors import ModelError
from onnx_remat.findings.check import CheckResult
from onnx_remat.findings.estimate import Estimate
from onnx_remat.findings.explain import Explanation
from onnx_remat.findings.lowest import Lowest
from onnx_remat.findings.sweep import Curve
from onnx_remat.ir.metadata import (
    BUDGET_KEY,
    CLONES_KEY,
    DIMS_KEY,
    EDGES_KEY,
    MOVES_KEY,
    PEAK_KEY,
    PROVIDER_KEY,
    RUN_BY_KEY,
    WORKSPACE_KEY,
)  # fmt: skip
from onnx_remat.messages import Finding
from onnx_remat.rewrite.report import Report
from onnx_remat.write.decided import Planned, planned

FINDINGS = (Benchmark, Curve, Estimate, Explanation, Lowest, Report, CheckResult)


def test_every_finding_has_a_schema_of_its_own():
    assert set(FINDINGS) <= set(Finding.__subclasses__())
    schemas = [kind.schema for kind in FINDINGS]
    assert len(set(schemas)) == len(FINDINGS) and all(re.fullmatch(r"onnx-remat/[a-z]+/\d+", s) for s in schemas)


def test_fields_are_the_keys_of_the_json():
    found = Lowest(100, 60, 58, 40, 41, (50,), 0.25, 3)
    stated = json.loads(found.to_json())
    assert list(stated) == ["schema", *(field.name for field in fields(Lowest))]
    assert stated["missed"] == [50] and found.to_text().splitlines() == found.lines()


STATED = {
    BUDGET_KEY: "100", PEAK_KEY: "200", CLONES_KEY: '["a"]', EDGES_KEY: "[]", DIMS_KEY: '{"batch": 4}',
    RUN_BY_KEY: "loop",
}  # fmt: skip


def stating(notes: dict[str, str]) -> onnx.ModelProto:
    model = onnx.ModelProto()
    onnx.helper.set_model_props(model, notes)
    return model


def test_what_a_file_was_planned_for_is_read_once_for_all():
    plan = Planned(100, 200, ["a"], [], [], {"batch": 4}, "loop", "cpu", None, "every", True)
    assert planned(stating(STATED), "it") == plan
    device = STATED | {PROVIDER_KEY: "cuda", WORKSPACE_KEY: "64", MOVES_KEY: '["b"]'}
    assert planned(stating(device), "it") == replace(plan, moved=["b"], provider="cuda", workspace=64)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (BUDGET_KEY, "0"), (BUDGET_KEY, "60%"), (PEAK_KEY, "much"), (CLONES_KEY, "[1]"), (CLONES_KEY, "{}"),
        (EDGES_KEY, "[" * 10_000), (DIMS_KEY, '{"batch": "four"}'), (MOVES_KEY, "b"), (PROVIDER_KEY, "cup"),
        (WORKSPACE_KEY, ""),
    ],
)  # fmt: skip
def test_damaged_metadata_is_refused(key, value):
    with pytest.raises(ModelError, match=r"^it does not say what was planned"):
        planned(stating(STATED | {key: value}), "it")
    if key in STATED:
        with pytest.raises(ModelError, match=r"^it does not say what was planned"):
            planned(stating({other: text for other, text in STATED.items() if other != key}), "it")
