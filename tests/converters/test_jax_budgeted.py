"""JAX's `budgeted`: losses, parameters and state as JAX's own, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("optax")

import jax
import jax.numpy as jnp
import optax
from onnx_remat.converters.jax import budgeted

from onnx_remat.errors import BudgetInfeasibleError, ConversionError, ModelError, UsageError

WIDTH, DEPTH, BATCH, CLASSES = 64, 6, 8192, 5


def deep(params, x, y):
    for layer in params["layers"]:
        x = jax.nn.gelu(x @ layer["w"] + layer["b"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], y).mean()


def parameters():
    rng = np.random.default_rng(0)

    def normal(columns):  # of JAX's own, each shape is compiled
        return jnp.asarray(rng.standard_normal((WIDTH, columns)).astype(np.float32) / WIDTH**0.5)

    layers = [{"w": normal(WIDTH), "b": jnp.zeros(WIDTH)} for _ in range(DEPTH)]
    return {"layers": layers, "out": normal(CLASSES)}


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield rng.standard_normal((BATCH, WIDTH)).astype(np.float32), rng.integers(0, CLASSES, BATCH)


def in_jax(loss_fn, optimizer, params, buffers=None):
    """The step of JAX itself, state last."""

    @jax.jit
    def step(params, state, buffers, *batch):
        if buffers is None:
            loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        else:
            (loss, buffers), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, buffers, *batch)
        updates, state = optimizer.update(grads, state, params)
        return loss, optax.apply_updates(params, updates), state, buffers

    return step, params, optimizer.init(params), buffers


def close(ours, theirs, rtol=1e-4):
    assert jax.tree_util.tree_structure(ours) == jax.tree_util.tree_structure(theirs)
    for mine, other in zip(jax.tree_util.tree_leaves(ours), jax.tree_util.tree_leaves(theirs), strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)
        if jax.dtypes.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, other = jax.random.key_data(mine), jax.random.key_data(other)
        np.testing.assert_allclose(mine, other, rtol, atol=1e-5)


def test_trains_as_jax_does_within_a_share_of_its_memory():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.0, 3e-3, 4)))
    theirs, params, state, _ = in_jax(deep, optimizer, parameters())
    example = next(batches(1))
    with budgeted(deep, parameters(), *example, optimizer=optimizer, budget="80%", planning={"effort": 0.3}) as step:
        assert step.report.budget == int(0.8 * step.jax_bytes)
        assert step.summary.startswith("JAX's own step takes ")
        for batch in batches(5):
            loss, params, state, _ = theirs(params, state, None, *batch)
            assert step(*batch) == pytest.approx(float(loss), rel=1e-5)
        close(step.params, params)
        close(step.opt_state, state)
        kept = step.params["out"]
        before = np.array(kept)
        step(*example)
        assert np.array_equal(kept, before)  # a copy, which later steps leave alone


@pytest.mark.slow
def test_flax_nnx_with_running_statistics_and_its_own_random_numbers():
    """Split as Flax's guide has it: parameters are trained, all else are buffers, keys of random numbers among them."""
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.norm = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.BatchNorm(32, rngs=rngs)
            self.drop, self.last = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(32, CLASSES, rngs=rngs)

        def __call__(self, x):
            return self.last(self.drop(nnx.gelu(self.norm(self.first(x)))))

    graph, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, rest, x, y):
        model = nnx.merge(graph, params, rest, copy=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
        return loss, nnx.split(model, nnx.Param, ...)[2]

    optimizer = optax.sgd(0.1, momentum=0.9)
    theirs, other, state, buffers = in_jax(loss_fn, optimizer, params, rest)
    with budgeted(loss_fn, params, *next(batches(1)), optimizer=optimizer, buffers=rest) as step:
        for batch in batches(5):
            loss, other, state, buffers = theirs(other, state, buffers, *batch)
            assert step(*batch) == pytest.approx(float(loss), rel=1e-4)
        close(step.params, other, 1e-3)
        close(step.buffers, buffers, 1e-3)
        model = nnx.merge(graph, step.params, step.buffers)
    assert model(next(batches(1))[0]).shape == (BATCH, CLASSES)


def test_goes_on_from_a_checkpoint_with_another_rate():
    optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)
    example, params = next(batches(1)), parameters()
    with budgeted(deep, params, *example, optimizer=optimizer, check=False) as step:
        first = [step(*batch) for batch in batches(3)]
        step.restore(params, opt_state=optimizer.init(params))
        assert [step(*batch) for batch in batches(3)] == first
        state = step.opt_state
        state.hyperparams["learning_rate"] = jnp.zeros(())
        step.restore(opt_state=state)
        kept = step.params
        step(*example)
        close(step.params, kept, 0.0)
        with pytest.raises(UsageError, match="the structure differs"):
            step.restore(params["layers"])


