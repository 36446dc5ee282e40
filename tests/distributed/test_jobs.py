"""Jobs of several ranks: the numbers of one process with the joined batch, memory, and what a rank's death does."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import onnx
import pytest

from onnx_remat import ModelError, UsageError
from onnx_remat.measure.training_memory import available, one_node
from onnx_remat.session.session import Session
from onnx_remat.training import Loop
from tests.support.adam import adam, first_state, shared_batches
from tests.support.graphs import model_of, same_bits
from tests.support.ranks import ROOT, launch, launch_in_turn

pytest.importorskip("torch")

ROWS, WIDTH = 8, 16
LOCAL = ("shift",)  # running statistics: those of the first rank's batches, not of all


def alone(parts, joined, local=LOCAL):
    """Losses and state of one process with joined batches, made of `parts` of `ROWS` rows each."""
    whole = adam(batch=ROWS * parts, width=WIDTH, counted=ROWS * parts)
    loop = Loop(whole, first_state(whole) | joined[0])
    losses = [loop.step(batch) for batch in joined]
    return losses, {name: a for name, a in loop.state().items() if name in first_state(whole) and name not in local}


def assert_equal_to_one_process(ranks, losses, state):
    assert [(rank.code, rank.errors) for rank in ranks] == [(0, "")] * len(ranks)
    for rank in ranks:
        assert rank.notes["losses"] == pytest.approx(losses, rel=1e-6)
        assert sorted(rank.state) == sorted(ranks[0].state)
        assert same_bits(rank.state.values(), ranks[0].state.values())
    for name in ranks[0].state:
        if name in state:
            np.testing.assert_allclose(ranks[0].state[name], state[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """One rank's step; tied weights, a fixed parameter, a running mean, a count of steps, a rate that is an input."""
    path = tmp_path_factory.mktemp("step") / "train.onnx"
    onnx.save(adam(batch=ROWS, width=WIDTH, counted=ROWS), path)
    return str(path)


def job_of(model, tmp_path, steps, **more):
    return {"model": model, "steps": steps, "save": str(tmp_path / "state.safetensors"), **more}


