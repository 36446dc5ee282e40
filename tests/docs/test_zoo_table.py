"""The table of networks: what converts, what is kept, and what follows torch are told apart, and counted."""

from __future__ import annotations

import json

from scripts import results, zoo_table

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


def test_counts_and_cells_follow_from_the_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "DATA", tmp_path)
    zoo_table.keep(LINES, "command")
    counts = json.loads((tmp_path / "zoo-counts.json").read_text())["rows"]
    assert counts[0] == ["hand", "3", "3 (100.0 %)", "2.0e-06", "1", "1", "1", "3"]
    assert counts[-1] == ["all", "4", "3 (75.0 %)", "2.0e-06", "1", "1", "1", "3"]
    rows = {row[0]: row[3:] for row in json.loads((tmp_path / "zoo.json").read_text())["rows"]}
    assert rows["hand:kept"][:4] == ["2.0e-06", "59.0 %", "+5.0 %", "1.0e-07"]
    assert rows["hand:proved"][1] == "proved: none below 75 %"
    assert rows["hand:sought"][1] == "not found, none below 45 %"
    assert rows["other:no"] == ["no", "", "", "", "at timm/a.py:3 `x`"]
