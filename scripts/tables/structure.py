"""The package's structure, and the work of one default rewrite, at two versions.

Versions are commits, each looked at in a work tree of its own. *lines* are those of Python files; *circles* are groups
of modules that import each other (`grimp`). The rewrite is that of ``attention_stack`` to 60 %, with default options
and compiled functions on the disk. Its calls are counted while it runs: *simulations* are those outside of the search,
*requests* those to the process of native code, *records* the dataclasses of the package that it makes. *seconds* are
those of the command, the fastest of three.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.results import Table

ITEMS = ("2f623bb", "HEAD")
ROOT = Path(__file__).parents[2]
_MODEL = "attention_stack"
_COUNTED = {
    ("shapes.py", "infer"): "calls of shape inference",
    ("buffers.py", "simulate"): "simulations",
    ("layout.py", "solve"): "layouts",
    ("worker.py", "ask"): "requests",
    ("subprocess.py", "Popen.__init__"): "child processes",
}
_BRANCHES = re.compile(r"\bby_loop\b|\brun_by\b *[=!]=|isinstance\([^)]*(?:Loop|Session)Memory\)")
_OPTION = re.compile(r"allow[_-]recompute")
_TURNS = 3


def rows(version: str) -> Iterator[dict[str, Any]]:
    """The figures of one version."""
    with tempfile.TemporaryDirectory(prefix="onnx-remat-") as scratch:
        tree = Path(scratch) / "tree"
        _git("worktree", "add", "-q", "--detach", str(tree), version)
        try:
            known = _static(tree) | _asked(tree, "dynamic")
            name = _git("rev-parse", "--short=7", version)
            yield {"version": name, "figures": known | {"seconds": min(_seconds(tree) for _ in range(_TURNS))}}
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def tables(found: Sequence[dict[str, Any]], command: str) -> dict[str, Table]:
    """One row for each figure, one column for each version."""
    names = list(dict.fromkeys(name for each in found for name in each["figures"]))
    body = tuple((name, *(str(each["figures"].get(name, "")) for each in found)) for name in names)
    return {"structure": Table(command, ("figure", *(each["version"] for each in found)), body)}


def _static(tree: Path) -> dict[str, Any]:
    """Figures that are read from the files."""
    figures: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for folder in ("onnx_remat", "converters", "scripts", "tests"):
        sources = [path for path in (tree / folder).rglob("*.py") if not path.is_symlink()]
        texts[folder] = "\n".join(path.read_text() for path in sources)
        figures[f"files in {folder}/"] = len(sources)
        figures[f"lines in {folder}/"] = f"{texts[folder].count(chr(10)):,}"
    for room in sorted(
        {path.relative_to(tree / "onnx_remat").parts[0] for path in (tree / "onnx_remat").rglob("*/*.py")}
    ):
        sources = [path for path in (tree / "onnx_remat" / room).rglob("*.py") if not path.is_symlink()]
        lines = sum(path.read_text().count("\n") for path in sources)
        if sources:
            figures[f"`{room}/`: files, lines"] = f"{len(sources)}, {lines:,}"
    package = texts["onnx_remat"]
    loose = [path for path in (tree / "onnx_remat").glob("*.py") if not path.stem.startswith("__")]
    figures["modules outside of rooms"] = len(loose)
    figures["lines of them"] = f"{sum(path.read_text().count(chr(10)) for path in loose):,}"
    figures["branches on what the budget covers"] = len(_BRANCHES.findall(package))
    figures["lines that name the option allow_recompute"] = sum(1 for x in package.split("\n") if _OPTION.search(x))
    return figures | _asked(tree, "imports")


def _asked(tree: Path, what: str) -> dict[str, Any]:
    """What `measure` prints in a process that imports the package of a work tree."""
    command = [sys.executable, "-P", __file__, what, str(tree)]
    environment = {"PYTHONPATH": str(tree), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _seconds(tree: Path) -> float:
    command = [sys.executable, "-m", "onnx_remat", f"sample_models/{_MODEL}.onnx", "out.onnx", "--force"]
    began = time.monotonic()
    subprocess.run([*command, "--budget", "60%"], cwd=tree, check=True, capture_output=True)
    return round(time.monotonic() - began, 1)


def _imports() -> dict[str, Any]:
    """Circles of imports, and public names."""
    import grimp
    import networkx as nx

    import onnx_remat

    found = grimp.build_graph("onnx_remat", cache_dir=None)
    graph = nx.DiGraph((a, b) for a in found.modules for b in found.find_modules_directly_imported_by(a))
    circles = [group for group in nx.strongly_connected_components(graph) if len(group) > 1]
    return {"circles": len(circles), "public names": sum(not name.startswith("_") for name in dir(onnx_remat))}


def _dynamic() -> dict[str, Any]:
    """Calls and records of one rewrite."""
    import onnx_remat

    calls: Counter[str] = Counter()
    records: set[str] = set()

    def count(frame: Any, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        name = _COUNTED.get((Path(code.co_filename).name, code.co_qualname))
        if name is not None and not (name == "simulations" and "/plan/" in frame.f_back.f_code.co_filename):
            calls[name] += 1
        if code.co_name == "__init__" and code.co_filename == "<string>":
            kind = type(frame.f_locals["self"])
            if kind.__module__.startswith("onnx_remat"):
                records.add(kind.__qualname__)

    threading.setprofile(count)
    sys.setprofile(count)
    onnx_remat.rewrite_model(f"sample_models/{_MODEL}.onnx", "60%")
    sys.setprofile(None)
    return {name: calls[name] for name in _COUNTED.values()} | {"records": len(records)}


if __name__ == "__main__":
    print(json.dumps({"imports": _imports, "dynamic": _dynamic}[sys.argv[1]]()))