@pytest.mark.slow
def test_two_ranks_with_shards_and_two_batches_each_are_one_process(model, tmp_path):
    apart, joined = shared_batches(50, 2, ROWS, WIDTH, micro=2)
    job = job_of(model, tmp_path, 50, micro=2, options={"zero": True})
    ranks = launch(tmp_path / "job", 2, job, first_state(onnx.load(model)), apart)
    assert_equal_to_one_process(ranks, *alone(4, joined))
    assert ranks[0].state["count.steps"] == 50
    assert ranks[0].notes["taken"]["optimizer"] < 0.7 * 2 * ranks[0].notes["taken"]["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("zero", [False, True])
def test_ranks_are_one_process(count, zero, model, tmp_path):
    """Running means, too, if they are averaged: each is linear in its rank's rows."""
    apart, joined = shared_batches(50, count, ROWS, WIDTH)
    job = job_of(model, tmp_path, 50, options={"zero": zero, "buffers": "mean"})
    ranks = launch(tmp_path / "job", count, job, first_state(onnx.load(model)), apart)
    losses, state = alone(count, joined, local=())
    assert "shift" in state
    assert_equal_to_one_process(ranks, losses, state)


@pytest.mark.slow
def test_accumulating_four_batches_is_one_large_batch_in_the_memory_of_a_small_one(model, tmp_path):
    apart, joined = shared_batches(50, 1, ROWS, WIDTH, micro=4)
    state = first_state(onnx.load(model))
    ranks = launch(tmp_path / "four", 1, job_of(model, tmp_path, 50, micro=4), state, apart)
    assert_equal_to_one_process(ranks, *alone(4, joined))
    once, _ = shared_batches(1, 1, ROWS, WIDTH)
    (small,) = launch(tmp_path / "one", 1, job_of(model, tmp_path, 1), state, once)
    assert small.notes["taken"] == ranks[0].notes["taken"]


@pytest.mark.slow
def test_uneven_batches_are_weighed_by_their_rows(tmp_path):
    """Rank 1 has 5 rows where rank 0 has 8, in the last step none."""
    path = tmp_path / "train.onnx"
    onnx.save(adam(batch=ROWS, width=WIDTH, counted=1, dims="n"), path)
    ones = adam(batch=ROWS, width=WIDTH, counted=1)
    apart, joined = shared_batches(3, 2, ROWS, WIDTH)
    for name in "xt":
        apart[f"1.1.0.{name}"] = apart[f"1.1.0.{name}"][:5]
        del apart[f"2.1.0.{name}"]
    job = {"model": str(path), "steps": 3, "weigh": True, "options": {"dims": {"n": ROWS}}}
    # a step whose loss is a mean over its own rows, whatever their number: sum over rows, divided by them
    onnx.save(_mean_over_rows(onnx.load(path)), path)
    ranks = launch(tmp_path / "job", 2, job, first_state(ones), apart)
    rows = [[0, 16], [0, 13], [0, 8]]
    whole = {n: _mean_over_rows(adam(batch=n, width=WIDTH, counted=1, dims="n")) for n in (16, 13, 8)}
    state, losses = first_state(ones), []
    for batch, (start, stop) in zip(joined, rows, strict=True):
        loop = Loop(whole[stop], state | {k: a[start:stop] for k, a in batch.items()}, dims={"n": stop})
        losses.append(loop.step())
        state = {name: a for name, a in loop.state().items() if name in state}
    del state["shift"]
    assert_equal_to_one_process(ranks, losses, state)


def _mean_over_rows(model):
    """Divide the loss, and its gradient, by the number of elements of the batch at hand."""
    make, graph = onnx.helper.make_node, model.graph
    nodes = [make("Size", ["x"], ["size"]), make("Cast", ["size"], ["rows.float"], to=1)]
    for node in graph.node:
        if node.output[0] == "loss":
            node.input[1] = "rows.float"
        if node.output[0] == "g":
            nodes.append(make("Div", ["two.free", "rows.float"], ["two.rows"]))
            node.input[1] = "two.rows"
    graph.initializer.append(onnx.numpy_helper.from_array(np.float32(2), "two.free"))
    kept = [*nodes, *graph.node]
    del graph.node[:]
    graph.node.extend(kept)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("zero", [False, True])
def test_a_dead_rank_ends_the_job_with_a_line_and_the_checkpoint_goes_on(zero, model, tmp_path):
    apart, _ = shared_batches(20, 2, ROWS, WIDTH)
    state, options = first_state(onnx.load(model)), {"zero": zero}
    whole = launch(tmp_path / "whole", 2, job_of(model, tmp_path, 20, options=options), state, apart)
    dying = job_of(model, tmp_path, 20, options=options, save_at=8, kill=[1, 10], timeout=20)
    survivor, dead = launch(tmp_path / "dying", 2, dying, state, apart)
    assert dead.code == -9 and survivor.code == 7
    assert survivor.errors.count("\n") == 1
    assert "rank 0: error: another rank has ended" in survivor.errors
    assert "while making step 11" in survivor.errors and "load its last checkpoint" in survivor.errors
    wrong = {name: array + 1 for name, array in state.items()}  # all that matters comes from the file
    wrong |= {name: state[name] for name in ("fixed", "rate")}
    resumed = job_of(model, tmp_path, 20, options=options, load=str(tmp_path / "state.safetensors"))
    ranks = launch(tmp_path / "resumed", 2, resumed, wrong, apart)
    for rank in ranks:
        assert rank.notes["losses"] == whole[0].notes["losses"][8:]
        assert same_bits(rank.state.values(), whole[0].state.values())


@pytest.mark.slow
def test_a_checkpoint_of_shards_is_loaded_by_any_number_of_ranks(model, tmp_path):
    apart, _ = shared_batches(6, 2, ROWS, WIDTH)
    state = first_state(onnx.load(model))
    saving = job_of(model, tmp_path, 6, options={"zero": True}, save_at=6)
    whole = launch(tmp_path / "two", 2, saving, state, apart)
    loading = job_of(model, tmp_path, 6, load=str(tmp_path / "state.safetensors"))
    (one,) = launch(tmp_path / "one", 1, loading, state, apart)
    assert one.notes["steps"] == 6 and sorted(one.state) == sorted(whole[0].state)
    assert same_bits([one.state[name] for name in whole[0].state], whole[0].state.values())


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="peaks are measured on Linux")
@pytest.mark.parametrize("zero", [False, True])
def test_a_rank_keeps_its_budget(zero, tmp_path):
    wide = adam(layers=6, batch=2048, width=512, counted=2048)
    onnx.save(wide, tmp_path / "train.onnx")
    apart, _ = shared_batches(3, 2, 2048, 512)
    options = {"zero": zero, "budget": "85%", "effort": 2}
    job = {"model": str(tmp_path / "train.onnx"), "steps": 3, "options": options, "warm": str(one_node(tmp_path))}
    ranks = launch(tmp_path / "job", 2, job, first_state(wide), apart)
    for rank in ranks:
        assert rank.code == 0, rank.errors
        taken = rank.notes["taken"]
        assert taken["gradients"] == taken["parameters"]  # once: the sums are nobody's outputs, and nowhere else
        # A fifth less than the arrays, where the heap had free pages before.
        assert 0.8 * sum(taken.values()) < rank.notes["resident"] <= rank.notes["predicted"]
    shares = 2 * ranks[0].notes["taken"]["parameters"] / (2 if zero else 1)
    assert ranks[0].notes["taken"]["optimizer"] == pytest.approx(shares, rel=0.01)


