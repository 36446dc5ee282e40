"""One term per concept: words that the glossary replaced stay out of code, messages and pages."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

HOME = Path(__file__).parents[2]
INSTEAD = {
    "anew": "again",
    "beside": "alongside",
    "foresee": "predict",
    "foreseen": "predicted",
    "told": "given, stated",
    "made again": "recomputed",
    "put out": "output",
    "puts out": "outputs",
    "to no good": "raising the peak",
    "taking_over": "with_slab_donations",
    "viewless": "LivenessModel",
    "private_copy": "lean_graph",
    "residence": "training_memory",
}
"""Words that are gone, and what stands in their place."""

FIELDS = ("    foreseen : int", "    foreseen: int = 0", "foreseen=", "parts.foreseen")
"""Names of public fields stay: `distributed.parts.Parts.foreseen`."""


@cache
def lines() -> list[tuple[str, str]]:
    """The lines of code, tests and documentation, each with its place; no history and no recorded results."""
    folders = "onnx_remat", "converters", "examples", "scripts", "sample_models", "tests"
    code = [path for folder in folders for path in HOME.glob(f"{folder}/**/*.py") if path != Path(__file__)]
    pages = [HOME / "README.md", HOME / "CONTRIBUTING.md", *HOME.glob("docs/**/*.md")]
    paths = sorted(path for path in (*code, *pages) if "results" not in path.parts and "site" not in path.parts)
    assert len(paths) > 300
    return [
        (f"{path.relative_to(HOME)}:{number}", line)
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if not any(field in line for field in FIELDS)
    ]


@pytest.mark.parametrize("word", INSTEAD)
def test_a_word_that_is_gone_stays_gone(word):
    pattern = re.compile(rf"(?<![\w-]){re.escape(word)}(?!\w)", re.IGNORECASE)
    found = [place for place, line in lines() if pattern.search(line)]
    assert not found, f"write {INSTEAD[word]!r} for {word!r}"
