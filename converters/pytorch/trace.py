"""A whole training step of a torch module, traced into one graph of aten and ONNX operators."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from onnx_remat.errors import ConversionError

from .. import names
from . import optim, repeated, updates
from .batch import Batch
from .decisions import Recorder
from .outside import Lift, Outside, Seen, outside
from .private_torch import (
    ConstantSource,
    DimDynamic,
    FakeTensorMode,
    ShapeEnv,
    StatelessSymbolicContext,
    TorchDispatchMode,
    enable_python_dispatcher,
    gradient_hooks,
    setup_stacktrace_preservation_hooks,
    traceback,
    unvalidated,
    without_checkpoints,
    without_replicas,
)
from .program import capture, make_inputs
from .recipe import Recipe
from .refusals import complex_input, complex_numbers, one_size, refusal
from .rules.composites import Composites

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """A training step to be traced.

    Attributes
    ----------
    model : torch.nn.Module
    batch : Batch
    loss : callable, optional
        Of the model's output and the batch's last argument; None where the model returns the loss.
    trainable, frozen : dict of str to torch.Tensor
        Parameters by name.
    buffers : dict of str to torch.Tensor
    recipe : Recipe
        What happens around the update.
    optimizers : tuple of torch.optim.Optimizer
        Their own steps are traced, see `updates`.
    state : dict of str to dict of str to torch.Tensor
        Of the optimizers: before the step.
    settings : dict of str to torch.Tensor
        Of the optimizers: learning rates and weight decays that are inputs; see `rates`.
    outside : dict of str to torch.Tensor
        Tensors that only the user's code holds, where they are inputs; known once the step is traced.
    """

    model: torch.nn.Module
    batch: Batch
    loss: Loss | None
    trainable: dict[str, torch.Tensor]
    frozen: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    recipe: Recipe = field(default_factory=Recipe)
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    state: updates.State = field(default_factory=dict)
    settings: dict[str, torch.Tensor] = field(default_factory=dict)
    outside: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Everything the step reads, by input name, in order."""
        # parameters in the model's own order, whether they are trained or not
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        state = {names.state(n, slot): value for n, pieces in self.state.items() for slot, value in pieces.items()}
        batch = dict(zip(self.batch.names, self.batch.tensors, strict=True))
        own = parameters | self.buffers | state | self.recipe.state(self.trainable) | self.rates
        return own | self.outside | batch

    @property
    def rates(self) -> dict[str, torch.Tensor]:
        """The settings as the step reads them."""
        kind = optim.settings_type(self.trainable)
        return {name: value.detach().to(kind).reshape(()) for name, value in self.settings.items()}

    def run(self, values: Mapping[str, torch.Tensor], watch: TorchDispatchMode) -> dict[str, torch.Tensor]:
        """Loss, gradients and buffers by output name, in order; `values` are left as they are.

        `watch` sees every operator of the forward pass.

        Raises
        ------
        ConversionError
            The loss is no scalar, or depends on no trainable parameter.
        """
        # torch keeps the labels of the last node of an export that failed: no module is said so
        with traceback.annotate({"phase": "forward", "module": ""}):
            trainable = {name: values[name].detach().requires_grad_() for name in self.trainable}
            for name, parameter in self.trainable.items():
                for hook in gradient_hooks(parameter):
                    trainable[name].register_hook(hook)
            frozen = {name: values[name] for name in self.frozen}
            buffers = {name: values[name].clone() for name in self.buffers}
            state = trainable | frozen | buffers
            loss = self._loss(state, values, watch)
        # while tracing, backward nodes are to tell which forward node they are of
        if loss.grad_fn is not None and traceback.has_preserved_node_meta():
            setup_stacktrace_preservation_hooks([loss.grad_fn])
        with traceback.annotate({"phase": "backward", "module": ""}):
            scaled = self.recipe.scaled(loss, values)
            gradients = torch.autograd.grad(scaled, list(trainable.values()), allow_unused=True)
            found = {name: g for name, g in zip(trainable, gradients, strict=True) if g is not None}
            found = self.recipe.unscaled(found, values)
            if not self.optimizers:
                found = self.recipe.clipped(found)
        outputs = {names.LOSS: loss.detach()}
        outputs |= {names.gradient(name): gradient for name, gradient in found.items()}
        for name in buffers:  # functional_call writes those that the model assigned anew back into `state`
            outputs[names.new(name)] = state[name].detach()
        return outputs

    def update(
        self, values: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """New parameters and state, by output name, from the gradients in `outputs`: the optimizers' own steps."""
        given = {name: outputs[names.gradient(name)] for name in self.trainable if names.gradient(name) in outputs}

        def update(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            parameters = dict(self.model.named_parameters())
            state = {n: {slot: values[names.state(n, slot)] for slot in slots} for n, slots in self.state.items()}
            settings = {id(value): values[name] for name, value in self.settings.items()}
            made: dict[str, torch.Tensor] = {}
            for optimizer in self.optimizers:
                new, after = updates.updated(optimizer, parameters, values, gradients, state, settings)
                made |= new
                made |= {names.state(n, slot): value for n, slots in after.items() for slot, value in slots.items()}
            return made

        with traceback.annotate({"phase": "optimizer", "module": ""}):
            new = self.recipe.updated(values, given, update)
        return {names.new(name): value for name, value in new.items()}

    def forward(self, values: Mapping[str, torch.Tensor], watch: TorchDispatchMode) -> None:
        """The forward pass alone; plain numbers that the modules keep of it stay."""
        known = {*self.trainable, *self.frozen, *self.buffers}
        state = {name: value.clone() if name in self.buffers else value for name, value in values.items()}
        with traceback.annotate({"phase": "forward", "module": ""}), torch.enable_grad():
            self._loss({name: value for name, value in state.items() if name in known}, values, watch, counting=True)

    def _loss(
        self,
        state: dict[str, torch.Tensor],
        values: Mapping[str, torch.Tensor],
        watch: TorchDispatchMode,
        counting: bool = False,
    ) -> torch.Tensor:
        """The loss; `state` are parameters and buffers by name, and then the buffers as the forward pass left them."""
        positional, keyword = self.batch.arguments([values[name] for name in self.batch.names])
        whole = _Whole(self.model, self.loss)
        within = {_INSIDE + name: value for name, value in state.items()}
        with _as_it_was(self.model, counting), watch, _paths(self.model):
            made = torch.func.functional_call(whole, within, (positional, keyword))
        state.update({name: within[_INSIDE + name] for name in state})
        return _scalar(made, self.loss is None)


_INSIDE = "model."


class _Whole(torch.nn.Module):
    """Model and loss as one: what the loss reads of the model (a penalty on its weights) is traced, too."""

    def __init__(self, model: torch.nn.Module, loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        self._loss = (loss,)  # no module of ours

    def forward(self, positional: tuple[Any, ...], keyword: dict[str, Any]) -> Any:
        (loss,) = self._loss
        if loss is None:
            made = self.model(*positional, **keyword)
            return getattr(made, "loss", made)
        if keyword:
            *_, last = keyword
            target = keyword.pop(last)
        else:
            *first, target = positional
            positional = tuple(first)
        return loss(self.model(*positional, **keyword), target)


_REGISTERED = ("_parameters", "_buffers", "_modules")


@contextmanager
def _as_it_was(model: torch.nn.Module, counting: bool = False) -> Iterator[None]:
    """What the modules' own code keeps of a run (caches, outputs) goes with it: its tensors have no data.

    Counters, too, but when `counting`.
    """
    before = [
        (module, dict(vars(module)), {name: dict(vars(module)[name]) for name in _REGISTERED})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        counted = repeated.numbers(model) if counting else []
        for module, attributes, registered in before:
            vars(module).clear()
            vars(module).update(attributes)
            for name, held in registered.items():
                vars(module)[name].clear()
                vars(module)[name].update(held)
        for module, own in counted:
            vars(module).update(own)


@contextmanager
def _paths(model: torch.nn.Module) -> Iterator[None]:
    """Nodes traced inside carry the path of the module they are of."""
    inside: list[AbstractContextManager[None]] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            inside.append(traceback.annotate({"module": path}))
            inside[-1].__enter__()

        return hook

    def leave(*_: Any) -> None:
        inside.pop().__exit__(None, None, None)

    hooks = []
    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(path)))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _share_paths(graph: torch.fx.Graph) -> None:
    """Backward nodes are of the module that their forward node is of."""
    labelled = [(node.meta.get("seq_nr"), node.meta.get("custom", {})) for node in graph.nodes]
    path: dict[int, str] = {}  # later nodes that nobody differentiates have the number of the last one that is
    for number, label in labelled:
        if label.get("phase") == "forward":
            path.setdefault(number, label.get("module", ""))
    for number, label in labelled:
        if not label.get("module") and number in path:
            label["module"] = path[number]


def _scalar(loss: Any, from_model: bool) -> torch.Tensor:
    whose = "the model (no loss was given)" if from_model else "the loss function"
    if not isinstance(loss, torch.Tensor):
        hint = "; pass loss=..." if from_model else ""
        raise ConversionError(f"{whose} returned {type(loss).__name__}, not the scalar loss{hint}")
    if loss.numel() != 1 or not loss.is_floating_point():
        hint = "; pass loss=..." if from_model else "; reduce it, with .mean() for instance"
        raise ConversionError(f"{whose} returned {loss.dtype} of shape {tuple(loss.shape)}, not a scalar loss{hint}")
    if not loss.requires_grad:
        raise ConversionError("the loss depends on no trainable parameter: nothing to differentiate")
    return loss.reshape(()) if loss.dim() else loss


@dataclass(frozen=True, slots=True)
class Trace:
    """A step as one flat graph.

    Attributes
    ----------
    graph : torch.fx.GraphModule
        From the inputs' tensors to the outputs' and then the watched ones; every node carries its phase in
        ``meta["custom"]["phase"]``, and the path of its module, where it is of one, in ``meta["custom"]["module"]``.
    outputs : tuple of str
        Names of the outputs.
    watched : int
        How many values follow them, for the check alone; see `decisions`.
    lines : mapping of str to str
        By operator, the line of the user's code that ran it first.
    outside : mapping of str to Outside
        Tensors outside the step that it reads, by the name each has as an input; constants, where `trace` feeds none.
    """

    graph: torch.fx.GraphModule
    outputs: tuple[str, ...]
    watched: int
    lines: Mapping[str, str]
    outside: Mapping[str, Outside]


def trace(step: Step, dynamic: Mapping[str, Mapping[int, str]], opset: int, feed: bool = False) -> Trace:
    """Trace a step into operators that can be translated to this opset.

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
            _check_buffers({name: (given[name], made[names.new(name)]) for name in step.buffers})
            if step.optimizers:
                new = step.update(given, made)
                made = {names.LOSS: made.pop(names.LOSS)} | new | made
        outputs[:] = made
        lines.update(recorder.lines)
        return [*made.values(), *recorder.seen]

    _, fakes = _fakes(inputs, dynamic)
    lift = Lift()
    try:
        with traceback.preserve_node_meta(), eager_kernels():
            graph = capture(flat, fakes, opset, lift)
        again = _check_repeated(step, inputs)
    except ConversionError:
        raise
    except Exception as error:
        raise refusal(error, step.model) from error
    _check_open(dict(zip(inputs, fakes, strict=True)), step.batch, dynamic)
    _share_paths(graph.graph)
    for node in graph.graph.nodes:  # inputs are checked before
        if isinstance(value := node.meta.get("val"), torch.Tensor) and value.is_complex():
            raise complex_numbers(node)
    (made,) = next(node for node in graph.graph.nodes if node.op == "output").args
    held = {id(getattr(graph, str(node.target))) for node in graph.graph.find_nodes(op="get_attr")}
    kept = [one for read, one in outside(lift.reads.values(), again, step.trainable) if id(read.alias) in held]
    named = {names.outside(index): one for index, one in enumerate(kept)}
    if feed:
        place = len(inputs) - len(step.batch.names)
        make_inputs(graph, {name: one.alias for name, one in named.items()}, place)
    return Trace(graph, tuple(outputs), len(made) - len(outputs), lines, named)


def _fakes(
    inputs: Mapping[str, torch.Tensor], dynamic: Mapping[str, Mapping[int, str]]
) -> tuple[Any, list[torch.Tensor]]:
    """Tensors without data, and the mode they are of; dimensions that are to vary have symbolic sizes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv() if dynamic else None)
    made: list[torch.Tensor] = []
    for name, value in inputs.items():
        axes = dynamic.get(name, {})
        sizes = [DimDynamic.DYNAMIC if axis in axes else DimDynamic.STATIC for axis in range(value.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes) if dynamic else None
        source = ConstantSource(f"input_{len(made)}") if dynamic else None
        made.append(mode.from_tensor(value, symbolic_context=context, source=source))
    return mode, made


def _check_buffers(buffers: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Raise ConversionError where a buffer is of another shape or type after a step, from pairs before and after."""
    for name, (before, after) in buffers.items():
        if (before.shape, before.dtype) != (after.shape, after.dtype):
            shapes = " to ".join(f"{each.dtype} of shape {list(each.shape)}" for each in (before, after))
            raise ConversionError(
                f"buffer {name} changes from {shapes} in a step, and a graph's state keeps its shape: run the module "
                "once before, if it is only the first run that changes it, or do not register it as a buffer"
            )


def _check_repeated(step: Step, inputs: Mapping[str, torch.Tensor]) -> Seen:
    """What another run reads of tensors with data; raise ConversionError where Python decides otherwise in it."""
    mode, fakes = _fakes(inputs, {})
    given = {
        name: fake.requires_grad_() if name in step.trainable else fake
        for name, fake in zip(inputs, fakes, strict=True)
    }
    with traceback.preserve_node_meta(), eager_kernels(), mode:
        return repeated.check(lambda watch: step.forward(given, watch), step.model)


def _check_open(traced: Mapping[str, torch.Tensor], batch: Batch, dynamic: Mapping[str, Mapping[int, str]]) -> None:
    """Raise ConversionError where the step only works for the example's size of a dimension that is to vary."""
    for name, axes in dynamic.items():
        for axis in axes:
            size = traced[name].shape[axis]
            fixed = size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size
            if fixed is not None:
                raise one_size(name, axis, fixed, dict(zip(batch.names, batch.tensors, strict=True)), dynamic)


@contextmanager
def eager_kernels() -> Iterator[None]:
    """Operators as trace and reference both shall see them: attention in parts, dropout with its mask, each once."""
    with (
        quiet(),
        unvalidated(),
        without_checkpoints(),
        without_replicas(),
        enable_python_dispatcher(),
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.mkldnn.flags(enabled=False),  # recurrent layers in parts; convolutions as exact as ours
    ):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of torch and its exporter, none of which the user can act on."""
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
