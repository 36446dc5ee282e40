"""The converted sample models: small, standard, labelled, typed; they train."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnx_remat.ir import phases
from onnx_remat.ir.naming import renewals
from sample_models.converted import build
from tests.support.graphs import run_model


@pytest.fixture(scope="module", params=build.KEPT)
def model(request: pytest.FixtureRequest) -> onnx.ModelProto:
    path = build.FOLDER / f"{request.param}.onnx"
    assert path.stat().st_size < 1_000_000
    return onnx.load(path)


def test_kept_files_are_labelled_typed_and_standard(model: onnx.ModelProto) -> None:
    onnx.checker.check_model(model)
    labels = [{p.key: p.value for p in node.metadata_props}["phase"] for node in model.graph.node]
    assert set(labels) == set(phases.NAMES)
    known = {value.name for value in [*model.graph.value_info, *model.graph.output]}
    assert {name for node in model.graph.node for name in node.output if name} <= known
    assert {node.domain for node in model.graph.node} == {""}


def test_kept_files_train(model: onnx.ModelProto) -> None:
    """On one batch, three steps lower the loss."""
    rng = np.random.default_rng(0)
    feeds = {value.name: _first(value, rng) for value in model.graph.input}
    names = [value.name for value in model.graph.output]
    renewed = renewals(feeds, names)
    losses = []
    for _ in range(3):
        made = dict(zip(names, run_model(model, feeds, "all", threads=2), strict=True))
        feeds |= {target: made[name] for name, target in renewed.items()}
        losses.append(float(made["loss"]))
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 1e-4


def _first(value: onnx.ValueInfoProto, rng: np.random.Generator) -> np.ndarray:
    """Scaled weights, unit gains and variances, zero state, random data; integers below 4, classes of every model."""
    kind = value.type.tensor_type
    shape = tuple(dim.dim_value for dim in kind.shape.dim)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    if dtype.kind in "iu":
        return rng.integers(0, 4, shape).astype(dtype)
    if value.name.startswith("input."):
        return rng.standard_normal(shape).astype(dtype)
    if value.name.startswith("state.") or len(shape) < 2:
        ones = value.name.rpartition(".")[2] in ("weight", "scale", "var", "running_var")
        return np.full(shape, ones and not value.name.startswith("state."), dtype)
    return (rng.standard_normal(shape) / np.sqrt(max(np.prod(shape) / max(shape), 16))).astype(dtype)
