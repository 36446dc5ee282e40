"""What the converter takes from torch beyond its documented interface is there, and taken in two modules alone."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
from onnx_remat.converters.pytorch import private_torch

FOLDER = Path(private_torch.__file__).parent
PRIVATE = ("private_torch.py", "private_state.py")


def imports(path: Path) -> list[str]:
    """Absolute names of all that a module imports, those of this package as paths below its folder."""
    made = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            made += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            made += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folder = path.parents[node.level - 1]
            if folder.is_relative_to(FOLDER):
                home = folder.joinpath(*(node.module or "").split(".")) if node.module else folder
                made += [str(home)] if node.module else [str(home / alias.name) for alias in node.names]
    return made


def attributes(path: Path) -> list[str]:
    """Attributes written out in full, ``torch._decomp.x``."""
    return [ast.unparse(node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]


def is_private(name: str) -> bool:
    parts = name.split(".")
    operators = parts[:3] == ["torch", "ops", "aten"]
    hidden = [p for p in parts if p.startswith("_") and not p.endswith("__")]  # Python's own names are public
    return parts[0] == "torch" and not operators and bool(hidden or "experimental" in parts)


def test_every_private_name_exists():
    assert all(hasattr(private_torch, name) for name in private_torch.__all__)
    assert private_torch.without_translation(20)
    with private_torch.compiling():
        assert torch.compiler.is_exporting()
    with private_torch.without_checkpoints(), private_torch.computed_now(), private_torch.unvalidated():
        assert torch.distributions.Distribution._validate_args is False


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.py")), ids=lambda path: path.stem)
def test_no_other_module_uses_one(path):
    if path.name in PRIVATE:
        assert any(map(is_private, imports(path)))
    else:
        assert not [name for name in (*imports(path), *attributes(path)) if is_private(name)]


def test_no_circle_of_modules():
    modules = [path.with_suffix("") for path in FOLDER.rglob("*.py")]
    known = {str(m.parent if m.name == "__init__" else m): m for m in modules}
    graph = {name: {i for i in imports(m.with_suffix(".py")) if i in known and i != name} for name, m in known.items()}
    assert any(graph.values())
    TopologicalSorter(graph).prepare()  # raises CycleError
