"""The tables of the results pages: committed as JSON by the commands that measure them, put into the pages from there.

python -m scripts.results writes every table between the marks ``<!-- table NAME -->`` and ``<!-- end -->`` of
docs/results/*.md anew, from docs/results/data/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from onnx_remat.version import __version__

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "results"
DATA = PAGES / "data"
_MARKED = r"(?ms)^<!-- table (?P<name>[\w-]+) -->\n.*?^<!-- end -->$"


@dataclass(frozen=True, slots=True)
class Table:
    """A table: the command that measured it, the heads of its columns, its rows, and the version it was measured on."""

    command: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    version: str = __version__

    def to_markdown(self) -> str:
        """Its lines."""
        rows = [self.heads, ("---",) * len(self.heads), *self.rows]
        return "\n".join(" ".join(["|", *(f"{cell} |" if cell else "|" for cell in cells)]) for cells in rows)


def save(name: str, table: Table) -> None:
    """Write a table to docs/results/data/NAME.json."""
    DATA.mkdir(exist_ok=True)
    (DATA / f"{name}.json").write_text(json.dumps(asdict(table), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def printed(rows: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The rows of a table, each printed as soon as it is measured."""
    seen = []
    for row in rows:
        print(" | ".join(row), flush=True)
        seen.append(row)
    return tuple(seen)


def load(name: str) -> Table:
    """The table in docs/results/data/NAME.json."""
    found = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return Table(found["command"], tuple(found["heads"]), tuple(map(tuple, found["rows"])), found["version"])


def rendered(page: str) -> str:
    """A page with its tables as their JSON has them."""

    def table(mark: re.Match[str]) -> str:
        name = mark["name"]
        return f"<!-- table {name} -->\n{load(name).to_markdown()}\n<!-- end -->"

    return re.sub(_MARKED, table, page)


def main() -> None:
    """Render all pages."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(rendered(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
