"""Options and fixtures of the whole test run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx
import pytest

import onnx_remat
from onnx_remat.process.compiled import build
from tests.support.graphs import mlp
from tests.support.warm import warm_processes

if "PYTEST_XDIST_WORKER" in os.environ:  # one a core: more threads of theirs would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def warm_opener() -> Iterator[None]:
    """What tests have prepared in processes of their own is so in processes forked from one that is warm."""
    with warm_processes():
        yield


@pytest.fixture(scope="session")
def mlp_model() -> onnx.ModelProto:
    return mlp(layers=12, batch=2048, width=32)


@pytest.fixture(scope="session")
def mlp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "mlp.onnx"
    onnx.save(mlp(layers=8, batch=2048, width=128), path)
    return path


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--fuzz N``: how many random cases of each kind; ``--slow``: everything."""
    parser.addoption("--fuzz", type=int, default=0, help="random cases of each kind (default: a few, the same ones)")
    parser.addoption("--slow", action="store_true", help="also the tests marked slow")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compile the kernels once, before workers start: each would compile all of them by itself."""
    package = Path(onnx_remat.__file__).parent
    controls = getattr(session.config.option, "numprocesses", None) and not hasattr(session.config, "workerinput")
    if controls and not any(package.rglob(f"*_{build(package)}-*.nbi")):
        subprocess.run([sys.executable, "-c", _COMPILES], cwd=session.config.rootpath, check=True)


_COMPILES = """
import onnx_remat
from onnx_remat.memory import layout
from tests.support.graphs import mlp
layout.load_greedy()
layout.load_search()
layout.load_later_searches()
for run_by in ("session", "loop"):
    onnx_remat.rewrite_model(mlp(layers=12, batch=32768, width=32), "60%", run_by=run_by, effort=0.5)
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked slow are left to ``--slow``, which `.ci/run` gives."""
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
