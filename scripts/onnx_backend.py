"""ONNX's own backend tests, rewritten and through `Session` with every value in its slab, against stock ONNX Runtime.

    python -m scripts.onnx_backend                       # a few minutes; the table, then why what was refused
    python -m scripts.onnx_backend --only softmax -v     # the tests whose names contain this
    python -m scripts.onnx_backend --save                # the tables onnx-backend and onnx-backend-refused

A test counts where stock ONNX Runtime passes it at its defaults. Results are compared to the last bit with
optimisations off, and to rounding at the other levels.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict

from scripts.results import Table, save
from tests.support import backend_cases
from tests.support.outcomes import FAILED, KINDS, RAISED, REFUSED, WRONG, Outcome
from tests.support.survivors import Died, answers

COMMAND = "python -m scripts.onnx_backend --save"
DIED, ANY = "died", "in any of them"
Found = dict[str, dict[str, Outcome]]
"""Outcomes by name and column."""


def main() -> int:
    """Print both tables; 1 where anything is wrong, fails in the middle, raises or dies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="tests whose names contain this")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300.0, help="that one test may take")
    parser.add_argument("--save", action="store_true", help="put the tables among the results")
    parser.add_argument("-v", "--verbose", action="store_true", help="also the tests that do not count, and why")
    asked = parser.parse_args()
    names = backend_cases.names()
    jobs = [number for number, name in enumerate(names) if asked.only in name]
    found: Found = {}
    unusable: dict[str, str] = {}
    start = time.monotonic()
    for number, answer in answers(backend_cases.try_case, jobs, asked.processes, asked.seconds):
        if isinstance(answer, str):
            unusable[names[number]] = answer
        else:
            died = isinstance(answer, Died)
            found[names[number]] = {ANY: Outcome(DIED, answer.cause)} if died else answer
    found = {name: found[name] for name in names if name in found}
    for name, said in unusable.items() if asked.verbose else ():
        print(f"not counted: {name}: {said}")
    wrong = complaints(found)
    print("\n".join(wrong))
    tables = {"onnx-backend": counts(found, COMMAND), "onnx-backend-refused": reasons(found, COMMAND)}
    for name, table in tables.items():
        print("\n" + table.to_markdown())
        if asked.save:
            save(name, table)
    print(f"\n{len(found)} tests count, {len(unusable)} do not, {time.monotonic() - start:.0f} s")
    return int(bool(wrong))


def complaints(found: Found) -> list[str]:
    """A line for each that is wrong, fails in the middle, raises or dies."""
    return [
        f"{outcome.kind}: {name}, {column}: {outcome.message}"
        for name, columns in found.items()
        for column, outcome in columns.items()
        if outcome.kind in (WRONG, FAILED, RAISED, DIED)
    ]


def counts(found: Found, command: str) -> Table:
    """How many came to what, by column; last, through `Session` at all three levels."""
    by_column: dict[str, Counter[str]] = defaultdict(Counter)
    for columns in found.values():
        for column, outcome in columns.items():
            by_column[column][outcome.kind] += 1
        kinds = [outcome.kind for column, outcome in columns.items() if column.startswith("Session")]
        by_column["Session, all levels"][max(kinds, key=(*KINDS, DIED).index, default=DIED)] += 1
    heads = ("", *KINDS, DIED)
    rows = tuple(
        (column, *(str(counted[kind]) for kind in heads[1:])) for column, counted in by_column.items() if column != ANY
    )
    return Table(command, heads, rows)


def reasons(found: Found, command: str) -> Table:
    """Why some were refused: each reason, how many by rewriting and by `Session`, and one of them."""
    named: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    shown: dict[str, str] = {}
    for name, columns in found.items():
        for column, outcome in columns.items():
            if outcome.kind == REFUSED:
                where = named[outcome.reason][column.partition(" ")[0]]
                shown.setdefault(outcome.reason, outcome.message)
                if name not in where:
                    where.append(name)
    rows = sorted(
        (shown[reason].replace("|", "/"), len(by["rewrite"]), len(by["Session"]), (by["Session"] or by["rewrite"])[0])
        for reason, by in named.items()
    )
    rows.sort(key=lambda row: -max(row[1], row[2]))
    cells = tuple((text, str(rewritten), str(opened), name) for text, rewritten, opened, name in rows)
    return Table(command, ("refused because", "rewrite", "Session", "one of them"), cells)


if __name__ == "__main__":
    sys.exit(main())
