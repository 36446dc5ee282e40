"""The line that shows progress: on a terminal only, and never in the way of what is printed."""

from __future__ import annotations

import re
import sys

import pytest

from onnx_remat.app.progress import Progress
from tests.support.terminal import on_a_terminal


def test_the_line_names_stage_elapsed_and_remaining_time(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    shown = Progress()
    shown._live = object()  # nothing is drawn
    shown("improving a plan of +6.3% compute", 0.25)
    began = shown._since
    text = shown.text(began + 10)
    assert text.startswith("improving a plan of +6.3% compute, ")
    assert text.endswith("about 30 s left of this stage")
    shown("verify", 0.0)
    assert "left" not in shown.text(began + 20)


def test_nothing_is_shown_off_a_terminal(capfd):
    shown = Progress()
    shown("plan", 0.5)
    shown.clear()
    assert capfd.readouterr() == ("", "")


def test_a_log_has_a_line_for_each_stage(capfd):
    for quiet in (False, True):
        shown = Progress(quiet, log=True)
        for stage in ("export", "export", "improving a plan of +6.3% compute", "improving a plan of +6.2% compute"):
            shown(stage, 0.5)
        shown.clear()
        assert capfd.readouterr().err == ("" if quiet else "onnx-remat: export\nonnx-remat: improving a plan\n")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(("quiet", "drawn"), [("False", True), ("True", False)])
def test_a_terminal_shows_it_and_gets_its_line_back(quiet, drawn):
    code = f"""
from onnx_remat.app.progress import Progress
shown = Progress(quiet={quiet})
shown("planning", 0.0)
shown.clear()
print("the report")
"""
    text = on_a_terminal(code)
    assert (re.search(r"planning, \d+ s so far", text) is not None) is drawn
    assert text.rstrip().endswith("the report")
    assert ("\x1b[2K" in text) is drawn
