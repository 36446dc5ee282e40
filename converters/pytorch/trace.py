"""Trace of a training step of a torch module into one graph of aten and ONNX operators."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from onnx_remat.errors import ConversionError, UsageError

from .. import names
from . import open_sizes, repeated
from .batch import Batch
from .carried import Origins
from .conditions import Condition
from .decisions import Recorder
from .outside import Outside
from .private_torch import (
    ConstantSource,
    DimDynamic,
    FakeTensorMode,
    ShapeEnv,
    StatelessSymbolicContext,
    enable_python_dispatcher,
    traceback,
    unvalidated,
    without_checkpoints,
    without_comparison_of_masks,
    without_replicas,
)
from .program import capture, make_inputs
from .reads import Lift, Seen, outside
from .refusals import complex_input, complex_numbers, one_size, refusal
from .rules.composites import Composites
from .step import StepParts, as_it_was


def _share_paths(graph: torch.fx.Graph) -> None:
    """Label backward nodes with the module of their forward node."""
    labelled = [(node.meta.get("seq_nr"), node.meta.get("custom", {})) for node in graph.nodes]
    path: dict[int, str] = {}  # nodes without gradient repeat the number of the last one with gradient
    for number, label in labelled:
        if label.get("phase") == "forward":
            path.setdefault(number, label.get("module", ""))
    for number, label in labelled:
        if not label.get("module") and number in path:
            label["module"] = path[number]


@dataclass(frozen=True, slots=True)
class Trace:
    """A step as one flat graph.

    Attributes
    ----------
    graph : torch.fx.GraphModule
        The graph from the inputs to the outputs and then the watched values. Every node has its phase in
        ``meta["custom"]["phase"]`` and the path of its module, if any, in ``meta["custom"]["module"]``.
    outputs : tuple of str
        Names of the outputs.
    watched : int
        Number of values after them, for the check alone; see `decisions`.
    lines : mapping of str to str
        For each operator, the line of the user's code that first ran it.
    outside : mapping of str to Outside
        Tensors outside the step, by input name; they are constants unless `trace` was called with `feed`.
    conditions : tuple of Condition
        Conditions on dynamic dimensions, under which the step is this one, see `open_sizes`.
    """

    graph: torch.fx.GraphModule
    outputs: tuple[str, ...]
    watched: int
    lines: Mapping[str, str]
    outside: Mapping[str, Outside]
    conditions: tuple[Condition, ...]


def trace(step: StepParts, dynamic: Mapping[str, Mapping[int, str]], opset: int, feed: bool = False) -> Trace:
    """Trace a step into operators that have a translation to this opset.

    With `feed`, tensors outside the step are inputs, before the batch.

    Raises
    ------
    ConversionError
        The step cannot be traced.
    """
    inputs = step.inputs
    for name, value in inputs.items():
        if value.is_complex():
            raise complex_input(f"buffer {name}" if name in step.buffers else name)
    outputs: list[str] = []
    lines: dict[str, str] = {}

    def flat(*values: torch.Tensor) -> list[torch.Tensor]:
        recorder = Recorder()
        with Composites(recorder):
            given = dict(zip(inputs, values, strict=True))
            made = step.run(given, recorder)
            _check_forms({name: (given[name], made[names.new(name)]) for name in step.own})
            if step.optimizers:
                changed = {name: made.pop(names.new(name)) for name in step.trainable}
                new = step.update(given | changed, made)
                new |= {after: v for n, v in changed.items() if (after := names.new(n)) not in new}
                made = {names.LOSS: made.pop(names.LOSS)} | new | made
        outputs[:] = made
        lines.update(recorder.lines)
        return [*made.values(), *recorder.seen]

    mode, fakes = _fakes(inputs, dynamic)
    lift = Lift()
    try:
        with _finalized_later():
            with traceback.preserve_node_meta(), eager_kernels():
                graph = capture(flat, fakes, opset, lift)
            again = _check_repeated(step, inputs)
    except (ConversionError, UsageError):
        raise
    except Exception as error:
        raise refusal(error, step.model) from error
    named_fakes = dict(zip(inputs, fakes, strict=True))
    _check_open(named_fakes, step.batch, dynamic)
    conditions = open_sizes.of_one(step.batch.sizes(dynamic), lambda dim: _listed(step, inputs, dynamic, dim))
    conditions += open_sizes.decided(mode.shape_env, named_fakes, dynamic) if dynamic else []
    _share_paths(graph.graph)
    for node in graph.graph.nodes:  # inputs are already checked
        if isinstance(value := node.meta.get("val"), torch.Tensor) and value.is_complex():
            raise complex_numbers(node)
    (made,) = next(node for node in graph.graph.nodes if node.op == "output").args
    constants = {id(getattr(graph, str(node.target))) for node in graph.graph.find_nodes(op="get_attr")}
    kept = [one for read, one in outside(lift.reads.values(), again, step.trainable) if id(read.alias) in constants]
    named = {names.outside(index): one for index, one in enumerate(kept)}
    if feed:
        place = len(inputs) - len(step.batch.names)
        make_inputs(graph, {name: one.alias for name, one in named.items()}, place)
    return Trace(graph, tuple(outputs), len(made) - len(outputs), lines, named, tuple(conditions))


@contextmanager
def _finalized_later() -> Iterator[None]:
    """Collect no garbage within the block: finalizers may run torch's operators, which would be part of the step."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _fakes(
    inputs: Mapping[str, torch.Tensor], dynamic: Mapping[str, Mapping[int, str]]
) -> tuple[Any, list[torch.Tensor]]:
    """Return tensors without data, and their mode; dynamic dimensions have symbolic sizes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv() if dynamic else None)
    made: list[torch.Tensor] = []
    for name, value in inputs.items():
        axes = dynamic.get(name, {})
        sizes = [DimDynamic.DYNAMIC if axis in axes else DimDynamic.STATIC for axis in range(value.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes) if dynamic else None
        source = ConstantSource(f"input_{len(made)}") if dynamic else None
        made.append(mode.from_tensor(value, symbolic_context=context, source=source))
    return mode, made


def _check_forms(tensors: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raise ConversionError if a tensor of the module has another shape or dtype after a step, by pairs of before and
    after."""
    for name, (before, after) in tensors.items():
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            shapes = " to ".join(f"{each.dtype} of shape {list(each.shape)}" for each in (before, after))
            raise ConversionError(
                f"buffer {name} changes from {shapes} in a step, and a graph's state keeps its shape: run the module "
                "once before, if it is only the first run that changes it, or do not register it as a buffer"
            )


