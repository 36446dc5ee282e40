"""Every example runs to its end, in under 100 lines, and learns what it is shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NEEDS = {
    "finetune_transformer": ("torch", "onnxscript"),
    "cnn_from_forward_onnx": (),
    "flax_mlp": ("flax", "optax"),
    "keras_jax": ("keras", "optax"),
    "onnxsim_step": ("onnxsim",),
    "trainer": ("torch", "transformers", "accelerate"),
    "lightning_module": ("torch", "lightning"),
}
_EVALUATED = r"evaluated: (?P<before>[\d.]+) before, (?P<after>[\d.]+) after"
LEARNT = {
    "finetune_transformer": _EVALUATED,
    "trainer": _EVALUATED,
    "lightning_module": _EVALUATED,
    "cnn_from_forward_onnx": r"loss (?P<before>[\d.]+) at first, (?P<after>[\d.]+) in the end",
    "onnxsim_step": r"loss (?P<before>[\d.]+) at first, (?P<after>[\d.]+) in the end",
    "flax_mlp": r"step 0: loss (?P<before>[\d.]+)\n(?s:.)*step 40: loss (?P<after>[\d.]+)",
    "keras_jax": r"step 0: loss (?P<before>[\d.]+)\n(?s:.)*step 40: loss (?P<after>[\d.]+)",
}


def test_examples_are_short_and_known():
    assert {path.stem for path in EXAMPLES} == set(NEEDS) == set(LEARNT)
    assert all(len(path.read_text(encoding="utf-8").splitlines()) < 100 for path in EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains_within_its_budget(example, tmp_path):
    for package in NEEDS[example.stem]:
        pytest.importorskip(package)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"training takes .* budget .* kept", done.stdout)
    found = re.search(LEARNT[example.stem], done.stdout)
    assert found and float(found["after"]) < 0.5 * float(found["before"])
