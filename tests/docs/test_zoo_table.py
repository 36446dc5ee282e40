"""The table of networks: what converts, what is kept, and what follows torch are distinguished, and counted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.docs.test_pages import ROOT

pytest.importorskip("onnxscript")

CONVERTED = {"parameters": 10, "nodes": 5, "error": "2.0e-06", "before": 200, "loss_error": 1e-7}
LINES = [
    {"network": "hand:kept", **CONVERTED, "after": 118, "compute": 0.05},
    {"network": "hand:proved", **CONVERTED, "refused": "budget is impossible, which is proved", "bound": 150},
    {"network": "hand:sought", **CONVERTED, "refused": "no plan found for budget", "bound": 90},
    {
        "network": "other:no",
        "parameters": 3,
        "failed": "converts",
        "message": "ConversionError: at /usr/timm/a.py:3 `x`",
    },
]


@pytest.mark.slow
def test_counts_and_cells_follow_from_the_lines(tmp_path):
    """Of a journal, from which the table is printed without measuring anything."""
    key, journal = json.dumps(["scripts.tables.zoo", {}]), tmp_path / "lines.jsonl"
    entries = ({"key": key, "item": line["network"], "found": [line]} for line in LINES)
    journal.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    command = [sys.executable, "-m", "scripts.bench", "zoo", *(line["network"] for line in LINES)]
    done = subprocess.run([*command, "--journal", journal], cwd=ROOT, capture_output=True, text=True, check=True)
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in done.stdout.splitlines() if line[:1] == "|"]
    rows = {row[0]: row[1:] for row in cells}
    assert rows["hand"] == ["3", "3 (100.0 %)", "2.0e-06", "1", "1", "1", "3"]
    assert rows["all"] == ["4", "3 (75.0 %)", "2.0e-06", "1", "1", "1", "3"]
    assert rows["hand:kept"][2:6] == ["2.0e-06", "59.0 %", "+5.0 %", "1.0e-07"]
    assert rows["hand:proved"][3] == "proved: none below 75 %"
    assert rows["hand:sought"][3] == "not found, none below 45 %"
    assert rows["other:no"][2] == "no" and rows["other:no"][-1] == "at timm/a.py:3 `x`"