def _check_repeated(step: StepParts, inputs: Mapping[str, torch.Tensor]) -> Seen:
    """Return the tensors with data that another run reads; raise ConversionError if Python decides differently in
    it."""
    mode, given = _differentiable(step, inputs)
    with traceback.preserve_node_meta(), eager_kernels(), mode, as_it_was(step.model):
        return repeated.check(partial(step.forward, given), [given[name] for name in step.batch.names])


def _differentiable(step: StepParts, inputs: Mapping[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a mode, and tensors without data of fixed sizes, of which the trained ones require a gradient."""
    mode, fakes = _fakes(inputs, {})
    return mode, {
        name: fake.requires_grad_() if name in step.trainable else fake
        for name, fake in zip(inputs, fakes, strict=True)
    }


def _listed(
    step: StepParts, inputs: Mapping[str, torch.Tensor], dynamic: Mapping[str, Mapping[int, str]], dim: str | None
) -> repeated.Listing:
    """Run the forward pass without data, with a size of one for a dynamic dimension, and return its calls."""
    given = dict(inputs)
    for name, axes in dynamic.items():
        for axis in (axis for axis, own in axes.items() if own == dim):
            given[name] = given[name].narrow(axis, 0, 1)
    mode, fakes = _differentiable(step, given)
    listing = repeated.Listing(Origins([]))
    with eager_kernels(), mode, as_it_was(step.model), traceback.preserve_node_meta():
        step.forward(fakes, listing, restored=True)
    return listing


def _check_open(traced: Mapping[str, torch.Tensor], batch: Batch, dynamic: Mapping[str, Mapping[int, str]]) -> None:
    """Raise ConversionError if the step needs the example's size of a dynamic dimension."""
    for name, axes in dynamic.items():
        for axis in axes:
            size = traced[name].shape[axis]
            fixed = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
            if fixed is not None:
                raise one_size(name, axis, fixed, dict(zip(batch.names, batch.tensors, strict=True)), dynamic)


@contextmanager
def eager_kernels() -> Iterator[None]:
    """Give trace and reference the same operators: attention in parts, dropout with its mask, each once."""
    with (
        quiet(),
        unvalidated(),
        without_checkpoints(),
        without_replicas(),
        without_comparison_of_masks(),
        enable_python_dispatcher(),
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.mkldnn.flags(enabled=False),  # recurrent layers in parts; convolutions as exact as the step's
    ):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings of torch and its exporter, none of which the user can act on."""
    levels = {logger: logger.level for logger in map(logging.getLogger, ("onnxscript", "torch.onnx"))}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
