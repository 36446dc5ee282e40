"""Rewritten steps in Node, in a browser and in C++: the losses of Python's onnxruntime, in a smaller heap."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnx_remat import rewrite_model
from tests.support import elsewhere
from tests.support.elsewhere import browser, places
from tests.support.graphs import feeds_for, mlp

STEPS, WIDTH, BATCH = 5, 128, 4096
EXAMPLES = elsewhere.FOLDER.parent
WRITTEN = [path for folder in ("javascript", "cpp") for path in (EXAMPLES / folder).glob("*.*")]
HEADERS = Path(os.environ.get("ONNXRUNTIME_HEADERS", "/usr/include/onnxruntime"))

javascript = pytest.mark.skipif(bool(elsewhere.missing()), reason=elsewhere.missing())
chromium = pytest.mark.skipif(not elsewhere.chromium(), reason="no Chromium")


def step():
    """An MLP's step whose loss is a mean of means: WebAssembly adds one by one, half a million at once too roughly."""
    model = mlp(layers=16, batch=BATCH, width=WIDTH)
    (mean,) = (node for node in model.graph.node if node.op_type == "ReduceMean")
    mean.input[0] = "row"
    rows = onnx.helper.make_node("ReduceMean", ["ee", "axis"], ["row"], keepdims=0)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "axis"))
    model.graph.node.insert([*model.graph.node].index(mean), rows)
    return model


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A folder with a step as it was (before.onnx), rewritten (after.onnx), its values, and the page's list."""
    folder, model = tmp_path_factory.mktemp("steps"), step()
    made = rewrite_model(model, "40%", run_by="session", effort=0.3)
    onnx.save(model, folder / "before.onnx")
    onnx.save(made.model, folder / "after.onnx")
    places.write_state(folder / "state.safetensors", feeds_for(model))
    peaks = {"before": made.report.before.total, "after": made.report.after.total}
    files = {"before": "before.onnx", "after": "after.onnx", "state": "state.safetensors"}
    known = {"name": "mlp", "about": "An MLP", "peaks": peaks, "budget": made.report.budget}
    (folder / "index.json").write_text(json.dumps([known | files]))
    return folder


def wanted(folder, file):
    return places.in_python(folder / file, feeds_for(step()), STEPS).losses


def node(folder, file, *flags, count=STEPS):
    return places.in_node(folder / file, folder / "state.safetensors", count, *flags)


def test_the_examples_are_short():
    assert {path.name for path in WRITTEN} >= {"train.mjs", "loop.mjs", "index.html", "train.cpp"}
    assert [path.name for path in WRITTEN if len(path.read_text(encoding="utf-8").splitlines()) >= 100] == []


@javascript
def test_the_packages_are_those_that_the_example_asks_for():
    asked = json.loads((elsewhere.FOLDER / "package.json").read_text())["dependencies"]
    assert set(asked) == set(elsewhere.PACKAGES)
    for name, version in elsewhere.installed().items():
        low, high = (tuple(map(int, bound.lstrip("<>=").split("."))) for bound in asked[name].split())
        assert low <= tuple(map(int, version.split("."))) < high


@javascript
@pytest.mark.parametrize("file", ["before.onnx", "after.onnx"])
def test_node_trains_to_the_same_losses(steps, file):
    found, losses = node(steps, file).losses, wanted(steps, file)
    assert len(found) == STEPS and found[-1] < found[0]
    assert places.difference(found, losses) < 1e-6


@javascript
def test_webassembly_trains_to_the_same_losses_in_a_smaller_heap(steps):
    before, after = node(steps, "before.onnx", "--wasm", count=1), node(steps, "after.onnx", "--wasm")
    assert places.difference(after.losses, wanted(steps, "after.onnx")) < 1e-5
    assert after.heap < 0.75 * before.heap


@javascript
@pytest.mark.slow
def test_steps_leave_nothing_behind_in_the_heap(steps):
    """But for the second, which finds the heap in pieces."""
    few, many = (node(steps, "after.onnx", "--wasm", count=count) for count in (3, 16))
    assert few.heap == many.heap


@javascript
@pytest.mark.slow
def test_a_heap_with_a_limit_is_enough_for_the_rewritten_file_alone(steps):
    limit = 45 * places.MIB
    fit = [
        places.fits(steps / file, steps / "state.safetensors", limit, steps=1) for file in ("before.onnx", "after.onnx")
    ]
    assert fit == [False, True]


@javascript
def test_a_value_that_is_missing_is_named(steps, tmp_path):
    feeds = feeds_for(step())
    del feeds["w3"]
    places.write_state(tmp_path / "state.safetensors", feeds)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        places.in_node(steps / "after.onnx", tmp_path / "state.safetensors", 1)
    assert "no value for the input w3" in failed.value.stderr


@javascript
@chromium
def test_a_browser_trains_to_the_losses_of_webassembly_in_node(steps):
    found = places.in_browser(elsewhere.chromium(), steps / "after.onnx", steps / "state.safetensors", STEPS)
    assert found == node(steps, "after.onnx", "--wasm")


@javascript
@chromium
@pytest.mark.slow
def test_the_page_trains_both_files_and_shows_their_heaps(steps, tmp_path):
    pictures = {"light": tmp_path / "light.png", "dark": tmp_path / "dark.png"}
    found = browser.page(elsewhere.chromium(), steps, "mlp", pictures, STEPS)
    assert found["status"].startswith(f"Step {STEPS} of {STEPS}: loss ")
    before, after = (float(text.removesuffix(" MB")) for text in found["heaps"])
    assert 0 < after < 0.75 * before
    assert [text.partition(": ")[0] for text in found["legend"]] == ["original", "rewritten"]
    first, second = (float(text.partition(": ")[2]) for text in found["legend"])
    assert first == pytest.approx(second, abs=1e-5)
    assert pictures["light"].read_bytes() != pictures["dark"].read_bytes()


@javascript
@chromium
@pytest.mark.slow
def test_a_failure_in_the_browser_is_reported(steps):
    with pytest.raises(RuntimeError, match=r"missing\.onnx.*404"):
        places.in_browser(elsewhere.chromium(), steps / "missing.onnx", steps / "state.safetensors", 1)


@javascript
@pytest.mark.slow
def test_webassembly_runs_the_planned_nodes_in_the_planned_order(steps):
    here, there = places.executed(steps / "after.onnx", feeds_for(step()), steps / "state.safetensors")
    assert len(here) > 100 and here == there


@pytest.mark.skipif(not (HEADERS / "onnxruntime_cxx_api.h").exists(), reason="no headers of ONNX Runtime: Debian's "
                    "libonnxruntime-dev has them, or set ONNXRUNTIME_HEADERS")  # fmt: skip
@pytest.mark.slow
def test_cpp_trains_to_the_same_losses(steps, tmp_path):
    program = places.build_cpp(HEADERS, tmp_path)
    found = places.in_cpp(program, steps / "after.onnx", steps / "state.safetensors", STEPS)
    assert places.difference(found.losses, wanted(steps, "after.onnx")) == 0
