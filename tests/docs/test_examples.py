"""Every example runs to its end, in under 100 lines, and learns what it is shown."""

from __future__ import annotations

import importlib.util
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
    "flower_clients": ("torch", "onnxscript", "flwr"),
}
_EVALUATED = r"evaluated: (?P<before>[\d.]+) before, (?P<after>[\d.]+) after"
LEARNT = {
    "finetune_transformer": _EVALUATED,
    "trainer": _EVALUATED,
    "lightning_module": _EVALUATED,
    "cnn_from_forward_onnx": r"loss (?P<before>[\d.]+) at first, (?P<after>[\d.]+) in the end",
    "onnxsim_step": r"loss (?P<before>[\d.]+) at first, (?P<after>[\d.]+) in the end",
    "flower_clients": r"round 0: global loss (?P<before>[\d.]+)\n(?s:.)*round 6: global loss (?P<after>[\d.]+)",
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
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"training takes .* budget .* kept", done.stdout)
    found = re.search(LEARNT[example.stem], done.stdout)
    assert found and float(found["after"]) < 0.5 * float(found["before"])


@pytest.mark.slow
def test_flower_clients_average_to_the_weights_that_pytorch_computes(tmp_path, monkeypatch, capfd):
    """Each client trains a copy of the module in PyTorch; the mean of the copies is weighted by batches."""
    for package in NEEDS["flower_clients"]:
        pytest.importorskip(package)
    import torch
    from torch.nn.functional import cross_entropy

    found = importlib.util.spec_from_file_location("flower_clients", ROOT / "examples" / "flower_clients.py")
    example = importlib.util.module_from_spec(found)
    found.loader.exec_module(example)
    monkeypatch.chdir(tmp_path)
    example.main()
    losses = [float(loss) for loss in re.findall(r"global loss ([\d.]+)", capfd.readouterr().out)]
    assert len(losses) == example.ROUNDS + 1
    assert losses == sorted(losses, reverse=True)

    torch.manual_seed(0)
    model = example.network()
    total = sum(number for number, _ in example.SHARES.values())
    for _ in range(example.ROUNDS):
        mean = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
        for partition, share in example.SHARES.items():
            copy = example.network()
            copy.load_state_dict(model.state_dict())
            optimizer = torch.optim.SGD(copy.parameters(), example.RATE, example.MOMENTUM)
            for batch in example.batches(*share, seed=partition):
                optimizer.zero_grad()
                cross_entropy(copy(torch.from_numpy(batch["input.0"])), torch.from_numpy(batch["input.1"])).backward()
                optimizer.step()
            for name, tensor in copy.state_dict().items():
                mean[name] += tensor * (share[0] / total)
        model.load_state_dict(mean)
    federated = torch.load("global.pt")
    assert federated.keys() == mean.keys()
    for name, tensor in mean.items():
        torch.testing.assert_close(federated[name], tensor, rtol=1e-3, atol=1e-3, msg=name)
