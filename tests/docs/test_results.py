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


def test_the_readme_states_the_figures_of_the_tables():
    """A vision transformer's step, whole processes, and on how many networks ours takes no longer than others."""
    points = {row[1]: row for row in _rows("frontier") if row[0] == "vision transformer"}
    of = {runner: (points[runner][4], round(float(points[runner][2]))) for runner in points}
    steps: dict[str, dict[str, list[str]]] = {}
    for model, runner, *rest in _rows("race"):
        steps.setdefault(model, {})[runner] = rest
    fast = sum(int(of_model["ours"][2]) <= int(of_model["torch.compile"][2]) for of_model in steps.values())
    lean = sum(
        int(of_model["ours, 60%"][2] or 10**9) <= int(of_model["PyTorch eager"][2]) for of_model in steps.values()
    )
    processes: dict[str, dict[str, list[str]]] = {}
    for model, runner, *rest in _rows("processes"):
        processes.setdefault(model, {})[runner] = rest
    pairs = [(of_model["budgeted, 60%"], of_model["PyTorch, checkpointed"]) for of_model in processes.values()]
    times = sorted(float(ours[5]) / float(theirs[5]) for ours, theirs in pairs)
    smaller = sum(int(ours[2]) < int(theirs[2]) for ours, theirs in pairs)
    words = {7: "seven", 8: "eight", 9: "nine", 10: "ten", 11: "eleven", 12: "twelve", 13: "thirteen", 14: "fourteen"}
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for said in (
        "takes {} ms and {} MB in PyTorch".format(*of["PyTorch eager"]),
        "{} ms and {} MB with each block checkpointed".format(*of["PyTorch checkpointed"]),
        "{} ms and {} MB with onnx-remat at 60 %".format(*of["ours, 60%"]),
        f"{words[fast]} of {words[len(steps)]} networks",
        f"at most the time of PyTorch's own on {words[lean]}",
        f"{words[len(pairs)]} models take {times[0]:.2f} to {times[-1]:.2f} of the time of PyTorch with checkpointed",
        f"{words[smaller]} of them in less memory",
    ):
        assert said in text


def _rows(table: str) -> list[list[str]]:
    return json.loads((FOLDER / "data" / f"{table}.json").read_text(encoding="utf-8"))["rows"]
