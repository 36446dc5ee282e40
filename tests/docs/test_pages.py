"""README and the site: every Python block runs as written, every link leads somewhere, the site builds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.support.graphs import mlp

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
NEEDS = {"sources/pytorch": "onnxscript", "README": "onnxscript", "sources/jax": "optax", "guides/distributed": "torch"}


def named(page: Path) -> str:
    return page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")


def blocks(page: Path) -> list[str]:
    return re.findall(r"(?ms)^```python\n(.*?)^```$", page.read_text())


def rewrites(page: Path) -> list[str]:
    """The commands, of a page on a source, that rewrite the step of its blocks to ``small.onnx``."""
    found = re.findall(r"`(onnx-remat train\.onnx small\.onnx [^`]+)`", page.read_text())
    return found if named(page) in ("sources/onnx", "sources/jax") else []


# The README trains the model of tests/converters/test_budgeted.py, of which 60 % are asked for there, too.
SLOW = ("README", "index", "sources/onnx", "sources/pytorch", "sources/jax", "guides/python", "guides/distributed")
WITH_CODE = [
    pytest.param(page, marks=pytest.mark.slow if named(page) in SLOW else (), id=named(page))
    for page in PAGES
    if blocks(page)
]


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_python_blocks_of_a_page_run_one_after_the_other(page, tmp_path):
    """In a fresh process, alongside train.onnx, and small.onnx where the page does not write it."""
    pytest.importorskip(NEEDS.get(named(page), "onnxruntime"))
    code = "\n".join(blocks(page))
    for name in ("train.onnx", *(() if 'save("small.onnx"' in code else ("small.onnx",))):
        onnx.save(mlp(layers=8, batch=8192, width=64), tmp_path / name)
    (tmp_path / "page.py").write_text(code)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in rewrites(page):
        arguments = [sys.executable, "-m", *command.replace("-", "_", 1).split(), "--effort", "0.3", "--force"]
        done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_to_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        where = (page.parent / path).resolve() if path else page
        assert where.exists(), target
        if heading:
            titles = re.findall(r"(?m)^#+ (.+)$", where.read_text())
            assert heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], target


def test_the_tests_that_a_page_names_exist():
    named_there = re.findall(r"`(tests/\S+\.py)::(\w+)`", "".join(page.read_text() for page in PAGES))
    assert len(named_there) > 20
    assert [(path, name) for path, name in named_there if f"\ndef {name}(" not in (ROOT / path).read_text()] == []


def test_the_modules_in_the_table_of_rooms_exist():
    """In their room, or in the package where the cell names a room or a file; hatch_build.py lies next to it."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where things live")[2].partition("House rules")[0]
    places, room = [], ""
    for line in re.findall(r"(?m)^\| (?:`|\(top| \|).+$", table):
        first, _, modules = (cell.strip() for cell in line.strip("|").split("|"))
        room = first.strip("`/") if first else room
        room = "" if room.startswith("(top") else room
        for name in re.findall(r"`([\w./]+)`", re.sub(r"\([^)]*\)", "", modules)):
            folders = ROOT, ROOT / "onnx_remat", ROOT / "onnx_remat" / room
            if not any((folder / f"{name}{end}").exists() for folder in folders for end in ("", ".py")):
                places.append(f"{room}/{name}")
    assert table.count("\n|") > 40
    assert places == []


def test_the_paths_that_contributing_names_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text().replace("<room>", "ort").replace("<name>", "cpu")
    named_there = [name for name in re.findall(r"`(\w[\w./]*/[\w./]*)`", text) if "NAME" not in name]
    rooms = ("onnx_remat", "converters", *(f"onnx_remat/{room}" for room in ("plan", "session", "ort", "findings")))
    folders = ROOT, *(ROOT / room for room in rooms)
    lost = [n for n in named_there if not any((at / f"{n}{end}").exists() for at in folders for end in ("", ".py"))]
    assert len(named_there) > 60
    assert lost == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_every_page_is_in_one_side_bar_of_at_most_fifteen():
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    tabs = [re.findall(r"- (\S+\.md)$", tab, re.M) for tab in re.split(r"(?m)^  - ", navigation)]
    assert max(map(len, tabs)) <= 15
    assert sorted(page for tab in tabs for page in tab) == sorted(pages)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", tmp_path], cwd=ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "reference" / "api" / "index.html").read_text().count("rewrite_model") > 2
