"""Random mixed graphs, rewritten and through `Session` with every value in its slab: none comes out wrong.

The default run does three, ``--slow`` thirty, ``--fuzz N`` N of them; `python -m scripts.random_graphs` prints
what becomes of each.
"""

from __future__ import annotations

import pytest

from tests.support import mixed
from tests.support.outcomes import RIGHT, TOO_LOW
from tests.support.slow import few

pytest.importorskip("onnxruntime")

_FEW, _MORE = 3, 30
ALLOWED = (RIGHT, TOO_LOW)


SEEDS = [range(i, 10**6, 3) for i in range(3)]


@pytest.mark.parametrize("seeds", few(SEEDS, SEEDS[::2]), ids=str)
def test_they_do_what_stock_onnx_runtime_does(seeds, pytestconfig):
    found, counted = [], 0
    few = _MORE if pytestconfig.getoption("--slow") else _FEW
    for seed in seeds[: (pytestconfig.getoption("--fuzz") or few) // 3]:
        answer = mixed.try_graph(seed)
        counted += not isinstance(answer, str)
        outcomes = answer if not isinstance(answer, str) else {}
        found += [f"seed {seed}, {column}: {o}" for column, o in outcomes.items() if o.kind not in ALLOWED]
    assert not found, "\n".join(found)
    assert counted


@pytest.mark.parametrize("name", few(sorted(mixed.PARTS), sorted(mixed.PARTS)[::12]))
def test_every_part_alone(name):
    """With plain ones around it, so that what it is wrong about lies where others are still read."""
    graph = mixed.Mixed(1, 6, (name, name, "product", "merged", "many_readers"))
    answer = mixed.judge(graph, 1)
    assert not isinstance(answer, str), answer
    bad = {column: outcome for column, outcome in answer.items() if outcome.kind not in ALLOWED}
    assert not bad
