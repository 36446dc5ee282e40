"""Does a refusal name a budget that is kept? Makes refusals and asks for every budget that they name.

    python -m scripts.suggestions --count 100 --graphs sample_models more_graphs

Files of the graphs (or files named directly) and random steps in turn, with every selector, for a loop and for a
session, at budgets from below what is possible up to just above. Prints each budget that was named and refused in turn.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import onnx

from onnx_remat.errors import BudgetInfeasibleError, OnnxRematError
from onnx_remat.plan.selectors import names
from onnx_remat.rewrite.pipeline import rewrite_model
from tests.support.graphs import mlp
from tests.support.steps import Steps

_BUDGETS = ("50%", "30%", "70%", "85%", "15%")
_NAMED = re.compile(r"try budget=(\d+)")


def models(graphs: list[Path]) -> Iterator[tuple[str, onnx.ModelProto]]:
    """The files, over and over, and random steps and networks between them."""
    files = [path for graph in graphs for path in (sorted(graph.rglob("*.onnx")) if graph.is_dir() else [graph])]
    for seed in itertools.count():
        for path in files[seed % 4 :: 4]:  # a quarter of the files at a time
            yield f"{path.parent.name}/{path.stem}", onnx.load(path)
        yield f"steps {seed}", Steps(seed, 2 + seed % 4, 2).model()
        yield f"mlp {seed}", mlp(layers=4 + seed % 9, batch=64 << seed % 5, width=16 << seed % 3)


def main() -> int:
    """Ask for what refusals name; 1 where one of them is refused."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="refusals that name a budget")
    parser.add_argument("--graphs", type=Path, nargs="*", default=[Path("sample_models")])
    parser.add_argument("--effort", type=float, default=0.3)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after")
    given = parser.parse_args()
    until, named, written, other, longest = time.monotonic() + given.seconds, 0, 0, 0, 0.0
    kinds = itertools.cycle(itertools.product(("loop", "session"), _BUDGETS, names()))
    for (name, model), (run_by, budget, selector) in zip(models(given.graphs), kinds, strict=False):
        if named >= given.count or time.monotonic() > until:
            break
        options = {"selector": selector, "run_by": run_by, "effort": given.effort}
        began = time.monotonic()
        try:
            rewrite_model(model, budget, **options)
            continue
        except BudgetInfeasibleError as refusal:
            found, text = _NAMED.search(str(refusal)), str(refusal)
            longest = max(longest, time.monotonic() - began)
        except OnnxRematError:
            continue
        if found is None:
            other += 1
            continue
        named += 1
        try:
            rewrite_model(model, int(found[1]), **options)
            written += 1
        except OnnxRematError as error:
            print(f"{name}, {selector} for a {run_by}, {budget}: {text}\n    asked for: {error}")
    print(f"{named} refusals name a budget, {written} of these are kept; {other} name another setting alone")
    print(f"the longest refusal took {longest:.1f} s")
    return int(written < named)


if __name__ == "__main__":
    sys.exit(main())