@pytest.mark.slow
def test_gradients_in_bfloat16_and_a_clip(model, tmp_path):
    """The clip is that of shards, too; sending halves of the bytes costs digits, and no equality of ranks."""
    apart, _ = shared_batches(10, 2, ROWS, WIDTH)
    state = first_state(onnx.load(model))
    found = {}
    for name, options in {
        "clip": {"clip_norm": 0.05}, "shards": {"clip_norm": 0.05, "zero": True}, "plain": {},
        "half": {"wire": "bfloat16", "bucket": 256},
    }.items():  # fmt: skip
        ranks = launch(tmp_path / name, 2, job_of(model, tmp_path, 10, options=options), state, apart)
        assert [rank.code for rank in ranks] == [0, 0], ranks[0].errors
        assert same_bits(ranks[0].state.values(), ranks[1].state.values())
        found[name] = ranks[0].state
    np.testing.assert_allclose(found["clip"]["m.w0"], found["shards"]["m.w0"], rtol=1e-5, atol=1e-8)
    assert np.linalg.norm(found["clip"]["m.w0"]) < 0.9 * np.linalg.norm(found["plain"]["m.w0"])
    assert not np.array_equal(found["half"]["w0"], found["plain"]["w0"])
    np.testing.assert_allclose(found["half"]["w0"], found["plain"]["w0"], atol=0.01)


@pytest.mark.slow
def test_seeds_differ_by_rank_and_step(model, tmp_path):
    """The loss plus the input ``seed`` in thousandths, and a random number that has no seed of its own."""
    noisy = onnx.load(model)
    make, loss = onnx.helper.make_node, next(n for n in noisy.graph.node if n.output[0] == "loss")
    loss.output[0] = "loss.plain"
    noisy.graph.node.extend([
        make("Cast", ["seed"], ["seed.float"], to=1), make("Mul", ["seed.float", "thousandth"], ["seed.small"]),
        make("RandomUniformLike", ["loss.plain"], ["noise"], high=1e-6, low=0.0),
        make("Sum", ["loss.plain", "seed.small"], ["seeded"]),
        make("Add", ["seeded", "noise"], ["loss"]),
    ])  # fmt: skip
    noisy.graph.input.append(onnx.helper.make_tensor_value_info("seed", onnx.TensorProto.INT64, []))
    noisy.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.001), "thousandth"))
    onnx.save(noisy, tmp_path / "noisy.onnx")
    apart, _ = shared_batches(3, 2, ROWS, WIDTH)
    state, losses = first_state(onnx.load(model)), []
    for name, path, seed in (("a", "noisy.onnx", 7), ("b", "noisy.onnx", 7), ("c", "noisy.onnx", 8), ("d", model, 7)):
        job = job_of(str(tmp_path / path), tmp_path, 3, options={"seed": seed})
        ranks = launch(tmp_path / name, 2, job, state, apart)
        assert [rank.code for rank in ranks] == [0, 0], ranks[0].errors
        losses.append(np.array(ranks[0].notes["losses"]))
    a, b, c, plain = losses
    np.testing.assert_allclose(a - plain, [0.0075, 0.0095, 0.0115], atol=2e-6)  # of ranks 0 and 1: 7 and 8, 9 and 10
    assert np.array_equal(a, b) and not np.array_equal(c, a + np.float32(0.001))


