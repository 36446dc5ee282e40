"""Standard streams that are closed, full, or know few letters: the exit code still says what became of the files."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

from tests.support.graphs import mlp
from tests.support.slow import few

pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    model = mlp(layers=2, batch=8, width=4)
    for node in model.graph.node:
        node.name = f"\u00e9\u4e2d{node.name}"
    onnx.save(model, folder / "in.onnx")
    return folder


REDIRECTED = [
    ("> /dev/null", 0, True),
    (">&-", 0, True),
    ("2>&-", 0, True),
    ("| true", 0, True),
    ("> /dev/full", 4, False),
    ("2> /dev/full", 0, True),
]


@pytest.mark.parametrize(
    ("redirect", "code", "written"),
    few(REDIRECTED, REDIRECTED[4:5], several=True),
)
def test_exit_codes_say_whether_files_were_written(redirect, code, written, home):
    out = home / "out.onnx"
    out.unlink(missing_ok=True)
    command = f"set -o pipefail; {sys.executable} -m onnx_remat in.onnx out.onnx --budget 100% -v {redirect}"
    environment = os.environ | {"PYTHONIOENCODING": "ascii:strict", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(["bash", "-c", command], cwd=home, env=environment, capture_output=True, check=False)
    assert "Traceback" not in done.stderr.decode()
    assert (done.returncode, out.exists()) == (code, written), done.stderr
    if written:
        onnx.load(out)  # nothing else was printed into it


_INTERRUPTS = """
import importlib.abc, runpy, sys

class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == module:
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt as error:
                if how == "as it is":
                    raise
                raise ImportError("initialization failed") from error

module, how = sys.argv[1:3]
sys.meta_path.insert(0, Interrupts())
sys.argv = ["onnx-remat", "estimate", "no such file"]
runpy.run_module("onnx_remat", run_name="__main__")
"""


@pytest.mark.parametrize("how", ["as it is", "out of a module in C"])
@pytest.mark.parametrize("module", ["onnx_remat.app.flags", "onnx_remat.ir.graph", "onnx_remat.ir.model_io"])
def test_an_interruption_of_an_import_is_one_line(module, how):
    command = [sys.executable, "-c", _INTERRUPTS, module, how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert re.fullmatch(r"onnx-remat( estimate)?: interrupted; nothing was written\n", done.stderr)


@pytest.mark.parametrize("name", few(["SIGINT", "SIGTERM"], ["SIGINT"]))
def test_a_signal_that_a_finalizer_swallows_ends_the_command(name):
    """Python prints what is raised there, and goes on: the command would end with 0."""
    script = f"""
import signal, time
from onnx_remat.app.flags import guarded

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.{name})
        for _ in range(1000):
            pass  # the signal's handler runs between two instructions

def command(arguments):
    Finalized()
    time.sleep(1)
    return 0

raise SystemExit(guarded("onnx-remat", command, []))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    said = {"SIGINT": "interrupted", "SIGTERM": "terminated"}[name]
    assert done.stderr == f"onnx-remat: {said}; nothing was written\n"
    assert done.returncode == {"SIGINT": 130, "SIGTERM": -15}[name]
