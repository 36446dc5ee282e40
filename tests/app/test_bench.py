"""The benchmark trains for real: state feeds back, losses coincide, predictions stand next to measurements."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

from onnx_remat import rewrite_model
from onnx_remat.app import bench
from onnx_remat.errors import BudgetInfeasibleError, UsageError
from onnx_remat.session import device
from onnx_remat.session.training import Loop, initial_state
from tests.support.graphs import feeds_for, mlp, model_of


def session_of(model):
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_a_loop_feeds_new_state_back_as_plain_runs_do():
    model = mlp(layers=3, batch=16, width=8)
    feeds = feeds_for(model)
    session = session_of(model)
    loop = Loop(session, feeds, "loss")
    losses = [loop.step() for _ in range(4)]
    names = [value.name for value in session.get_outputs()]
    for loss in losses:
        outputs = dict(zip(names, session.run(None, feeds), strict=True))
        assert loss == float(outputs["loss"])
        feeds |= {name: outputs[f"new.{name}"] for name in feeds if f"new.{name}" in outputs}
    assert all(np.array_equal(value, feeds[name]) for name, value in loop.state().items())
    assert losses[-1] < losses[0]


def test_a_loop_takes_a_batch_at_every_step():
    model = mlp(layers=2, batch=4, width=8)
    feeds, session = feeds_for(model), session_of(model)
    batches = [np.full_like(feeds["x"], i) for i in (1, 2, 3)]
    loop = Loop(session, feeds, "loss")
    losses = [loop.step({"x": x}) for x in batches]
    again = Loop(session, feeds, "loss")
    expected = []
    for x in batches:
        fresh = Loop(session, again.state() | {"x": x}, "loss")
        expected.append(fresh.step())
        again = fresh
    assert losses == expected and len(set(losses)) == 3
    assert loop.step() == again.step()  # the batch before
    with pytest.raises(UsageError, match=r"the model has no input 'X': it has .*x"):
        loop.step({"X": batches[0]})


def test_gradients_without_an_update_are_descended():
    nodes = [helper.make_node("Mul", ["w", "w"], ["loss"]), helper.make_node("Add", ["w", "w"], ["grad.w"])]
    session = session_of(model_of(nodes, {"w": []}, {"loss": [], "grad.w": []}))
    loop = Loop(session, {"w": np.array(2.0, np.float32)}, "loss", rate=0.25)
    assert [loop.step() for _ in range(3)] == [4.0, 1.0, 0.25]


def test_initial_state_suits_its_names_and_takes_what_is_given(tmp_path):
    names = {"w.weight": [4, 4], "w.bias": [4], "state.w.weight.exp_avg": [4, 4], "bn.running_var": [4]}
    nodes = [helper.make_node("Identity", [n], [f"new.{n}"]) for n in names]
    nodes.append(helper.make_node("ReduceSum", ["x"], ["loss"], keepdims=0))
    model = model_of(nodes, {**names, "x": ["batch", 4]}, {"loss": [], **{f"new.{n}": s for n, s in names.items()}})
    np.savez(tmp_path / "s.npz", **{"w.bias": np.full(4, 7.0)})
    state = initial_state(session_of(model), {"batch": 3}, tmp_path / "s.npz")
    assert state["x"].shape == (3, 4) and np.all(state["bn.running_var"] == 1)
    assert np.all(state["w.bias"] == 7) and not state["state.w.weight.exp_avg"].any() and state["w.weight"].std() > 0.1


def test_benchmark_of_a_whole_step(tmp_path, capsys):
    path = tmp_path / "mlp.onnx"
    # tens of megabytes, so that what else moves the resident size, a few hundred kB, is well under the 5 % asked below
    onnx.save(mlp(layers=10, batch=8192, width=64), path)
    flags = ["--budget", "60%", "--steps", "4", "--effort", "0.3s", "--costs", "cpu", "--threads", "1"]
    flags += ["--json", str(tmp_path / "b.json")]
    assert bench.main([str(path), *flags]) == 0
    (result,) = json.loads((tmp_path / "b.json").read_text())
    assert result["exact"] and result["loss_distance"] < 1e-4 and len(result["original"]["losses"]) == 4
    assert len(set(result["original"]["losses"])) == 4
    for side in ("original", "rewritten"):
        assert result[side]["predicted_peak"] == pytest.approx(result[side]["measured_peak"], rel=0.05)
    assert result["rewritten"]["measured_peak"] <= result["budget"]
    assert "equal to the last bit" in capsys.readouterr().out


@pytest.mark.slow
def test_max_batch_is_larger_rewritten(tmp_path, capsys):
    path = tmp_path / "mlp.onnx"
    onnx.save(mlp(layers=6, width=16, dims="batch"), path)
    flags = [
        "--for",
        "session",
        "--budget",
        "100kB",
        "--max-batch",
        "batch",
        "--effort",
        "0.05s",
        "--selector",
        "sqrt_n",
    ]
    assert bench.main([str(path), *flags]) == 0
    words = capsys.readouterr().out.split()
    plain, small = (int(words[i + 2].rstrip(",")) for i, word in enumerate(words) if word == "up")
    assert small > plain > 0


def test_max_batch_counts_the_arena_where_the_budget_covers_it(tmp_path, monkeypatch):
    """It takes more than the tensors alone: 100 % of these are too little for any size."""
    path = tmp_path / "mlp.onnx"
    onnx.save(mlp(layers=2, width=4, dims="batch"), path)

    def none(*_, **__):
        raise BudgetInfeasibleError("none", 0, 0)

    monkeypatch.setattr(bench, "rewrite", none)
    assert bench.max_batch(path, "40kB", "batch", arena=True, effort=0.05)[0] > 0


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--budget", "50%", "--provider", "cuda"], 4, "no CUDAExecutionProvider here"),
        (["--budget", "50%", "--provider", "tpu"], 2, "cuda"),
        (["--budget", "50%", "--max-batch", "batch"], 2, "in bytes"),
        (["--budget", "1GB", "--max-batch", "nope"], 2, "nope"),
        (["--budget", "50%", "--steps", "1"], 2, "at least 2"),
    ],
)
def test_refusals(flags, code, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    onnx.save(mlp(layers=2, batch=8, width=4), tmp_path / "in.onnx")
    assert bench.main([str(tmp_path / "in.onnx"), *flags]) == code
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


@pytest.mark.slow
def test_a_graph_that_is_refused_does_not_keep_the_others_from_an_answer(tmp_path, capsys):
    onnx.save(mlp(layers=6, batch=512, width=32), tmp_path / "fine.onnx")
    onnx.save(mlp(layers=1, batch=1, width=64), tmp_path / "weights.onnx")
    inputs = [str(tmp_path / "weights.onnx"), str(tmp_path / "fine.onnx")]
    flags = ["--budget", "80%", "--steps", "3", "--effort", "0.1s", "--costs", "cpu", "--markdown"]
    assert bench.main([*inputs, *flags]) == 3
    out, err = capsys.readouterr()
    assert "| fine |" in out and "weights" not in out and "weights.onnx" in err and len(err.splitlines()) == 1
    assert "try --budget " in err and "budget=" not in err


def test_cuda_bisection_finds_the_limit_and_runs_what_it_returns():
    asked = []
    found = device.smallest_limit(lambda limit: asked.append(limit) or limit >= 5_000_000_000, 140 << 30)
    assert 0 <= found - 5_000_000_000 <= device.RESOLUTION and len(asked) < 25
    assert device.provider_options(0) == {"arena_extend_strategy": "kSameAsRequested"}
    assert device.provider_options(7)["gpu_mem_limit"] == "7"


@pytest.mark.slow
def test_state_with_names_of_its_own_is_trained_on_both_sides(tmp_path):
    from onnx_remat.ir.state import rename

    model = mlp(layers=6, batch=512, width=32)
    rename(model.graph, {f"new.w{i}": f"next/{i}" for i in range(6)})
    onnx.save(model, tmp_path / "in.onnx")
    state = {"state_outputs": {f"w{i}": f"next/{i}" for i in range(6)}}
    found = bench.benchmark(tmp_path / "in.onnx", "80%", steps=3, costs="cpu", effort=0.3, threads=1, **state)
    assert found.exact and len(set(found.original.losses)) == 3


def test_initial_values_are_looked_at_before_anything_runs(tmp_path, capsys):
    onnx.save(mlp(layers=2, batch=8, width=4), tmp_path / "in.onnx")
    np.savez(tmp_path / "s.npz", w00=np.zeros((4, 4), np.float32))
    (tmp_path / "t.npz").write_bytes(b"no archive")
    (tmp_path / "u.npz").touch()
    unknown = "the model has no input 'w00'; did you mean 'w0'?"
    for name, message in (("s.npz", unknown), ("t.npz", "cannot be read"), ("u.npz", "cannot be read")):
        flags = ["--budget", "50%", "--initial", str(tmp_path / name)]
        assert bench.main([str(tmp_path / "in.onnx"), *flags]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.npz", "there is no such file"),
        ("text.bin", "not an .npz of initial values: give one, or for a checkpoint --runtime PYTHON"),
        ("shape.npz", "input 'w0' has shape (4, 4), not (3,)"),
        ("rank.npz", "input 'x' has shape (8, 4), not (8, 4, 1)"),
        ("type.npz", "input 'w0' is of type float32, not complex128"),
        ("words.npz", "input 'w0' is of type float32, not <U4"),
        ("objects.npz", "cannot be read as initial values: Object arrays"),
    ],
)
def test_initial_values_that_do_not_suit_the_model_are_refused_in_one_line(name, message, tmp_path, capsys):
    onnx.save(mlp(layers=2, batch=8, width=4), tmp_path / "in.onnx")
    (tmp_path / "text.bin").write_text("hi")
    arrays = {"shape": np.zeros(3), "type": np.zeros((4, 4), complex), "words": np.full((4, 4), "zero")}
    for stem, array in (*arrays.items(), ("objects", np.full((4, 4), None))):
        np.savez(tmp_path / f"{stem}.npz", w0=array)
    np.savez(tmp_path / "rank.npz", x=np.zeros((8, 4, 1)))
    flags = ["--budget", "50%", "--steps", "2", "--initial", str(tmp_path / name)]
    assert bench.main([str(tmp_path / "in.onnx"), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line and message in line


def test_losses_that_are_no_numbers_are_far_from_numbers_and_equal_to_each_other():
    nan, inf = float("nan"), float("inf")
    assert bench._distance((1.0, 2.0), (1.0, nan)) == bench._distance((nan, 2.0), (1.0, 2.0)) == inf
    assert bench._distance((1.0, inf), (1.0, 2.0)) == bench._distance((inf,), (-inf,)) == inf
    assert bench._distance((1.0, nan, inf), (1.0, nan, inf)) == 0 and bench._distance((1.0, 2.0), (1.0, 4.0)) == 0.5
    assert bench._same((1.0, nan), (1.0, float("nan"))) and not bench._same((1.0, nan), (1.0, 2.0))


def result_of(*losses):
    sides = [bench.Side(100, 100, 0.1, each) for each in losses]
    return bench.Benchmark("step", 90, "cpu", "here", *sides, 0.0, 0.0, True, bench._distance(*losses))


def test_losses_that_are_no_numbers_are_null_in_json_and_counted_in_the_text(tmp_path, monkeypatch):
    def refused(constant):
        raise ValueError(constant)

    onnx.save(mlp(layers=2), tmp_path / "in.onnx")
    found = result_of((1.0, 2.0), (1.0, float("nan")))
    monkeypatch.setattr(bench, "benchmark", lambda *_, **__: found)
    assert bench.main([str(tmp_path / "in.onnx"), "--budget", "50%", "--json", str(tmp_path / "b.json")]) == 0
    (read,) = json.loads((tmp_path / "b.json").read_text(), parse_constant=refused)
    assert read == json.loads(found.to_json(), parse_constant=refused)
    assert read["rewritten"]["losses"] == [1.0, None] and read["loss_distance"] is None
    assert "0 losses of the original and 1 of the rewritten are NaN" in found.to_text().splitlines()
    assert "NaN" not in result_of((1.0, 2.0), (1.0, 2.0)).to_text()


def test_a_file_that_cannot_be_read_does_not_keep_the_others_from_json(tmp_path, capsys, monkeypatch):
    onnx.save(mlp(layers=2), tmp_path / "in.onnx")
    real, known = bench.benchmark, {str(tmp_path / "in.onnx"): result_of((1.0,), (1.0,))}
    monkeypatch.setattr(bench, "benchmark", lambda path, *a, **k: known.get(str(path)) or real(path, *a, **k))
    flags = ["--budget", "50%", "--json", str(tmp_path / "b.json")]
    assert bench.main([str(tmp_path / "none.onnx"), str(tmp_path / "in.onnx"), *flags]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert "none.onnx" in line and len(json.loads((tmp_path / "b.json").read_text())) == 1


def test_a_table_and_json_do_not_share_standard_output(tmp_path, capsys):
    onnx.save(mlp(layers=2), tmp_path / "in.onnx")
    assert bench.main([str(tmp_path / "in.onnx"), "--budget", "50%", "--markdown", "--json", "-"]) == 2
    out, err = capsys.readouterr()
    assert not out and "--markdown and --json - both write to standard output: give --json FILE" in err


def test_a_search_for_the_largest_batch_takes_no_flags_of_training(tmp_path, capsys):
    onnx.save(mlp(layers=2, width=64, dims="batch"), tmp_path / "in.onnx")
    search = [str(tmp_path / "in.onnx"), "--max-batch", "batch", "--for", "session", "--effort", "0.05s"]
    assert bench.main([*search, "--budget", "1MB", "--markdown"]) == 2
    assert "--max-batch trains nothing: leave --markdown out" in capsys.readouterr().err
    for flags in (["--steps", "50"], ["--threads", "0"], ["--runtime", "python-of-another"]):
        assert bench.main([*search, "--budget", "1MB", *flags]) == 2
        assert f"--max-batch trains nothing: leave {flags[0]} out" in capsys.readouterr().err
    assert bench.main([*search, "--budget", "20kB"]) == 3  # not even one row fits


def test_the_loss_is_the_output_that_is_named():
    make = helper.make_node
    nodes = [make("ReduceMean", ["x"], ["first"], keepdims=0), make("ReduceMax", ["x"], ["second"], keepdims=0)]
    result = rewrite_model(model_of(nodes, {"x": [4]}, {"first": [], "second": []}), "100%", effort=0.01, verify="none")
    assert bench._loss(result, "second") == "second"


def test_the_help_says_what_is_planned_for():
    """`onnx-remat` plans for a loop by default, and this command measures plain sessions."""
    text = " ".join(bench.build_parser().format_help().split())
    assert "It plans for onnxruntime's own session" in text and "not for a loop, the default of onnx-remat" in text
    assert "for a largest batch: what will train with the file" in text
    assert "(default a profile of IN, measured first" in text and "(default cpu, or a100" not in text