@pytest.mark.slow
def test_ranks_wait_for_a_plan_for_longer_than_the_timeout(tmp_path):
    (tmp_path / "job.py").write_text(
        "import sys, time\n"
        "from onnx_remat import distributed\n"
        "from onnx_remat.distributed.collectives import Ranks\n"
        "def main():\n"
        "    ranks = Ranks()\n"
        "    print(ranks.agree(lambda: time.sleep(20) or 'planned', patient=True))\n"
        "sys.exit(distributed.run(main, timeout=10))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "job.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["planned"] * 2), done.stderr


@pytest.mark.slow
def test_torchrun_starts_a_job_and_a_failure_is_its_failure(model, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, numpy as np\n"
        "from onnx_remat import distributed\n"
        "def main():\n"
        f"    distributed.DataParallel({model!r}, {{}})\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(distributed.run(main))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "onnx-remat: rank 0: error: no value for input" in done.stderr


@pytest.mark.slow
def test_a_rank_without_a_batch_has_the_rate_of_the_others(model, tmp_path):
    """Without shards each rank updates all by itself; with them, a rank updates its share for all."""
    apart, _ = shared_batches(3, 2, ROWS, WIDTH)
    for name in "xt":
        del apart[f"1.1.0.{name}"]
    apart |= {f"{step}.0.0.rate": np.float32(0.01 * (step + 1)) for step in range(3)}
    apart |= {f"{step}.1.0.rate": np.float32(0.01 * (step + 1)) for step in (0, 2)}
    state = first_state(onnx.load(model))
    jobs = [job_of(model, tmp_path, 3, options={"zero": zero}) for zero in (False, True)]
    whole, shards = launch_in_turn([tmp_path / "whole", tmp_path / "shards"], 2, jobs, state, apart)
    for ranks in (whole, shards):
        assert [rank.code for rank in ranks] == [0, 0], [rank.errors for rank in ranks]
        assert same_bits(ranks[0].state.values(), ranks[1].state.values())
    for name, array in whole[0].state.items():
        np.testing.assert_allclose(shards[0].state[name], array, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.slow
def test_gradients_in_float16_do_not_overflow_by_their_weights(model, tmp_path):
    apart, _ = shared_batches(2, 2, ROWS, WIDTH)
    state = first_state(onnx.load(model))
    job = job_of(model, tmp_path, 2, weight=1e6)
    jobs = [job, job | {"options": {"wire": "float16"}}]
    plain, half = launch_in_turn([tmp_path / "plain", tmp_path / "half"], 2, jobs, state, apart)
    assert [rank.code for rank in half] == [0, 0], half[0].errors
    np.testing.assert_allclose(half[0].state["m.w0"], plain[0].state["m.w0"], rtol=1e-2, atol=1e-6)


def with_a_rate_for_biases(model):
    """Return the step with a second rate, which with shards the last rank does not read."""
    for node in model.graph.node:
        if node.output[0].startswith("sr.b"):
            node.input[1] = "rate.b"
    model.graph.input.append(onnx.helper.make_tensor_value_info("rate.b", onnx.TensorProto.FLOAT, []))
    return model


@pytest.mark.slow
def test_a_rate_is_that_of_the_first_rank_that_feeds_it(model, tmp_path):
    """Each in turn is fed by all, by one that does not read it, and by none, also where a rank has no batch."""
    onnx.save(with_a_rate_for_biases(onnx.load(model)), tmp_path / "rates.onnx")
    apart, _ = shared_batches(4, 2, ROWS, WIDTH)
    for step, rank in ((2, 0), (3, 1)):
        for name in "xt":
            del apart[f"{step}.{rank}.0.{name}"]
    fed = {f"{rank}.0.{name}": 0.01 * (1 + rank) for rank in (0, 1) for name in ("rate", "rate.b")}
    apart |= {f"0.{name}": np.float32(rate) for name, rate in fed.items()}
    apart |= {"1.0.0.rate": np.float32(0.02), "1.1.0.rate.b": np.float32(0.03)}
    state = first_state(onnx.load(model))
    del state["rate"]
    first = {"rate": np.float32(0.01), "rate.b": np.float32(0.01)}
    second = {"rate": np.float32(0.02), "rate.b": np.float32(0.03)}
    alike = {name: array for name, array in apart.items() if "rate" not in name}
    alike |= {f"0.{rank}.0.{name}": rate for rank in (0, 1) for name, rate in first.items()}
    alike |= {f"1.{rank}.0.{name}": rate for rank in (0, 1) for name, rate in second.items()}
    found = {
        (zero, kind): launch(
            tmp_path / f"{zero}{kind}", 2, job_of(str(tmp_path / "rates.onnx"), tmp_path, 4, options={"zero": zero}),
            state, batches,
        )
        for zero in (False, True)
        for kind, batches in (("apart", apart), ("alike", alike))
    }  # fmt: skip
    for ranks in found.values():
        assert [rank.code for rank in ranks] == [0, 0], [rank.errors for rank in ranks]
        assert same_bits(ranks[0].state.values(), ranks[1].state.values())
    for zero in (False, True):
        wanted, got = (found[zero, kind][0].state for kind in ("alike", "apart"))
        assert same_bits(got.values(), wanted.values())
    for name, array in found[False, "apart"][0].state.items():
        np.testing.assert_allclose(found[True, "apart"][0].state[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_ranks_weight_all_batches_or_none(model, tmp_path):
    apart, _ = shared_batches(1, 2, ROWS, WIDTH)
    ranks = launch(
        tmp_path / "job", 2, job_of(model, tmp_path, 1, weights={"1": 5}), first_state(onnx.load(model)), apart
    )
    for rank in ranks:
        assert "some ranks weight their batches and others do not: pass weight on every rank" in rank.errors


@pytest.mark.slow
def test_noise_that_ranks_would_draw_apart_is_refused(model, tmp_path):
    noisy = onnx.load(model)
    for node in noisy.graph.node:
        if node.output[0] == "new.b0":
            node.output[0] = "plain.b0"
    noisy.graph.node.extend([
        onnx.helper.make_node("RandomNormalLike", ["b0"], ["noise"], name="draw"),
        onnx.helper.make_node("Add", ["plain.b0", "noise"], ["new.b0"]),
    ])  # fmt: skip
    onnx.save(noisy, tmp_path / "noisy.onnx")
    apart, _ = shared_batches(1, 2, ROWS, WIDTH)
    state = first_state(onnx.load(model))
    ranks = launch(tmp_path / "two", 2, job_of(str(tmp_path / "noisy.onnx"), tmp_path, 1), state, apart)
    for rank in ranks:
        assert "node 'draw' (RandomNormalLike) of the update would draw other numbers on every rank" in rank.errors
    (one,) = launch(tmp_path / "one", 1, job_of(str(tmp_path / "noisy.onnx"), tmp_path, 1), state, apart)
    assert one.code == 0


@pytest.fixture
def here():
    """Join a job of this process alone."""
    from torch import distributed as engine

    engine.init_process_group("gloo", store=engine.HashStore(), rank=0, world_size=1)
    yield
    engine.destroy_process_group()


def small(dims=None, **more):
    """Return a step whose gradient is the sum of ``x``, where ``plain`` is twice the mean of ``x * w``."""
    make = onnx.helper.make_node
    nodes = [
        make("Mul", ["x", "w"], ["y"]), make("ReduceMean", ["y"], ["mean"], keepdims=0),
        make("Mul", ["mean", "two"], ["plain"]), make("ReduceSum", ["x", "first"], ["g"], keepdims=0),
        make("Sub", ["w", "g"], ["new.w"]), *more.get("nodes", [make("Identity", ["plain"], ["loss"])]),
    ]  # fmt: skip
    inputs = {"x": [dims or 4, 3], "w": [3], **more.get("inputs", {})}
    outputs = {"loss": [], "new.w": [3], **more.get("outputs", {})}
    return model_of(nodes, inputs, outputs, {"two": np.float32(2), "first": np.array([0])})


def rows_of(count):
    return np.ones((count, 3), np.float32)


START = {"w": np.ones(3, np.float32)}


@pytest.mark.slow
def test_a_batch_of_another_size_has_a_weight_and_values_of_its_own(here):
    from onnx_remat.distributed import DataParallel

    make = onnx.helper.make_node
    nodes = [make("Mul", ["positions", "plain"], ["p"]), make("ReduceMean", ["p"], ["loss"], keepdims=0)]
    model = small(dims="n", nodes=nodes, inputs={"positions": ["n"]})
    state = START | {"positions": np.ones(4, np.float32)}
    training = DataParallel(model, state, dims={"n": 4})
    assert training.step({"x": rows_of(4)}) == 2
    again = {"positions": np.ones(5, np.float32)}
    training.step({"x": rows_of(5)} | again, weight=5)
    training.step({"x": rows_of(4), "positions": np.ones(4, np.float32)})  # as opened: no weight
    training.step({"x": rows_of(5)} | again, weight=5)
    with pytest.raises(UsageError, match=r"the batch has another size .n=5.: pass its number of rows as weight"):
        training.step({"x": rows_of(5)} | again)
    training = DataParallel(model, state, dims={"n": 4})
    with pytest.raises(UsageError, match="no value for input 'positions': pass it as state or in every batch"):
        training.step({"x": rows_of(5)}, weight=5)


@pytest.mark.slow
def test_a_rate_of_one_batch_is_that_of_all_that_are_accumulated(here):
    from onnx_remat.distributed import DataParallel

    model = small(inputs={"rate": []})
    for node in model.graph.node:
        if node.output[0] == "new.w":
            node.input[1] = "step"
    model.graph.node.append(onnx.helper.make_node("Mul", ["g", "rate"], ["step"]))
    model.graph.node.insert(4, model.graph.node.pop())
    training = DataParallel(model, START)
    training.step([{"x": rows_of(4), "rate": np.float32(0.5)}, {"x": rows_of(4)}])
    training.step({"x": rows_of(4)})
    assert training.state()["w"].tolist() == [1 - 0.5 * 4 - 0.5 * 4] * 3


def test_state_that_varies_with_the_batch_keeps_its_size(here):
    from onnx_remat.distributed import DataParallel

    make = onnx.helper.make_node
    nodes = [
        make("Identity", ["plain"], ["loss"]), make("ReduceSum", ["y", "one"], ["rows"], keepdims=0),
        make("Add", ["last", "rows"], ["new.last"]),
    ]  # fmt: skip
    model = small(dims="n", nodes=nodes, inputs={"last": ["n"]}, outputs={"new.last": ["n"]})
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1]), "one"))
    training = DataParallel(model, START | {"last": np.zeros(4, np.float32)}, dims={"n": 4})
    training.step({"x": rows_of(4)})
    with pytest.raises(UsageError, match="state 'last', which the step renews, varies with the batch"):
        training.step({"x": rows_of(5)}, weight=5)


