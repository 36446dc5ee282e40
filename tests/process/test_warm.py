"""Tests prepare sessions in forks of a process that is warm: from fresh ones, a run takes a third longer."""

from __future__ import annotations

import os

from tests.support.warm import FORKS


def test_what_a_test_prepares_is_prepared_in_a_fork():
    assert FORKS.can(os.environ)
    assert not FORKS.can({**os.environ, "OMP_NUM_THREADS": "7"})
