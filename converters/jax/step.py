"""`TracedStep`: a training step as a function of flat, named arrays, and its jaxpr."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from onnx_remat.errors import ConversionError, UsageError
from onnx_remat.messages import Setting

from .. import names
from ..checks import tolerances
from . import kernels
from .lower import OPTIMIZER_SCOPE

Path = tuple[str, ...]
Leaves = Sequence[tuple[Path, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A traced training step.

    Attributes
    ----------
    jaxpr : ClosedJaxpr
        The jaxpr of the step, with flat inputs and outputs.
    inputs : mapping of str to array
        First values of parameters, buffers, optimizer state and batch, by name, in order.
    outputs : mapping of str to str
        The phase of each output by name, in order: the loss, gradients or new parameters and state, new buffers.
    function : callable
        The function from which `jaxpr` was traced.
    """

    jaxpr: core.ClosedJaxpr
    inputs: Mapping[str, Any]
    outputs: Mapping[str, str]
    function: Callable[..., Any]

    def expected(self) -> dict[str, np.ndarray]:
        """Return JAX's outputs for the first inputs, by name."""
        return self._run(self.inputs.values())

    def noise(self, expected: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return the largest change of each float output when float inputs change by the rounding of kernels.

        For example, if two elements of a max-pool are almost equal, rounding decides which of them gets the gradient.
        """
        generator = np.random.default_rng(0)
        floats = [name for name, value in expected.items() if jnp.issubdtype(value.dtype, jnp.floating)]
        largest = dict.fromkeys(floats, 0.0)
        for _ in range(tolerances.NOISE_SAMPLES):
            made = self._run([_nudged(value, generator) for value in self.inputs.values()])
            for name in floats:
                moved = np.abs(made[name].astype(np.float64) - expected[name].astype(np.float64))
                largest[name] = max(largest[name], float(moved.max(initial=0.0)))
        return largest

    def _run(self, inputs: Iterable[Any]) -> dict[str, np.ndarray]:
        # XLA's optimisations do not pay off in one run, and without them each operation computes what it defines.
        quick = jax.jit(self.function, compiler_options={"xla_backend_optimization_level": 0})
        return {name: plain(value) for name, value in zip(self.outputs, quick(*inputs), strict=True)}

    def tolerance(self) -> dict[str, float]:
        """Return the accepted relative error by output dtype: the least precise float inside applies to all wider
        ones."""
        return tolerances.allowed({dtype.name for dtype in _dtypes(self.jaxpr.jaxpr)})

    def feeds(self) -> dict[str, np.ndarray]:
        """Return the first inputs in the form that ONNX Runtime takes."""
        return {name: plain(value) for name, value in self.inputs.items()}


def _nudged(value: Any, generator: np.random.Generator) -> Any:
    """Return `value` with every float changed by a few of its dtype's rounding errors."""
    if kernels.is_key(value) or not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    epsilon = tolerances.NOISE_ULPS * float(jnp.finfo(value.dtype).eps)
    factor = 1 + epsilon * generator.uniform(-1, 1, value.shape)
    return jnp.asarray(np.asarray(value, np.float64) * factor, value.dtype)


def _dtypes(jaxpr: core.Jaxpr) -> set[np.dtype[Any]]:
    """Return the dtypes of all values that a jaxpr and its inner jaxprs compute."""
    found = {kernels.dtype_of_aval(var.aval) for eqn in jaxpr.eqns for var in eqn.outvars if hasattr(var.aval, "dtype")}
    for inner in core.subjaxprs(jaxpr):
        found |= _dtypes(inner)
    return found


def array(value: Any) -> Any:
    """Return a leaf as the JAX array that a trace makes of it, for example int64 as int32 by default."""
    return value if kernels.is_key(value) else jnp.asarray(value)


def _array(value: Any, name: str) -> Any:
    try:
        return array(value)
    except TypeError as error:
        advice = "input {!r} is a {}, not an array: pass the optimizer by name ({}), and close over all else"
        raise ConversionError(advice, name, type(value).__name__, Setting("optimizer")) from error


def plain(value: Any) -> np.ndarray:
    """Return a numpy array; random keys as their words."""
    return np.asarray(jax.random.key_data(value) if kernels.is_key(value) else value)


def _updated(optimizer: Any, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Return an optimizer's updates and its new state."""
    try:
        made: tuple[Any, Any] = optimizer.update(grads, state, params)
    except TypeError as error:
        raise ConversionError(
            f"the optimizer does not update from gradients, state and parameters alone ({error}): use another"
        ) from error
    return made


def trace(
    loss_fn: Callable[..., Any], params: Any, batch: Sequence[Any], buffers: Any, optimizer: Any,
    batch_names: Sequence[str] | None,
) -> TracedStep:  # fmt: skip
    """Trace loss, gradients and update of a step.

    Raises
    ------
    ConversionError
        The loss is not a float scalar or depends on no parameter, a parameter is not float, two inputs have one name.
    """
    state = None if optimizer is None else optimizer.init(params)
    groups = (params, buffers, state, tuple(batch))
    named = inputs_of(groups, batch_names)
    _check_parameters(params)
    flat, tree = jax.tree_util.tree_flatten(groups)
    flat = [_array(leaf, name) for leaf, name in zip(flat, named, strict=True)]

    def with_buffers(params: Any, buffers: Any, batch: Sequence[Any]) -> tuple[Any, Any]:
        if buffers is None:
            return loss_fn(params, *batch), None
        answer = loss_fn(params, buffers, *batch)
        if not (isinstance(answer, tuple) and len(answer) == 2):
            raise ConversionError("with buffers, the loss function must return (loss, new buffers)")
        _check_buffers(buffers, answer[1])
        return answer

    _check_loss(with_buffers, jax.tree_util.tree_unflatten(tree, flat))

    def step(*leaves: Any) -> list[Any]:
        params, buffers, state, batch = jax.tree_util.tree_unflatten(tree, leaves)
        (loss, after), grads = jax.value_and_grad(with_buffers, has_aux=True)(params, buffers, batch)
        if loss.dtype == kernels.BFLOAT16:
            loss = loss.astype(jnp.float32)  # ONNX Runtime gives no array of bfloat16 back
        if optimizer is not None:
            import optax

            with jax.named_scope(OPTIMIZER_SCOPE):
                updates, state = _updated(optimizer, jax.lax.optimization_barrier(grads), state, params)
                grads = optax.apply_updates(params, updates)
        return jax.tree_util.tree_leaves((loss, grads, state, after))

    with _lean_softmax():
        closed = jax.make_jaxpr(step)(*flat)
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    outputs = {names.LOSS: "forward"}
    counts = [len(jax.tree_util.tree_leaves(group)) for group in groups]
    rename, phase = (names.gradient, "backward") if optimizer is None else (names.new, "optimizer")
    outputs |= {rename(name): phase for name in named[: counts[0]]}
    outputs |= {names.new(name): "optimizer" for name in named[sum(counts[:2]) : sum(counts[:3])]}
    outputs |= {names.new(name): "forward" for name in named[counts[0] : sum(counts[:2])]}
    if len(outputs) != len(jaxpr.outvars):
        raise ConversionError(
            f"the step has {len(jaxpr.outvars)} output arrays for {len(outputs)} names: return new buffers of the "
            "same structure from the loss function"
        )
    return TracedStep(core.ClosedJaxpr(jaxpr, closed.consts), dict(zip(named, flat, strict=True)), outputs, step)


@contextmanager
def _lean_softmax() -> Iterator[None]:
    """Within the block, the gradient of `jax.nn.softmax` reads its result alone, by JAX's own flag.

    By default, it reads the exponentials as well: two matrices of the scores' size for each attention.
    """
    flag = "jax_softmax_custom_jvp"
    before = getattr(jax.config, flag, True)
    if not before:
        jax.config.update(flag, True)
    try:
        yield
    finally:
        if not before:
            jax.config.update(flag, False)


def inputs_of(groups: tuple[Any, Any, Any, Any], batch_names: Sequence[str] | None) -> list[str]:
    """Return the names of parameters, buffers, optimizer state and batch, in this order.

    >>> inputs_of(({"w": 1.0}, None, ({"mu": {"w": 0.0}}, 7), (0.5,)), None)
    ['w', 'state.w.mu', 'state.1', 'input.0']
    >>> inputs_of(([1.0, 2.0], [3.0], None, ()), None)
    ['0', '1', 'buffers.0']
    """
    params, buffers, state, batch = groups
    parameters = _paths(params)
    own = [".".join(path) or "param" for path, _ in parameters]
    kept = [".".join(path) or "buffer" for path, _ in _paths(buffers)]
    if set(kept) & set(own):
        kept = [f"buffers.{name}" for name in kept]
    count = len(jax.tree_util.tree_leaves(batch))
    if batch_names is not None and len(batch_names) != count:
        raise UsageError(f"batch_names has {len(batch_names)} names for {count} arrays: give one for each")
    given = [names.batch(i) for i in range(count)] if batch_names is None else list(batch_names)
    made = [*own, *kept, *_state_names(_paths(state), parameters), *given]
    if twice := [name for name, n in Counter(made).items() if n > 1]:
        raise ConversionError(f"two inputs are called {twice[0]!r}: rename a parameter, buffer or batch input")
    if taken := [name for name in made if name == names.LOSS or name.startswith((names.new(""), names.gradient("")))]:
        raise ConversionError(f"an input is called {taken[0]!r}, as an output would be: rename it")
    return made


def _paths(tree: Any) -> Leaves:
    """Return path and shape of every leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [(tuple(_key(key) for key in path), tuple(np.shape(leaf))) for path, leaf in leaves]


def _key(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _state_names(state: Leaves, parameters: Leaves) -> list[str]:
    """Return ``state.<parameter>.<slot>`` for a leaf whose path ends in a parameter's, else ``state.<last part>``.

    The slot is the last name of the remaining path, or the whole remaining path if leaves would have equal names.
    """
    known = sorted(parameters, key=lambda entry: -len(entry[0]))
    found = []
    for path, shape in state:
        owner = next((p for p, s in known if s == shape and path[len(path) - len(p) :] == p), None)
        way = path if owner is None else path[: len(path) - len(owner)]
        words = [part for part in way if not part.isdigit()]
        found.append((owner, words[-1] if words else ".".join(way), ".".join(way)))

    def name(owner: Path | None, slot: str) -> str:
        return f"state.{slot}" if owner is None else names.state(".".join(owner) or "param", slot)

    short = [name(owner, slot) for owner, slot, _ in found]
    counts = Counter(short)
    return [s if counts[s] == 1 else name(owner, way) for s, (owner, _, way) in zip(short, found, strict=True)]


def _check_buffers(before: Any, after: Any) -> None:
    """Raise ConversionError unless new buffers have structure, shapes and dtypes of the old ones."""
    old: Any = jax.tree_util.tree_structure(before)
    new: Any = jax.tree_util.tree_structure(after)
    if old != new:
        raise ConversionError(f"the loss function returns buffers of structure {new}, and takes {old}: return the same")
    named = jax.tree_util.tree_flatten_with_path(before)[0]
    for (path, leaf), made in zip(named, jax.tree_util.tree_leaves(after), strict=True):
        taken, given = array(leaf), array(made)
        if (taken.shape, taken.dtype) != (given.shape, given.dtype):
            name = ".".join(_key(key) for key in path) or "buffer"
            raise ConversionError(
                f"buffer {name!r} is {taken.dtype}{list(taken.shape)}, and the loss function returns "
                f"{given.dtype}{list(given.shape)} for it: return the same shape and dtype"
            )


def _check_parameters(params: Any) -> None:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    if not leaves:
        raise ConversionError("there are no parameters")
    for path, leaf in leaves:
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            name = ".".join(_key(key) for key in path) or "param"
            raise ConversionError(f"parameter {name!r} is {dtype}, not float: pass what is not trained in buffers")


def _check_loss(function: Callable[..., tuple[Any, Any]], groups: tuple[Any, ...]) -> None:
    params, buffers, _, batch = groups
    closed, (loss, _) = jax.make_jaxpr(function, return_shape=True)(params, buffers, batch)
    if not hasattr(loss, "shape"):
        raise ConversionError(f"the loss function returns a {type(loss).__name__}, not a scalar array")
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise ConversionError(f"the loss is {loss.dtype} of shape {loss.shape}, not a float scalar")
    wanted = [True] + [False] * (len(closed.jaxpr.outvars) - 1)
    _, used = partial_eval.dce_jaxpr(closed.jaxpr, wanted)
    if not any(used[: len(jax.tree_util.tree_leaves(params))]):
        raise ConversionError("the loss depends on no parameter: there is nothing to train; check stop_gradient")