@pytest.mark.slow
def test_a_seed_that_nobody_gives_is_asked_for(here):
    from onnx_remat.distributed import DataParallel

    make = onnx.helper.make_node
    nodes = [make("Cast", ["seed"], ["s"], to=1), make("Add", ["plain", "s"], ["loss"])]
    model = small(nodes=nodes, inputs={"seed": (onnx.TensorProto.INT64, [])})
    with pytest.raises(UsageError, match="no value for input 'seed'"):
        DataParallel(model, START).step({"x": rows_of(4)})
    assert DataParallel(model, START).step({"x": rows_of(4), "seed": np.array(7)}) == 2 + 7
    assert DataParallel(model, START, seed=5).step({"x": rows_of(4)}) == 2 + 5


@pytest.mark.slow
def test_numbers_of_small_types_are_given_as_lists(here):
    from onnx_remat.distributed import DataParallel

    make = onnx.helper.make_node
    nodes = [make("Cast", ["k"], ["s"], to=1), make("Add", ["plain", "s"], ["loss"])]
    model = small(nodes=nodes, inputs={"k": (onnx.TensorProto.UINT8, [])})
    assert DataParallel(model, START | {"k": 5}).step({"x": rows_of(4)}) == 2 + 5
    assert DataParallel(model, START).step({"x": rows_of(4), "k": 7}) == 2 + 7


