"""Sizes for which a step is another than the traced one are refused, or stated for a file."""

from __future__ import annotations

import math
import time
import warnings

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxscript")

import torch
from onnx_remat.converters.pytorch import budgeted, export_training_step, verify
from torch import nn

from onnx_remat.errors import UsageError
from tests.support.slow import few

cross_entropy = nn.functional.cross_entropy
OPEN = {f"input.{index}": {0: "batch"} for index in range(2)}


class Block(nn.Module):
    """`forward` is given."""

    def __init__(self, forward):
        super().__init__()
        self.inner, self.norm, self.how = nn.Linear(4, 4), nn.BatchNorm1d(4), forward

    def forward(self, x):
        return self.how(self, self.inner(x))


def many(_, y):
    return y * 2 if y.shape[0] > 8 else y


def even(_, y):
    return y * 2 if y.shape[0] % 2 == 0 else y


CASES = {
    "many": (many, {8: "decides by the size at .*if y.shape", 1: "decides by the size"}, [9]),
    "even": (even, {9: "decides by the size", 7: "decides by the size"}, [8]),
    "norm": (lambda self, y: self.norm(y), {1: "fails: ValueError: Expected more than 1 value"}, [9, 2]),
    "squeeze": (lambda _, y: y.unsqueeze(1).squeeze(), {1: "fails: "}, [9, 2]),
    "skipped": (lambda self, y: self.norm(y) if y.shape[0] > 1 else y, {1: "decides by the size at .*skipped"}, [9, 2]),
    "one_line": (lambda _, y: y.sin() if y.shape[0] > 1 else y, {1: "decides by the size at .*one_line"}, [9, 2]),
    "products": (lambda _, y: torch.einsum("bi,bi->bi", y, y) + torch.einsum("bi,bj->bj", y, y), {}, [9, 1]),
    "plain": (lambda self, y: self.inner(y), {}, [9, 1]),
}


