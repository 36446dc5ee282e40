"""The targets of plans: what follows a file that exceeds the budget, or keeps it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from onnx_remat.rewrite.targets import Targets

ALLOWED, BOOKKEEPING = 1000, 100


def targets(saved=0, first=900):
    memory = SimpleNamespace(
        saved_by_runtime=saved,
        original_bytes=2000,
        bookkeeping=BOOKKEEPING,
        is_used_up=lambda unused, *_, **__: unused <= 10,
        tighter=lambda target, file, allowed: target - (file - allowed),
    )
    return Targets(SimpleNamespace(allowed=ALLOWED, memory=memory), first)


def test_a_file_above_the_budget_tightens_the_target_by_the_excess():
    found = targets()
    assert found.go_on(1005, 890, BOOKKEEPING)
    assert found.next == 889  # less than the plan's peak, too
    assert not found.may_go_above()


@pytest.mark.parametrize(("saved", "above"), [(0, False), (500, True)])
def test_the_search_goes_above_only_where_there_is_room(saved, above):
    """Bookkeeping of recomputed nodes is what exceeds the budget; nothing is saved, so that no target is left."""
    found = targets(saved)
    found.go_on(1030, 890, BOOKKEEPING + 50)
    assert found.may_go_above() is above


def test_above_targets_rise_while_bookkeeping_exceeds_the_budget_and_then_are_bisected():
    found = targets(saved=500)
    found.go_on(1030, 890, BOOKKEEPING + 50)
    found.go_above()
    first, limit = found.next, found.missed
    assert 900 < first < limit
    assert found.go_on(1030, first, BOOKKEEPING + 50) and first < found.next < limit
    found.next = kept = first + 5
    assert found.go_on(950, kept, BOOKKEEPING + 20)
    assert (found.kept, found.missed, found.next) == (kept, 0, kept + 50)  # a limit is no target that missed
    assert found.go_on(1030, kept + 50, BOOKKEEPING + 50)
    assert found.kept == kept < found.next < kept + 50


def test_steps_double_while_files_stay_as_large():
    """The bytes of a real step: a target lower by the excess, 0.3 of 133 MB, found the same plan again and again."""
    found = targets(saved=500, first=900)
    asked = []
    for file in (1003, 1003, 1004, 1003):
        assert found.go_on(file, found.next, BOOKKEEPING)
        asked.append(found.next)
    assert asked == [897, 891, 875, 851]  # lower by 3, 2 * 3, 4 * 4, 8 * 3


def test_a_file_that_shrinks_as_asked_is_followed_by_a_step_of_its_excess():
    found = targets()
    for file in (1100, 1040, 1020, 1008):
        found.go_on(file, found.next, BOOKKEEPING)
    assert found.next == 900 - 100 - 40 - 20 - 8


def test_files_that_grow_by_more_than_the_margin_let_the_search_go_above():
    found = targets(saved=500)
    for file in (1030, 1040, 1050):
        assert found.go_on(file, found.next, BOOKKEEPING)
    assert found.next > 900 and found.files_before_going_above == 3
