"""Train a JAX function within a memory budget: `budgeted` returns a step that holds parameters and state."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx

from onnx_remat.app.progress import Progress
from onnx_remat.errors import UsageError
from onnx_remat.messages import Setting
from onnx_remat.options import parse_options
from onnx_remat.rewrite.pipeline import rewrite_model
from onnx_remat.session.session import Session
from onnx_remat.session.training import Loop
from onnx_remat.units import Budget, check_threads

from .. import plan_cache, shares
from . import kernels
from .export import check_types, convert, verify
from .step import TracedStep, array, inputs_of, plain, trace

if TYPE_CHECKING:
    from onnx_remat.options import PlanningOptions
    from onnx_remat.rewrite.report import Report


@dataclass(frozen=True, slots=True)
class _Tree:
    """A pytree among the inputs of the step: its structure, and the names and kinds of its arrays.

    Attributes
    ----------
    structure : PyTreeDef
    names : tuple of str
    impls : tuple of object or None
        For random keys, their generator.
    """

    structure: Any
    names: tuple[str, ...]
    impls: tuple[Any, ...]

    def arrays(self, tree: Any, what: str) -> dict[str, np.ndarray]:
        """Return the arrays of a tree of this structure, by input name; messages call it `what`."""
        leaves, structure = jax.tree_util.tree_flatten(tree)
        if structure != self.structure:
            raise UsageError(f"{what}: the structure differs from the step's: {self._difference(tree)}")
        return {name: plain(array(leaf)) for name, leaf in zip(self.names, leaves, strict=True)}

    def _difference(self, tree: Any) -> str:
        """Return the first leaf that only one of both trees has, by its path."""

        def paths(tree: Any) -> list[str]:
            return [jax.tree_util.keystr(path) or "a leaf" for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]

        own, given = paths(jax.tree_util.tree_unflatten(self.structure, self.names)), paths(tree)
        if missing := [path for path in own if path not in set(given)]:
            return f"{missing[0]} is missing"
        if more := [path for path in given if path not in set(own)]:
            return f"the step has no {more[0]}"
        return "its containers are of other types"

    def read(self, loop: Loop) -> Any:
        """Return a copy of its current arrays."""
        made = []
        for name, impl in zip(self.names, self.impls, strict=True):
            value = jnp.array(loop.view(name), copy=True)
            made.append(value if impl is None else jax.random.wrap_key_data(value, impl=impl))
        return jax.tree_util.tree_unflatten(self.structure, made)


class Budgeted:
    """A training step of a JAX function on ONNX Runtime's CPU: ``step(*batch)`` trains and returns the loss.

    The step holds its own copies of parameters, buffers and the optimizer's state, and updates them in place.

    Attributes
    ----------
    jax_bytes : int
        Memory that JAX's own step takes, as XLA has planned it; 0 if the budget is not a share of it.
    report : Report or None
        The report of the rewrite; None without a budget.
    """

    def __init__(self, loop: Loop, session: Session, trees: Sequence[_Tree], jax_bytes: int, report: Report | None):
        self.jax_bytes, self.report = jax_bytes, report
        self._params, self._buffers, self._state, self._batch = trees
        self._loop, self._session = loop, session

    def __call__(self, *batch: Any) -> float:
        """Train on one batch, of the structure and shapes of the example, and return the loss.

        Raises
        ------
        UsageError
            The batch does not match the example: the step did not run.
        ModelError
            ONNX Runtime failed during the step: some arrays are updated and some are not.
        """
        wanted = len(jax.tree_util.treedef_children(self._batch.structure))
        if len(batch) != wanted:
            raise UsageError(f"batch arguments: the example has {wanted}, not {len(batch)}")
        return self._loop.step(self._batch.arrays(batch, "the batch"))

    def restore(self, params: Any = None, buffers: Any = None, opt_state: Any = None) -> None:
        """Continue from these values: a checkpoint, or a state with another learning rate. The others stay as they are.

        After a step that failed midway, give all of them.

        Raises
        ------
        UsageError
            A tree has another structure, or an array another shape, than the step's.
        """
        values = {"params": params, "buffers": buffers, "opt_state": opt_state}
        trees = dict(zip(values, (self._params, self._buffers, self._state), strict=True))
        given = [trees[what].arrays(value, what) for what, value in values.items() if value is not None]
        names = [name for tree in trees.values() for name in tree.names] + list(self._batch.names)
        found = {name: self._loop.view(name) for name in names}
        for arrays in given:
            found |= arrays
        self._loop.restore(found)

    @property
    def params(self) -> Any:
        """Return the current parameters, in the structure of those given."""
        return self._params.read(self._loop)

    @property
    def buffers(self) -> Any:
        """Return the current buffers, in the structure of those given."""
        return self._buffers.read(self._loop)

    @property
    def opt_state(self) -> Any:
        """Return the optimizer's current state, in optax's structure."""
        return self._state.read(self._loop)

    @property
    def summary(self) -> str:
        """Return a line on JAX's own step, if it is known, and this one, and the first line of the report."""
        return shares.summary("JAX", self.jax_bytes, self.report) if self.report else ""

    def close(self) -> None:
        """Free all memory."""
        self._session.close()

    def __enter__(self) -> Budgeted:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def budgeted(
    loss_fn: Any,
    params: Any,
    *batch: Any,
    optimizer: Any,
    budget: str | int | None = None,
    buffers: Any = None,
    unroll: int = 64,
    check: bool = True,
    planning: PlanningOptions | None = None,
    threads: int = 0,
    progress: bool = True,
) -> Budgeted:
    """Return a training step of a JAX function that stays within a memory budget.

    For example::

        step = budgeted(loss_fn, params, x, y, optimizer=optax.adamw(1e-3), budget="60%")
        for x, y in batches:
            loss = step(x, y)
        params = step.params

    Parameters
    ----------
    loss_fn, params, *batch, optimizer, buffers, unroll, check
        As of `export_training_step`. All batches have the sizes of the example.
    budget : str or int, optional
        Memory that training may take: ``"4GB"``, a number of bytes, ``"60%"`` of what JAX's own compiled step takes by
        XLA's plan, with its state donated, or ``"60% of the step"`` as it is exported; ``"auto"`` and ``"+5%"`` as for
        `rewrite_model`. It covers parameters and state, but not Python and its libraries, nor arrays that the caller
        keeps. By default (None) the step is not rewritten.
    planning : mapping, optional
        Fields of `onnx_remat.options.Options`, for example ``{"effort": 5}``; not those that say what runs the step.
    threads : int
        Threads of a step; by default (0) as many as ONNX Runtime chooses.
    progress : bool
        Show the stage on standard error while the step is made: with the time on a terminal, else in a line each.

    Raises
    ------
    ConversionError, OnnxRematError
        The step cannot be exported, see `export_training_step`, or no plan fits the budget.
    """
    threads = check_threads(threads)
    if optimizer is None:
        raise UsageError("budgeted needs an optimizer, whose update is part of the step: pass one of optax")
    given, of_step = shares.parse(budget)
    if given is None and planning:
        raise UsageError("{} needs a budget: pass {}", Setting("planning"), Setting("budget"))
    shares.check_planning("JAX", planning or {}, "cpu")
    if given is not None:
        parse_options({**(planning or {})})
    if not callable(getattr(optimizer, "init", None)):
        raise UsageError(f"optimizer: pass one of optax, such as optax.adamw(1e-3), not {optimizer!r:.100}")
    shown = Progress(quiet=not progress, log=True)
    try:
        shown("export", 0.0)
        traced = trace(loss_fn, params, batch, buffers, optimizer, None)
        check_types(traced)
        model = convert(traced, unroll)
        trees = _trees((params, buffers, optimizer.init(params), tuple(batch)))
        own = 0
        if given is not None and given.fraction is not None and not of_step:
            shown("compile JAX's own step", 0.0)
            own = _own_bytes(traced, len(trees[3].names))
            if own:
                given = Budget(bytes=given.resolve(own))
            else:
                warnings.warn(
                    "XLA does not say what its step takes: the budget is a share of what the exported step takes",
                    stacklevel=2,
                )
        if check:
            shown("compare with JAX", 0.0)
            verify(model, traced)
        with tempfile.TemporaryDirectory(prefix="onnx-remat-") as folder:
            path, report = Path(folder) / "step.onnx", None
            if given is None:
                onnx.save(model, path)
            else:
                options: PlanningOptions = {"progress": shown} | (planning or {})
                wanted = given
                with shares.of("JAX", own):
                    report = plan_cache.rewritten(
                        model, wanted, options, path, lambda: rewrite_model(model, wanted, **options)
                    )
            shown("open", 0.0)
            session = Session(path, donate=True, threads=threads)
        return Budgeted(Loop(session, traced.feeds()), session, trees, own, report)
    finally:
        shown.clear()


def _trees(groups: tuple[Any, Any, Any, Any]) -> list[_Tree]:
    """Return parameters, buffers, optimizer state and batch as trees of named inputs."""
    named, made = iter(inputs_of(groups, None)), []
    for group in groups:
        leaves, structure = jax.tree_util.tree_flatten(group)
        impls = tuple(jax.random.key_impl(leaf) if kernels.is_key(leaf) else None for leaf in leaves)
        made.append(_Tree(structure, tuple(next(named) for _ in leaves), impls))
    return made


def _own_bytes(step: TracedStep, batch: int) -> int:
    """Return the memory of JAX's own compiled step: arguments, results that have no place in them, temporary arrays.

    All arguments but the last `batch` ones are donated. 0 if XLA does not say.
    """
    inputs = list(step.inputs.values())
    donated = tuple(range(len(inputs) - batch))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        compiled = jax.jit(step.function, donate_argnums=donated).lower(*inputs).compile()
    found = compiled.memory_analysis()
    if found is None:
        return 0
    outputs = found.output_size_in_bytes - found.alias_size_in_bytes
    return int(found.argument_size_in_bytes + outputs + found.temp_size_in_bytes)
