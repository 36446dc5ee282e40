"""The lowest budget: found by asking, never above what a refusal names, never below what is proved."""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import pytest

import onnx_remat
from onnx_remat.app import cli
from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.findings import lowest
from onnx_remat.findings.sweep import sweep
from onnx_remat.rewrite.accounting import smallest_budget
from sample_models.chain import chain


def world(
    monkeypatch, least: int, hint: float, bound: int = 900, books: int = 100, top: int = 8000, cut_short: bool = False
) -> list[int]:
    """Every budget from `least` on is kept; a refusal names `hint` times that. The budgets that are asked for."""
    asked: list[int] = []

    def rewrite(_, budget, **__):
        budget = top if budget == "100%" else budget.bytes
        asked.append(budget)
        if budget < least:
            raise BudgetInfeasibleError("too little", int(least * hint), bound)
        report = SimpleNamespace(
            budget=budget,
            lower_bound=bound,
            extra_compute=0.25,
            covered=lambda: (top, budget - 3),
            books=lambda: books,
            cut_short=cut_short,
        )
        return SimpleNamespace(report=report)

    monkeypatch.setattr(lowest, "begin", lambda *_: None)
    monkeypatch.setattr(lowest, "rewrite_for", rewrite)
    return asked


@pytest.mark.parametrize("hint", [1.0, 1.5, 9.0])  # a refusal names the lowest, a higher one, nothing of use
@pytest.mark.parametrize("least", [1100, 3333, 7900])
def test_the_gap_is_narrowed_whatever_a_refusal_names(monkeypatch, least, hint):
    asked = world(monkeypatch, least, hint)
    found = lowest.lowest_budget("model")
    assert least <= found.budget <= least * 1.03
    assert found.tries == len(asked) - 1 <= 8
    assert all(budget < found.budget for budget in found.missed)
    assert (found.impossible, found.peak) == (smallest_budget(900, 100), found.budget - 3)


def test_a_bound_that_is_reached_takes_one_try(monkeypatch):
    asked = world(monkeypatch, 500, 1.0)
    assert lowest.lowest_budget("model").budget == smallest_budget(900, 100)
    assert len(asked) == 2


def test_a_search_cut_short_by_the_clock_says_so(monkeypatch):
    world(monkeypatch, 500, 1.0)
    assert "cut" not in lowest.lowest_budget("model").to_text()
    world(monkeypatch, 500, 1.0, cut_short=True)
    found = lowest.lowest_budget("model")
    assert found.cut_short and "the time limit cut planning short" in found.to_text()


def test_what_the_original_takes_is_not_impossible(monkeypatch):
    """Nothing is kept free of it, unlike of a budget."""
    world(monkeypatch, 7950, 1.0, bound=7900)
    found = lowest.lowest_budget("model")
    assert found.impossible == found.budget == 8000


@pytest.mark.slow
def test_the_lowest_budget_of_a_chain_is_kept_again(tmp_path, capsys):
    model = chain(8, 1024, 64)
    path = tmp_path / "chain.onnx"
    path.write_bytes(model.SerializeToString())
    report = tmp_path / "lowest.json"
    arguments = ["sweep", str(path), "--lowest", "--for", "session", "--effort", "0.1", "--json", str(report)]
    assert cli.main(arguments) == 0
    found = json.loads(report.read_text())
    assert f"lowest budget found: {found['budget']}B" in capsys.readouterr().out
    assert found["impossible"] <= found["budget"] < 0.9 * found["original_peak"]
    again = onnx_remat.rewrite_model(model, found["budget"], run_by="session", effort=0.1).report
    assert again.covered()[1] == found["peak"] <= found["budget"]


@pytest.mark.slow
@pytest.mark.parametrize("find", [lowest.lowest_budget, functools.partial(sweep, points=2)])
def test_budgets_of_a_few_bytes_are_no_percentages(find):
    """Small ints are refused as budgets of a user, who means percentages."""
    assert find(chain(4, 1, 2), run_by="session", effort=0.02, verify="none").lower_bound < 100


def test_one_budget_is_no_curve(tmp_path, capsys):
    assert cli.main(["sweep", "model.onnx", "--lowest", "--plot", str(tmp_path / "curve.png")]) == 2
    assert "--lowest" in capsys.readouterr().err
