"""The page on reports as JSON names every field of each of them."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from onnx_remat.app.bench import Benchmark
from onnx_remat.findings.check import CheckResult
from onnx_remat.findings.estimate import Estimate
from onnx_remat.findings.explain import Explanation
from onnx_remat.findings.lowest import Lowest
from onnx_remat.findings.sweep import Curve
from onnx_remat.rewrite.report import Report

PAGE = Path(__file__).parents[2] / "docs/reference/report-json.md"
FINDINGS = Report, Estimate, Explanation, CheckResult, Curve, Lowest, Benchmark


@pytest.mark.parametrize("finding", FINDINGS)
def test_the_page_names_every_field_of_a_finding_and_no_other(finding):
    section = PAGE.read_text().partition(f"\n## `{finding.schema}`\n")[2].partition("\n## ")[0]
    named = [name for cell in re.findall(r"(?m)^\| (`.+?) \|", section) for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(field.name for field in fields(finding))


def test_the_page_has_a_section_for_every_schema_and_no_other():
    assert re.findall(r"(?m)^## `(.+)`$", PAGE.read_text()) == [finding.schema for finding in FINDINGS]
