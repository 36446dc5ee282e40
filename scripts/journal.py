"""Rows of a long measurement, kept as JSON lines: a run goes on where the last one ended, however that was."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LACKS = ("error", "failed", "no_graph", "no_least")
"""What a row says of a part that could not be measured."""


@dataclass(frozen=True, slots=True)
class Journal:
    """Rows in a file, or nowhere; those of which a part failed are measured `again` if asked for.

    A key states the measurement and all that its figures depend on, since files are shared.
    """

    path: Path | None
    again: bool = False

    def rows(self) -> list[dict[str, Any]]:
        """All rows; a line that was cut off is none."""
        found = []
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path and self.path.exists() else ():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
        return found

    def row(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The last row with all that is in a key, unless it is to be measured again."""
        alike = [row for row in self.rows() if key.items() <= row.items()]
        if not alike or (self.again and any(alike[-1].get(each) for each in _LACKS)):
            return None
        return alike[-1]

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row, and return it."""
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            cut = self.path.exists() and not self.path.read_bytes().endswith(b"\n")
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" * cut + json.dumps(row) + "\n")
        return row

    def measured(self, key: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """The row of a key, measured unless it is there."""
        return self.row(key) or self.add({**key, **measure()})
