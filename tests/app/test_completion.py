"""What a shell is given when the tab key is pressed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.slow import few

pytest.importorskip("argcomplete")


LINES = [
    ("onnx-remat sw", {"sweep"}),
    ("onnx-remat s", {"split", "sweep", "some.onnx"}),
    ("onnx-remat sweep --lo", {"--loss", "--lowest"}),
    ("onnx-remat in.onnx out.onnx --bud", {"--budget"}),
    ("onnx-remat in.onnx out.onnx --budget 60% --verify ", {"none", "check", "run"}),
    ("onnx-remat rewrite in.onnx out.onnx --dry", {"--dry-run"}),
    ("onnx-remat explain so", {"some.onnx"}),
]


@pytest.mark.parametrize(("line", "wanted"), few(LINES, LINES[1:5:3], several=True))
def test_the_next_word_is_known(line, wanted, tmp_path):
    (tmp_path / "some.onnx").touch()
    asked = {
        "_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"), "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line, "COMP_POINT": str(len(line)), "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    subprocess.run([sys.executable, "-P", "-m", "onnx_remat"], cwd=tmp_path, env=os.environ | asked, check=False)
    assert {word.strip() for word in (tmp_path / "answer").read_text().split("\n")} == wanted