@pytest.mark.slow
def test_a_float_input_called_seed_is_a_number_like_others(here):
    from onnx_remat.distributed import DataParallel

    model = small(nodes=[onnx.helper.make_node("Add", ["plain", "seed"], ["loss"])], inputs={"seed": []})
    assert DataParallel(model, START | {"seed": np.float32(7)}, seed=5).step({"x": rows_of(4)}) == 2 + 7
    with pytest.raises(UsageError, match="no value for input 'seed'"):
        DataParallel(model, START, seed=5).step({"x": rows_of(4)})


def test_a_gradient_that_is_nan_makes_all_gradients_nan_where_they_are_clipped(here):
    from onnx_remat.distributed import DataParallel

    make = onnx.helper.make_node
    nodes = [
        make("ReduceMean", ["u"], ["m"], keepdims=0), make("Add", ["plain", "m"], ["loss"]),
        make("Mul", ["y", "v"], ["z"]), make("ReduceSum", ["z", "first"], ["h"], keepdims=0),
        make("Sub", ["u", "h"], ["new.u"]),
    ]  # fmt: skip
    model = small(nodes=nodes, inputs={"u": [3], "v": [3]}, outputs={"new.u": [3]})
    state = START | {"u": np.ones(3, np.float32), "v": np.full(3, np.nan, np.float32)}
    training = DataParallel(model, state, clip_norm=1.0)
    training.step({"x": rows_of(4)})
    assert {name: bool(np.isnan(array).all()) for name, array in training.state().items()} == {"w": True, "u": True}