@pytest.mark.parametrize("case", few(CASES, ["many"]))
def test_a_batch_for_which_the_step_is_another_is_refused(case):
    forward, refused, taken = CASES[case]
    model, batch = Block(forward), (torch.randn(10, 4), torch.arange(10) % 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with budgeted(model, cross_entropy, optimizer, batch, dynamic_dims=OPEN, progress=False) as step:
        for size, reason in refused.items():
            with pytest.raises(
                UsageError, match=rf"batch is {size}, .*the example's 10 \(its code {reason}.*drop_last"
            ):
                step([part[:size] for part in batch])
        for size in taken:
            given = [part[:size] for part in batch]
            assert step(given) == pytest.approx(cross_entropy(model(given[0]), given[1]).item(), rel=1e-5)


def test_a_warning_states_the_sizes_of_a_file_for_which_it_is_wrong():
    batch = torch.randn(10, 4), torch.arange(10) % 4
    with pytest.warns(UserWarning, match=r"wrong where batch is 1, 2, 3, 4, 5, \.\.\.: for these, its code decides"):
        export_training_step(Block(many), batch, cross_entropy, dynamic_dims=OPEN, check=False)
    with pytest.warns(UserWarning, match=r"wrong where batch is 1, 3, 5, 7, 9: for these, its code decides"):
        export_training_step(Block(even), batch, cross_entropy, dynamic_dims=OPEN)


@pytest.mark.parametrize("rounded", few([math.floor, math.ceil, round], [math.ceil]))
def test_code_may_decide_by_a_part_of_a_size(rounded):
    def part(_, y):
        return y * 2 if rounded(y.shape[0] * 0.75) > 3 else y

    batch = torch.randn(10, 4), torch.arange(10) % 4
    with pytest.warns(UserWarning, match=r"wrong where batch is 1, 2, 3, 4(, 5)?: for these, its code decides"):
        export_training_step(Block(part), batch, cross_entropy, dynamic_dims=OPEN, check=False)


class Pair(nn.Module):
    """Twice as much for two texts of one length."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x, y):
        made = self.inner(x).square().mean() + self.inner(y).square().mean()
        return made * 2 if x.shape[1] == y.shape[1] else made


TWO_LENGTHS = {"input.0": {1: "source"}, "input.1": {1: "target"}}


@pytest.mark.slow
def test_sizes_of_two_dimensions_for_which_the_step_is_another_are_refused_together():
    model, x, y = Pair(), torch.randn(2, 5, 3), torch.randn(2, 6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with budgeted(model, None, optimizer, (x, y), dynamic_dims=TWO_LENGTHS, progress=False) as step:
        with pytest.raises(UsageError, match=r"source is 4 and target is 4, .* 5 and 6 \(its code decides by"):
            step((x[:, :4], y[:, :4]))
        assert step((x[:, :4], y[:, :5])) == pytest.approx(model(x[:, :4], y[:, :5]).item(), rel=1e-5)


def test_a_warning_states_the_condition_on_two_dimensions_under_which_a_file_is_right():
    batch = torch.randn(2, 5, 3), torch.randn(2, 6, 3)
    with pytest.warns(UserWarning, match="wrong where source != target is false: for these, its code decides"):
        export_training_step(Pair(), batch, dynamic_dims=TWO_LENGTHS)


class Area(nn.Module):
    """Twice as much for large inputs."""

    def __init__(self, large):
        super().__init__()
        self.weight, self.large = nn.Parameter(torch.ones(1)), large

    def forward(self, x):
        made = (x * self.weight).square().mean()
        return made * 2 if x.shape[0] * x.shape[1] > self.large else made


@pytest.mark.parametrize(("large", "is_wrong"), [(10**6, False), (10**5, True)])
def test_a_condition_on_many_sizes_is_stated_only_where_some_of_them_make_it_false(large, is_wrong):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        sizes = {"input.0": {0: "batch", 1: "length"}}
        export_training_step(Area(large), (torch.zeros(40, 7000),), dynamic_dims=sizes, check=False)
    assert any("is false: for these, its code decides" in str(each.message) for each in found) == is_wrong


@pytest.mark.slow
def test_the_second_size_of_the_comparison_is_one_that_the_code_allows():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.places, self.last = nn.Embedding(9, 8), nn.Embedding(5, 8), nn.Linear(8, 4)

        def forward(self, x):
            assert x.shape[1] <= 5
            return self.last(self.words(x) + self.places(torch.arange(x.shape[1]))).flatten(0, 1)

    def loss(made, target):
        return cross_entropy(made, target.flatten())

    both = {f"input.{index}": {0: "batch", 1: "length"} for index in range(2)}
    batch = torch.arange(30).reshape(6, 5) % 9, torch.arange(30).reshape(6, 5) % 4
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        export_training_step(Positions(), batch, loss, dynamic_dims=both)


@pytest.mark.slow
def test_sizes_that_a_view_cannot_divide_are_refused():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.last = nn.Embedding(9, 8), nn.Linear(8, 9)

        def forward(self, x):
            h = self.words(x)
            pairs = h.view(x.shape[0], -1, 2, 8)
            return self.last((pairs + pairs.mean(2, keepdim=True)).reshape(h.shape))

    def loss(made, target):
        return cross_entropy(made.flatten(0, 1), target.flatten())

    model, texts = Pairs(), torch.arange(32).reshape(4, 8) % 9
    open_length = {f"input.{index}": {1: "length"} for index in range(2)}
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with budgeted(model, loss, optimizer, (texts, texts), dynamic_dims=open_length, progress=False) as step:
        for length in (6, 2):
            given = texts[:, :length]
            assert step((given, given)) == pytest.approx(loss(model(given), given).item(), rel=1e-5)
        with pytest.raises(UsageError, match=r"length is 5, .*decides by the size"):
            step((texts[:, :5], texts[:, :5]))


def test_many_sizes_are_tried_at_once():
    def at_least(_, y):
        assert y.shape[0] > 3
        return y

    batch = torch.randn(200_000, 4), torch.arange(200_000) % 4
    began = time.process_time()
    with pytest.warns(UserWarning, match="wrong where batch is 2, 3: for these, its code decides"):
        export_training_step(Block(at_least), batch, cross_entropy, dynamic_dims=OPEN, check=False)
    assert time.process_time() - began < 20  # with symbols in place of numbers a minute


class Last(nn.Module):
    """The features at the last place of each text."""

    def __init__(self, places=7):
        super().__init__()
        self.inner, self.places = nn.Linear(3, 3), nn.Parameter(torch.randn(places, 3))

    def forward(self, x, lengths):
        made = self.inner(x) + self.places[torch.arange(x.shape[1])]
        return made[torch.arange(x.shape[0]), lengths - 1].square().mean()


@pytest.mark.parametrize("places", few([7, 6], [7]))
def test_a_step_whose_example_reads_its_last_entry_is_compared_at_a_larger_size(places):
    """Six places leave no larger one."""
    batch = torch.randn(4, 6, 3), torch.tensor([6, 3, 2, 5])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step = export_training_step(Last(places), batch, dynamic_dims={"input.0": {1: "length"}})
    assert [dim.dim_param for dim in step.graph.input[-2].type.tensor_type.shape.dim][1] == "length"
    assert any("at the example's sizes alone" in str(one.message) for one in said) == (places == 6)


class Long(Last):
    """Twice as much for texts of more than six places."""

    def forward(self, x, lengths):
        return super().forward(x, lengths) * (2 if x.shape[1] > 6 else 1)


class Narrowed(Last):
    """Places are cut to the length of the text: there are six."""

    def forward(self, x, lengths):
        made = self.inner(x) + self.places.detach()[:, 0].narrow(0, 0, x.shape[1])[:, None]
        return made.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, 3)).square().mean()


@pytest.mark.parametrize("model", [Long(), pytest.param(Narrowed(6), marks=pytest.mark.slow)])
def test_a_step_that_no_larger_text_fits_is_compared_at_the_examples_alone(model):
    batch = torch.randn(4, 6, 3), torch.tensor([6, 3, 2, 5])
    with pytest.warns(UserWarning, match="at the example's sizes alone") as said:
        export_training_step(model, batch, dynamic_dims={"input.0": {1: "length"}})
    assert not any("the file is wrong" in str(one.message) for one in said)


def test_a_step_without_smaller_sizes_runs_once_at_the_larger(monkeypatch):
    compared = []
    own = verify.step
    monkeypatch.setattr(verify, "step", lambda *given, **options: compared.append(1) or own(*given, **options))
    batch = torch.randn(4, 2, 3), torch.tensor([2, 1, 2, 1])
    with pytest.warns(UserWarning, match="at the example's sizes alone"):
        export_training_step(Last(2), batch, dynamic_dims={"input.0": {1: "length"}})
    assert len(compared) == 2
