"""What all findings have: a schema of their own, the same JSON layout, text by lines."""

from __future__ import annotations

import json
import re
from dataclasses import fields

from onnx_remat.app.bench import Benchmark
from onnx_remat.findings.check import Survival
from onnx_remat.findings.estimate import Estimate
from onnx_remat.findings.explain import Explanation
from onnx_remat.findings.lowest import Lowest
from onnx_remat.findings.sweep import Curve
from onnx_remat.messages import Finding
from onnx_remat.rewrite.report import Report

FINDINGS = (Benchmark, Curve, Estimate, Explanation, Lowest, Report, Survival)


def test_every_finding_has_a_schema_of_its_own():
    assert set(FINDINGS) <= set(Finding.__subclasses__())
    schemas = [kind.schema for kind in FINDINGS]
    assert len(set(schemas)) == len(FINDINGS) and all(re.fullmatch(r"onnx-remat/[a-z]+/\d+", s) for s in schemas)


def test_fields_are_the_keys_of_the_json():
    found = Lowest(100, 60, 58, 40, 41, (50,), 0.25, 3)
    stated = json.loads(found.to_json())
    assert list(stated) == ["schema", *(field.name for field in fields(Lowest))]
    assert stated["missed"] == [50] and found.to_text().splitlines() == found.lines()
