"""The tables of the results pages: committed as JSON by the commands that measure them, put into the pages from there.

python -m scripts.results writes every table between the marks ``<!-- table NAME -->`` and ``<!-- end -->`` of
docs/results/*.md again, from docs/results/data/NAME.json; with ``--check`` it says which pages that would change.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
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


def load(name: str, data: Path = DATA) -> Table:
    """The table in docs/results/data/NAME.json, or in another folder."""
    found = json.loads((data / f"{name}.json").read_text(encoding="utf-8"))
    return Table(found["command"], tuple(found["heads"]), tuple(map(tuple, found["rows"])), found["version"])


def rendered(page: str, data: Path = DATA) -> str:
    """A page with its tables as their JSON has them."""

    def table(mark: re.Match[str]) -> str:
        name = mark["name"]
        return f"<!-- table {name} -->\n{load(name, data).to_markdown()}\n<!-- end -->"

    return re.sub(_MARKED, table, page)


def main() -> None:
    """Render all pages, or check that they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 where a page is not as its tables are")
    parser.add_argument("--pages", type=Path, default=PAGES, help="folder (default: docs/results)")
    given = parser.parse_args()
    stale = []
    for path in sorted(given.pages.glob("*.md")):
        text = path.read_text(encoding="utf-8")
        made = rendered(text, given.pages / "data")
        if made != text:
            stale.append(path.name)
            if not given.check:
                path.write_text(made, encoding="utf-8")
    if given.check and stale:
        sys.exit(f"{', '.join(stale)}: run python -m scripts.results")


if __name__ == "__main__":
    main()
