"""Results pages: every table is that of its JSON, which names the command that measured it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import results

PAGES = sorted(results.PAGES.glob("*.md"))
NAMES = sorted(path.stem for path in results.DATA.glob("*.json"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tables_are_those_of_their_json(page: Path):
    text = page.read_text(encoding="utf-8")
    assert results.rendered(text) == text, "run python -m scripts.results"
    marked = re.sub(r"(?ms)^<!-- table .*?^<!-- end -->$", "", text)
    assert not re.findall(r"(?m)^\|.*\|$", marked), "a table without marks: its figures have no source"


@pytest.mark.parametrize("name", NAMES)
def test_every_table_is_whole_and_shown_once(name):
    table = results.load(name)
    assert table.command and table.version
    assert {len(row) for row in table.rows} == {len(table.heads)}
    shown = [page for page in PAGES if f"<!-- table {name} -->" in page.read_text(encoding="utf-8")]
    assert len(shown) == 1


def test_a_figure_typed_by_hand_is_found():
    page = f"<!-- table {NAMES[0]} -->\n| a |\n| --- |\n| 1 |\n<!-- end -->"
    assert results.rendered(page) != page