def test_new_buffers_must_be_like_the_old_ones():
    def loss_fn(change):
        return lambda params, buffers, x, y: (deep(params, x, y), change(buffers))

    wrong = {
        "structure": lambda buffers: {"average": buffers["mean"]},
        "returns float32\\[2\\] for it": lambda buffers: {"mean": buffers["mean"][:2]},
        "returns int32": lambda buffers: {"mean": buffers["mean"].astype(jnp.int32)},
    }
    for said, change in wrong.items():
        with pytest.raises(ConversionError, match=said):
            budgeted(
                loss_fn(change), parameters(), *next(batches(1)), optimizer=optax.sgd(0.1),
                buffers={"mean": jnp.zeros(3)}, check=False,
            )  # fmt: skip


def test_indices_outside_an_array_drop_sums_and_stop_the_step_where_they_are_read():
    """ONNX counts indices below zero from the end."""

    def loss_fn(params, x, ids, read):
        return (jax.ops.segment_sum(x @ params["out"], ids, 4)[read] ** 2).sum()

    x, ids, read = np.ones((5, WIDTH), np.float32), np.array([0, 1, 2, 3, 0]), np.arange(4)
    params = {"out": parameters()["out"]}
    with budgeted(loss_fn, params, x, ids, read, optimizer=optax.sgd(0.0)) as step:
        for outside in (0, -1, 4, 400):
            ids[0] = outside
            assert step(x, ids, read) == pytest.approx(float(loss_fn(params, x, ids, read)), rel=1e-5)
        with pytest.raises(ModelError, match="out of data bounds"):
            step(x, ids, np.array([-5, 1, 2, 3]))


def test_refusals():
    example = next(batches(1))
    sgd = optax.sgd(0.1)
    with pytest.raises(UsageError, match="planning= needs a budget"):
        budgeted(deep, parameters(), *example, optimizer=sgd, planning={"effort": 1})
    with pytest.raises(UsageError, match="budgeted states it itself: leave 'provider' out"):
        budgeted(deep, parameters(), *example, optimizer=sgd, budget="90%", planning={"provider": "cuda"})
    with pytest.raises(BudgetInfeasibleError, match=r"^JAX's own step takes [\d.]+ [kM]B: budget .* impossible"):
        budgeted(deep, parameters(), *example, optimizer=sgd, budget="5%", check=False, planning={"effort": 0.3})
    with budgeted(deep, parameters(), *example, optimizer=sgd, check=False) as step:
        with pytest.raises(UsageError, match="batch arguments: the example has 2, not 1"):
            step(example[0])
        with pytest.raises(UsageError, match=r"the batch: the structure differs from the step's: \[1\] is missing$"):
            step(example[0], list(example))
        with pytest.raises(UsageError, match=r"^params: the structure differs .*: \['out'\] is missing$"):
            step.restore({"layers": step.params["layers"]})
    with pytest.raises(UsageError, match=r"optimizer: pass one of optax, such as optax.adamw\(1e-3\), not <function"):
        budgeted(deep, parameters(), *example, optimizer=optax.sgd)
    with budgeted(deep, parameters(), *example, optimizer=sgd, check=False) as step:
        with pytest.raises(UsageError, match=r"input\.0"):
            step(example[0][:-1], example[1][:-1])
        step(*example)


@pytest.mark.slow
def test_a_scan_over_nothing_and_a_fori_loop_train():
    """ONNX's Scan reads at least one sequence."""

    def scanned(params, x):
        made, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ params["w"]), None), x, None, length=100)
        return (made**2).mean()

    def counted(params, x):
        return (jax.lax.fori_loop(0, 100, lambda i, h: jnp.tanh(h @ params["w"] + 0.01 * i), x) ** 2).mean()

    params, x = {"w": jax.random.normal(jax.random.key(0), (8, 8))}, jax.random.normal(jax.random.key(1), (16, 8))
    for loss in (scanned, counted):
        step = budgeted(loss, params, x, optimizer=optax.sgd(0.1))
        assert step(x) == pytest.approx(float(loss(params, x)), rel=1e-4)


def test_parameters_and_buffers_may_have_the_same_names():
    def loss(trained, kept, x):
        return ((x @ trained[0]) ** 2).mean() + kept[0].sum(), [kept[0] + 1]

    x = jax.random.normal(jax.random.key(1), (16, 8))
    step = budgeted(loss, [jnp.ones((8, 3))], x, optimizer=optax.sgd(0.1), buffers=[jnp.zeros(2)])
    step(x)
    assert np.asarray(step.buffers[0]).tolist() == [1, 1]
