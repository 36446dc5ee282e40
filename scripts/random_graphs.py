"""Random mixed graphs, rewritten and through `Session` with every value in its slab, against stock ONNX Runtime.

    python -m scripts.random_graphs 100                  # the tables, and the seeds of what is wrong
    python -m scripts.random_graphs 1 --seed 1234 -v     # one graph, and its parts
    python -m scripts.random_graphs 2000 --save          # a quarter of an hour; the table random-graphs

See tests/support/mixed.py for what meets in them. Results are compared to the last bit with optimisations off, and to
rounding at the other levels. An interrupt ends the run early, with the tables of what was done.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter

from scripts.onnx_backend import ANY, DIED, complaints, counts, reasons
from scripts.results import save
from tests.support import mixed
from tests.support.outcomes import Outcome
from tests.support.survivors import Died, answers

COMMAND = "python -m scripts.random_graphs 2000 --save"


def main() -> int:
    """Print the tables; 1 where anything is wrong, fails in the middle, raises or dies."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, metavar="N", help="graphs")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first one")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=300.0, help="that one graph may take")
    parser.add_argument("--save", action="store_true", help="put the table among the results")
    parser.add_argument("-v", "--verbose", action="store_true", help="also what each graph is made of")
    asked = parser.parse_args()
    seeds = range(asked.seed, asked.seed + asked.count)
    found: dict[str, dict[str, Outcome]] = {}
    unusable: Counter[str] = Counter()
    start = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        for seed, answer in answers(mixed.try_graph, seeds, asked.processes, asked.seconds):
            if isinstance(answer, str):
                unusable[answer] += 1
            else:
                found[f"seed {seed}"] = {ANY: Outcome(DIED, answer.cause)} if isinstance(answer, Died) else answer
                if isinstance(answer, Died) and (cause := _dies_in_stock(seed, asked.seconds)):
                    unusable[f"nothing, its process ends: {cause}"] += 1
                    del found[f"seed {seed}"]
                    continue
                for line in complaints({f"seed {seed}": found[f"seed {seed}"]}):
                    print(line, flush=True)
    found = {name: found[name] for name in (f"seed {seed}" for seed in seeds) if name in found}
    for seed in seeds if asked.verbose else ():
        graph = mixed.Mixed(seed)
        print(f"seed {seed}: opset {graph.opset}, {len(graph.nodes)} nodes: {', '.join(graph.parts)}")
    for said, count in unusable.items():
        print(f"not counted, {count} times: ONNX Runtime says: {said}")
    table = counts(found, COMMAND)
    print("\n" + table.to_markdown() + "\n\n" + reasons(found, COMMAND).to_markdown())
    if asked.save:
        save("random-graphs", table)
    print(f"\n{len(found)} graphs count, {unusable.total()} do not, {time.monotonic() - start:.0f} s")
    return int(bool(complaints(found)))


def _dies_in_stock(seed: int, seconds: float) -> str:
    """Why a process dies that only runs the original in stock ONNX Runtime; "" where it does not."""
    [(_, answer)] = answers(mixed.stock_results, [seed], 1, seconds)
    return answer.cause if isinstance(answer, Died) else ""


if __name__ == "__main__":
    sys.exit(main())
