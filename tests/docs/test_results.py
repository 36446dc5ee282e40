"""Results pages: every table is that of its JSON, which names the command that measured it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_commands import test_python_commands_name_files_that_are_there_and_flags_that_they_have as named
from tests.docs.test_pages import ROOT

FOLDER = ROOT / "docs" / "results"
PAGES = sorted(FOLDER.glob("*.md"))
DATA = sorted((FOLDER / "data").glob("*.json"))


def checked(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.results", "--check", "--pages", str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_tables_are_those_of_their_json():
    assert checked(FOLDER).stderr == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_table_is_without_marks(page: Path):
    marked = re.sub(r"(?ms)^<!-- table .*?^<!-- end -->$", "", page.read_text(encoding="utf-8"))
    assert not re.findall(r"(?m)^\|.*\|$", marked), "a table without marks: its figures have no source"


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_every_table_is_whole_and_shown_once(path: Path):
    table = json.loads(path.read_text(encoding="utf-8"))
    assert table["command"] and table["version"]
    assert {len(row) for row in table["rows"]} == {len(table["heads"])}
    shown = [page for page in PAGES if f"<!-- table {path.stem} -->" in page.read_text(encoding="utf-8")]
    assert len(shown) == 1


@pytest.mark.parametrize("path", DATA, ids=lambda path: path.stem)
def test_the_command_of_a_table_can_be_given(path: Path):
    """Unless it says of which commit the script is."""
    command = json.loads(path.read_text(encoding="utf-8"))["command"]
    if command.startswith("python ") and ", as of commit " not in command:
        named(command)


def test_a_figure_typed_by_hand_is_found(tmp_path: Path):
    shutil.copytree(FOLDER, tmp_path / "results")
    page = tmp_path / "results" / "chains.md"
    page.write_text("<!-- table chains -->\n| a |\n| --- |\n| 1 |\n<!-- end -->", encoding="utf-8")
    assert "chains.md" in checked(tmp_path / "results").stderr


def test_the_readme_states_the_figures_of_the_table():
    """Memory of a language model's process in MB, and how much longer the checkpointed step takes."""
    rows = json.loads((FOLDER / "data" / "processes.json").read_text(encoding="utf-8"))["rows"]
    of = {runner: (int(mb), int(ms)) for model, runner, _, mb, _, _, ms, *_ in rows if model == "language, 48 texts"}
    plain, checkpointed, ours = (of[name] for name in ("PyTorch", "PyTorch, checkpointed", "budgeted, 60%"))
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for said in (
        f"takes {ours[0]} MB; in PyTorch it takes {plain[0]:,} MB",
        f"{checkpointed[0]:,} MB with each block checkpointed",
        f"takes {checkpointed[1] / ours[1]:.2f} times as long",
    ):
        assert said in text