@pytest.mark.slow
def test_training_goes_on_after_a_size_with_which_the_step_does_not_open(here, tmp_path, monkeypatch):
    from onnx_remat.distributed import DataParallel, parallel

    def opened(*given, **more):
        if more["dims"]["n"] == 5:
            raise ModelError("not with five rows")
        return Session(*given, **more)

    training = DataParallel(small(dims="n"), START, dims={"n": 4})
    training.save(tmp_path / "first")
    monkeypatch.setattr(parallel, "Session", opened)
    with pytest.raises(ModelError, match="not with five rows"):
        training.step({"x": rows_of(5)}, weight=5)
    training.load(tmp_path / "first")
    assert training.step({"x": rows_of(4)}) == 2


@pytest.mark.slow
def test_inputs_that_nobody_gives_have_their_defaults(here):
    from onnx_remat.distributed import DataParallel

    make = onnx.helper.make_node
    model = small(nodes=[make("Add", ["plain", "shift"], ["loss"])], inputs={"rate": [], "shift": []})
    next(node for node in model.graph.node if node.output[0] == "new.w").input[1] = "s"
    model.graph.node.insert(4, make("Mul", ["g", "rate"], ["s"]))
    defaults = {"rate": 0.5, "shift": 3}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(np.float32(v), k) for k, v in defaults.items())
    training = DataParallel(model, START)
    assert training.step({"x": rows_of(4), "shift": np.float32(1)}) == 2 + 1
    assert training.state()["w"].tolist() == [1 - 0.5 * 4] * 3
    assert training.step({"x": rows_of(4), "rate": np.float32(0.25)}) == -2 + 3
    training.step({"x": rows_of(4)})  # a rate is kept
    assert training.state()["w"].tolist() == [-1 - 2 * 0.25 * 4] * 3


@pytest.mark.slow
def test_numbers_in_bfloat16_are_numbers_or_refused(here):
    from onnx_remat.distributed import DataParallel

    make, kind = onnx.helper.make_node, onnx.TensorProto.BFLOAT16
    model = small(nodes=[make("Cast", ["plain"], ["loss"], to=kind)], outputs={"loss": (kind, [])})
    assert DataParallel(model, START).step({"x": rows_of(4)}) == 2
    nodes = [make("Identity", ["plain"], ["loss"]), make("Cast", ["plain"], ["new.last"], to=kind)]
    model = small(nodes=nodes, inputs={"last": (kind, [])}, outputs={"new.last": (kind, [])})
    state = START | {"last": np.zeros((), np.uint16)}
    DataParallel(model, state).step({"x": rows_of(4)})
    with pytest.raises(UsageError, match=r"'last' is of a type that numpy cannot compute with: .* buffers='first'"):
        DataParallel(model, state, buffers="mean")


def test_state_is_whole_or_refused(here, tmp_path):
    from onnx_remat.distributed import DataParallel

    training = DataParallel(small(), START)
    training.save(tmp_path / "first")
    with pytest.raises(UsageError, match="no input 'y'"):
        training.step([{"x": rows_of(4)}, {"y": rows_of(4)}])
    for look in (training.state, lambda: training.save(tmp_path / "second")):
        with pytest.raises(UsageError, match=r"an earlier step failed midway \(.*\): load a checkpoint first"):
            look()
    training.load(tmp_path / "first")
    assert training.state()["w"].tolist() == [1, 1, 1]
