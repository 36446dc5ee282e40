"""The Python face: what is meant is taken, what is not is one error of ours."""

from __future__ import annotations

import io
import math
import re

import numpy as np
import pytest

import onnx_remat
from onnx_remat.errors import OnnxRematError, UsageError
from onnx_remat.options import parse_options
from onnx_remat.units import Budget, parse_budget
from tests.support.graphs import mlp


@pytest.mark.parametrize("limit", [math.inf, -math.inf, math.nan, 0, -1, "soon", None, [], True, 1e30, "1e9999s"])
def test_time_limits_that_are_none_are_refused(limit):
    with pytest.raises(UsageError):
        parse_options({"time_limit": limit})


@pytest.mark.parametrize(("limit", "seconds"), [("5s", 5.0), (2, 2.0), (np.float32(0.5), 0.5), ("500ms", 0.5)])
def test_time_limits_in_any_form(limit, seconds):
    assert parse_options({"time_limit": limit}).time_limit == seconds


@pytest.mark.parametrize("field", ["keep", "allow_recompute"])
def test_one_name_is_a_name_and_none_are_none(field):
    assert getattr(parse_options({field: "a1"}), field) == ("a1",)
    assert getattr(parse_options({field: None}), field) == ()
    assert getattr(parse_options({field: ["a1", "b"]}), field) == ("a1", "b")
    for wrong in (3, [3], b"a1", object()):
        with pytest.raises(UsageError, match=field):
            parse_options({field: wrong})


def test_dims_are_whole_numbers_by_name():
    assert parse_options({"dims": None}).dims == {}
    (size,) = parse_options({"dims": {"batch": np.int64(3)}}).dims.values()
    assert (type(size), size) == (int, 3)
    for wrong in ([], "batch=3", {"batch": "3"}, {"batch": 2.5}, {"batch": -1}, {"batch": None}, {3: 3}):
        with pytest.raises(UsageError, match="dims"):
            parse_options({"dims": wrong})


@pytest.mark.parametrize(
    "given", [{"selector": 3}, {"costs": 3}, {"loss": 3}, {"progress": 3}, {"arena": "yes"}, {"verify": None}]
)
def test_fields_of_another_type_are_refused(given):
    with pytest.raises(UsageError, match=next(iter(given))):
        parse_options(given)


@pytest.mark.parametrize(
    ("given", "meant"),
    [(60, "budget 60 would be 60 bytes: for a share write '60%'"), (0.6, "for a share write '60%'"),
     ("1e9", "write 1e9B for bytes"), ("60", "write 60% of what the original takes")],
)  # fmt: skip
def test_a_budget_that_is_a_number_is_answered_with_what_was_meant(given, meant):
    with pytest.raises(UsageError, match=re.escape(meant)):
        parse_budget(given)


def test_budgets_of_numpy_are_budgets():
    assert parse_budget(np.int64(1000)) == Budget(bytes=1000)
    for wrong in (10**400, 3.5, None, True, Budget(), Budget(1, 0.5), Budget(fraction=math.nan), Budget(bytes=-1)):
        with pytest.raises(UsageError):
            parse_budget(wrong)


def test_models_are_paths_bytes_or_protos():
    data = mlp(layers=1).SerializeToString()
    for given in (bytearray(data), memoryview(data)):
        assert onnx_remat.rewrite_model(given, "100%", verify="none").model.graph.node
    for wrong in (io.BytesIO(data), None, 3, [data]):
        with pytest.raises(OnnxRematError, match="a model is a path, bytes or"):
            onnx_remat.rewrite_model(wrong, "100%")
