"""Measure a table of the results.

    python -m scripts.bench --list
    python -m scripts.bench TABLE --help
    python -m scripts.bench TABLE [ITEM ...] [--save] [--name NAME] [--journal FILE]

A row is printed as soon as it is measured. With ``--save`` the table goes to docs/results/data, under its own name or
NAME, with the command that measured it; `scripts.results` puts it into its page. A journal keeps what is measured of
each item: a run with the same options goes on where the last one with this file ended. `scripts.tables` says what a
table is made of.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from scripts import tables
from scripts.results import Table, save

FILES = "FILES"


def names() -> list[str]:
    """Of all tables."""
    return sorted(
        module.name.replace("_", "-")
        for module in pkgutil.iter_modules(tables.__path__)
        if not module.name.startswith("_")
    )


def options(rows: Callable[..., Any]) -> dict[str, Any]:
    """Defaults by name of the keywords of a table's `rows`."""
    parameters = inspect.signature(rows).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


def parser_of(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """A table's command line."""
    made = argparse.ArgumentParser(
        f"python -m scripts.bench {name}", description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    items = getattr(module, "ITEMS", None)
    about = "what to measure" if items is None else "default: all" if len(items) > 9 else f"default: {', '.join(items)}"
    made.add_argument(
        "items", nargs="+" if items is None else "*", metavar=FILES if items is None else "ITEM", help=about
    )
    made.add_argument("--save", action="store_true", help="put the table among the results")
    made.add_argument("--name", default=name, help="of the saved table (default: %(default)s)")
    made.add_argument("--journal", type=Path, metavar="FILE", help="keeps what is measured; a run goes on from there")
    for key, value in options(module.rows).items():
        how: dict[str, Any] = (
            {"action": "store_true"} if value is False else {"type": type(value), "metavar": key[0].upper()}
        )
        shown = "" if value is False or value == "" else f"default: {value}".replace("%", "%%")
        made.add_argument(f"--{key.replace('_', '-')}", default=argparse.SUPPRESS, help=shown or None, **how)
    return made


def command(name: str, module: ModuleType, items: Sequence[str], given: Mapping[str, Any], saved: str) -> str:
    """The command that measures a table; files, unless they have a budget each, as FILES."""
    if hasattr(module, "ITEMS"):
        shown = list(items)
    else:
        shown = [Path(item).name for item in items] if all("=" in item for item in items) else [FILES]
    flags = [f"--{k.replace('_', '-')}" + ("" if v is True else f" {v:g}" if isinstance(v, float) else f" {v}")
             for k, v in given.items() if v is not False]  # fmt: skip
    words = [name, *(f"'{word}'" if " " in word else word for word in shown), *flags]
    return " ".join(["python -m scripts.bench", *words, "--save", *([f"--name {saved}"] if saved != name else [])])


def measured(module: ModuleType, items: Sequence[str], given: Mapping[str, Any], journal: Path | None) -> list[Any]:
    """What a table's `rows` yields of all items, those in the journal read from there."""
    key = json.dumps([module.__name__, given])
    lines = map(json.loads, journal.read_text(encoding="utf-8").splitlines()) if journal and journal.exists() else ()
    known = {line["item"]: line["found"] for line in lines if line["key"] == key}
    found = []
    for item in items:
        here: list[Any] = []
        for row in known.get(item) or module.rows(item, **given):
            here.append(row)
            print(" | ".join(row) if isinstance(row, (tuple, list)) else json.dumps(row), flush=True)
        if journal and item not in known:
            with journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "item": item, "found": here}) + "\n")
        found += here
    return found


_UNUSUAL = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Variables that make matrix products slower than they are for a user, as they choose kernels of another processor."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, save; without variables that a user does not have."""
    for name in _UNUSUAL:
        if value := os.environ.pop(name, ""):
            print(f"without {name}={value}", file=sys.stderr)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=names(), metavar="TABLE")
    parser.add_argument("--list", action="store_true", help="print every table's name, and what it shows")
    words = list(sys.argv[1:] if arguments is None else arguments)
    asked = parser.parse_args(words[:1])
    if asked.list:
        for name in names():
            print(f"{name:<20} {_first_line(name)}")
        return
    if asked.table is None:
        parser.error("name a table; --list prints all")
    module = importlib.import_module(f"scripts.tables.{asked.table.replace('-', '_')}")
    table_parser = parser_of(asked.table, module)
    parsed = vars(table_parser.parse_args(words[1:]))
    given = {key: parsed[key] for key in options(module.rows) if key in parsed}
    items = parsed["items"] or module.ITEMS
    if hasattr(module, "HEADS"):
        print(" | ".join(module.HEADS), flush=True)
    found = measured(module, items, given, parsed["journal"])
    said = command(asked.table, module, parsed["items"], given, parsed["name"])
    if hasattr(module, "tables"):
        made: dict[str, Table] = module.tables(found, said)
        print("\n\n".join(table.to_markdown() for table in made.values()))
    else:
        made = {parsed["name"]: Table(said, module.HEADS, tuple(map(tuple, found)))}
    for name, table in made.items() if parsed["save"] else ():
        save(name, table)


def _first_line(name: str) -> str:
    """Of a table's docstring, without importing what it imports."""
    path = Path(tables.__file__).with_name(f"{name.replace('-', '_')}.py")
    return path.read_text(encoding="utf-8").removeprefix('"""').splitlines()[0].removesuffix('"""')


if __name__ == "__main__":
    main()
