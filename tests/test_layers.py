"""The walls: which room may import which (``[tool.importlinter]`` in pyproject.toml), and one seam for a provider."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import grimp
import networkx as nx
import pytest

from onnx_remat.errors import UsageError
from onnx_remat.options import Options, PlanningOptions
from onnx_remat.ort.kernels.registry import PROVIDERS, kernels_of
from tests.support.slow import few

ROOT = Path(__file__).resolve().parents[1]
_LINT = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Hold the packages in a folder against the contracts in its pyproject.toml."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-c", _LINT], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def copied(folder: Path) -> Path:
    for package in ("onnx_remat", "converters"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_the_map_has_every_module():
    """A newcomer finds each module in CONTRIBUTING's table of rooms, or in the text on how to change it."""
    quoted = " ".join(re.findall(r"`[^`]+`", (ROOT / "CONTRIBUTING.md").read_text()))
    named = {name.split("/")[-1].removesuffix(".py") for name in re.findall(r"[\w./]+", quoted)}
    modules = {path.stem for path in (ROOT / "onnx_remat").rglob("*.py") if not path.stem.startswith("__")}
    assert len(modules) > 100
    assert sorted(modules - named) == []


def test_imports_go_down():
    found = lint(ROOT)
    assert found.returncode == 0, found.stdout


WRONG = [
    ("onnx_remat/ir/graph.py", "from onnx_remat.ort import runtime", "onnx_remat.ir.graph -> onnx_remat.ort.runtime"),
    (
        "onnx_remat/plan/flow.py",
        "def f():\n    import onnx_remat.rewrite.fit",
        "onnx_remat.plan.flow -> onnx_remat.rewrite",
    ),
    ("onnx_remat/ort/kernels/base.py", "from onnx_remat.ort.kernels import cpu", "onnx_remat.ort.kernels.base -> "),
    ("onnx_remat/plan/bounds.py", "from onnx_remat.plan.search import core", "onnx_remat.plan.bounds -> "),
    ("onnx_remat/write/extra.py", "from onnx_remat.plan import flow", "onnx_remat.write.extra -> onnx_remat.plan.flow"),
    ("converters/tape.py", "from .passes import simplify", "converters.tape -> converters.passes.simplify"),
    (
        "converters/passes/shorten_masked_softmax.py",
        "from ..autodiff import loss",
        "converters.passes.shorten_masked_softmax -> converters.autodiff",
    ),
    ("converters/jax/step.py", "from ..pytorch import arrays", "converters.jax.step -> converters.pytorch.arrays"),
]


@pytest.mark.parametrize(("module", "line", "named"), few(WRONG, WRONG[1::5], several=True))
def test_an_import_that_goes_up_or_sideways_is_named(module, line, named, tmp_path):
    path = copied(tmp_path) / module
    path.write_text((path.read_text() if path.exists() else "") + f"\n\n{line}\n")
    found = lint(tmp_path)
    assert found.returncode == 1 and named in found.stdout


@pytest.mark.parametrize("package", ["onnx_remat", "converters"])
def test_a_new_room_must_be_placed(package, tmp_path):
    (copied(tmp_path) / package / "attic.py").write_text("")
    found = lint(tmp_path)
    assert found.returncode == 1 and "attic" in found.stdout


def test_names_of_functions_for_other_processes_go_down(tmp_path):
    """A process calls ``module:function``: these must not go up either, but for the one that compares two sessions."""
    named = []
    for path in sorted((copied(tmp_path) / "onnx_remat").rglob("*.py")):
        module = path.relative_to(tmp_path).with_suffix("").as_posix().replace("/", ".")
        tasks = set(re.findall(r'"(onnx_remat[.\w]*):\w+"', path.read_text())) - {module}
        named += [(module, task) for task in sorted(tasks)]
        path.write_text(path.read_text() + "".join(f"\n\nimport {task}\n" for task in sorted(tasks)))
    assert ("onnx_remat.session.lean_graph", "onnx_remat.session.loading") in named
    found = lint(tmp_path)
    up = set(re.findall(r"- (onnx_remat[.\w]* -> onnx_remat[.\w]*)", found.stdout))
    assert up == {"onnx_remat.session.plan_session -> onnx_remat.measure.verify"}, found.stdout


def test_no_circles():
    graph = grimp.build_graph("onnx_remat", "converters", cache_dir=None)
    edges = [(module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)]
    assert len(edges) > 300
    assert [sorted(c) for c in nx.strongly_connected_components(nx.DiGraph(edges)) if len(c) > 1] == []


def test_execution_providers_are_named_where_their_facts_are():
    named = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "onnx_remat").rglob("*.py"))
        if "ExecutionProvider" in path.read_text()
    ]
    assert "onnx_remat/ort/kernels/cpu.py" in named
    assert [path for path in named if not path.startswith("onnx_remat/ort/")] == []


def test_editors_are_shown_every_option():
    hints = get_type_hints(PlanningOptions)
    assert hints == get_type_hints(Options) and len(hints) > 10


def test_unknown_providers_are_refused():
    assert [kernels_of(name).name for name in PROVIDERS] == ["cpu", "cuda"]
    with pytest.raises(UsageError, match="for provider 'cuda', not 'cpu'"):
        kernels_of("cpu", 1 << 20)
    with pytest.raises(UsageError, match="unknown provider 'cup'; did you mean 'cpu'"):
        kernels_of("cup")
