"""The page on the report as JSON names every field of it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from onnx_remat.rewrite.report import Report

PAGE = Path(__file__).parents[2] / "docs/reference/report-json.md"


def test_the_page_names_every_field_of_the_report_and_no_other():
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = [name.strip(" `") for row in rows for name in row.split(",")]
    assert sorted(named) == sorted(field.name for field in fields(Report))
