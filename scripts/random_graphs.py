"""Random mixed graphs, rewritten and through `Session` with every value in its slab, against stock ONNX Runtime.

    python -m scripts.random_graphs 100                  # the tables, and the seeds of what is wrong
    python -m scripts.random_graphs 1 --seed 1234 -v     # one graph, and its parts
    python -m scripts.random_graphs 2000 --save          # one to three hours; the table random-graphs
    python -m scripts.random_graphs 2000 --journal done.jsonl  # goes on where the last run with this file ended

See tests/support/mixed.py for what meets in them. Results are compared to the last bit with optimisations off, and to
rounding at the other levels. An interrupt ends the run early, with the tables of what was done.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from scripts.onnx_backend import ANY, DIED, complaints, counts, reasons
from scripts.results import save
from tests.support import mixed
from tests.support.outcomes import Outcome
from tests.support.survivors import Died, answers


def main() -> int:
    """Print the tables; 1 where anything is wrong, fails in the middle, raises or dies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, metavar="N", help="graphs")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first one")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300.0, help="that one graph may take")
    parser.add_argument("--journal", type=Path, metavar="FILE", help="keeps results; graphs in it are not run again")
    parser.add_argument("--save", action="store_true", help="put the table among the results")
    parser.add_argument("-v", "--verbose", action="store_true", help="also what each graph is made of")
    asked = parser.parse_args()
    seeds = range(asked.seed, asked.seed + asked.count)
    found: dict[str, dict[str, Outcome]] = {}
    unusable: Counter[str] = Counter()
    start = time.monotonic()
    known = _read(asked.journal)
    todo = [seed for seed in seeds if seed not in known]
    with contextlib.suppress(KeyboardInterrupt):
        tried = answers(mixed.try_graph, todo, asked.processes, asked.seconds)
        before = ((seed, known[seed]) for seed in seeds if seed in known)
        for seed, answer in itertools.chain(before, tried):
            outcome = _judged(seed, answer, asked.seconds)
            if seed not in known:
                _write(asked.journal, seed, outcome)
            if isinstance(outcome, str):
                unusable[outcome] += 1
                continue
            found[f"seed {seed}"] = outcome
            for line in complaints({f"seed {seed}": outcome}):
                print(line, flush=True)
    found = {name: found[name] for name in (f"seed {seed}" for seed in seeds) if name in found}
    for seed in seeds if asked.verbose else ():
        graph = mixed.Mixed(seed)
        print(f"seed {seed}: opset {graph.opset}, {len(graph.nodes)} nodes: {', '.join(graph.parts)}")
    for said, count in unusable.items():
        print(f"not counted, {count} times: ONNX Runtime says: {said}")
    command = f"python -m scripts.random_graphs {asked.count} --save"
    table = counts(found, command)
    print("\n" + table.to_markdown() + "\n\n" + reasons(found, command).to_markdown())
    if asked.save:
        save("random-graphs", table)
    print(f"\n{len(found)} graphs count, {unusable.total()} do not, {time.monotonic() - start:.0f} s")
    return int(bool(complaints(found)))


Judged = str | dict[str, Outcome]
"""Why a graph does not count, or its outcomes."""


def _judged(seed: int, answer: Judged | Died, seconds: float) -> Judged:
    if not isinstance(answer, Died):
        return answer
    if cause := _dies_in_stock(seed, seconds):
        return f"nothing, its process ends: {cause}"
    return {ANY: Outcome(DIED, answer.cause)}


def _read(journal: Path | None) -> dict[int, Judged]:
    """What a journal says of graphs, by seed."""
    known: dict[int, Judged] = {}
    for line in journal.read_text().splitlines() if journal and journal.exists() else ():
        seed, judged = json.loads(line)
        known[seed] = judged if isinstance(judged, str) else {name: Outcome(**what) for name, what in judged.items()}
    return known


def _write(journal: Path | None, seed: int, judged: Judged) -> None:
    """Add a graph to a journal."""
    if journal:
        said = judged if isinstance(judged, str) else {name: asdict(what) for name, what in judged.items()}
        with journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps([seed, said]) + "\n")


def _dies_in_stock(seed: int, seconds: float) -> str:
    """Why a process dies that only runs the original in stock ONNX Runtime; "" where it does not."""
    [(_, answer)] = answers(mixed.stock_results, [seed], 1, seconds)
    return answer.cause if isinstance(answer, Died) else ""


if __name__ == "__main__":
    sys.exit(main())
