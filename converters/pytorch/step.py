"""The parts of a training step of a torch module, and how they run, with tensors or with traced ones."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from onnx_remat.errors import ConversionError
from onnx_remat.messages import Message, Setting

from .. import names
from . import optimizer_facts, repeated, updates
from .batch import Batch, loss_of, parts_of
from .private_state import gradient_hooks
from .private_torch import TorchDispatchMode, setup_stacktrace_preservation_hooks, traceback
from .recipe import Recipe

Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of a training step.

    Attributes
    ----------
    model : torch.nn.Module
    batch : Batch
    loss : callable, optional
        Loss of the model's output and the batch's last argument; None if the model returns the loss.
    trainable, frozen : dict of str to torch.Tensor
        Parameters by name.
    buffers : dict of str to torch.Tensor
    recipe : Recipe
        Operations around the update.
    optimizers : tuple of torch.optim.Optimizer
        Optimizers, whose own steps are traced; see `updates`.
    state : dict of str to dict of str to torch.Tensor
        State of the optimizers before the step.
    settings : dict of str to torch.Tensor
        Learning rates and weight decays that are inputs; see `rates`.
    wanted : tuple of str
        Parts of the model's output that are outputs of the step, see `batch.parts_of`.
    outside : dict of str to torch.Tensor
        Tensors that only the user's code refers to, if they are inputs; known after the trace.
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
    wanted: tuple[str, ...] = ()
    outside: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Return all inputs of the step by name, in order."""
        return {name: value for part in self._inputs().values() for name, value in part.items()}

    def _inputs(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the inputs by name, by what has them, in order."""
        # parameters in the model's order, trained or not
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        state = {names.state(n, slot): value for n, pieces in self.state.items() for slot, value in pieces.items()}
        return {
            "the model": parameters | self.buffers,
            "the state of the optimizer": state,
            "the update": self.recipe.state(self.trainable),
            "the optimizer": self.rates,
            "the code around the model": self.outside,
            "the batch": dict(zip(self.batch.names, self.batch.tensors, strict=True)),
        }

    def check_names(self) -> None:
        """Raise ConversionError if two inputs have one name, or an input and an output: one would stand for both."""
        parts = self._inputs()
        outputs = {names.LOSS, *map(names.gradient, self.trainable), *map(names.output, self.wanted)}
        outputs |= {names.new(name) for part in parts.values() for name in part}
        whose: dict[str, str] = dict.fromkeys(outputs, "the list of outputs")
        for which, part in parts.items():
            for name in part:
                if name in whose:
                    raise ConversionError(
                        f"{which} has {name!r}, and so has {whose[name]}: rename the parameter, buffer or tensor of "
                        "the batch, since inputs and outputs of a step go by their names"
                    )
                whose[name] = which

    @property
    def own(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the module by name: parameters, trained or not, and buffers."""
        return self.trainable | self.frozen | self.buffers

    @property
    def rates(self) -> dict[str, torch.Tensor]:
        """Return the settings in the dtype of the step."""
        kind = optimizer_facts.settings_type(self.trainable)
        return {name: value.detach().to(kind).reshape(()) for name, value in self.settings.items()}

    def run(self, values: Mapping[str, torch.Tensor], watch: TorchDispatchMode) -> dict[str, torch.Tensor]:
        """Return loss, gradients, the module's tensors and `wanted` parts by output name, in order.

        The module's tensors are those after the forward pass, which may change them in place: buffers, and parameters
        (an average of other weights, rows with a largest norm). Its tensors in `values` stay unchanged. `watch` sees
        every operator of the forward pass.

        Raises
        ------
        ConversionError
            The loss is not a scalar, or depends on no trainable parameter; the model replaces a parameter.
        """
        # after a failed export torch keeps the labels of its last node: reset them
        with traceback.annotate({"phase": "forward", "module": ""}):
            trainable = {name: values[name].detach().clone().requires_grad_() for name in self.trainable}
            for name, parameter in self.trainable.items():
                for hook in gradient_hooks(parameter):
                    trainable[name].register_hook(hook)
            state = trainable | {name: values[name].clone() for name in self.own if name not in trainable}
            loss, wanted = self._loss(state, values, watch)
            for name, parameter in trainable.items():
                if state[name] is not parameter:
                    raise ConversionError(
                        f"the model replaces parameter {name} in its forward pass: change it in place, under "
                        "torch.no_grad(), with copy_()"
                    )
        # in a trace, backward nodes need a reference to their forward node
        if loss.grad_fn is not None and traceback.has_preserved_node_meta():
            setup_stacktrace_preservation_hooks([loss.grad_fn])
        with traceback.annotate({"phase": "backward", "module": ""}):
            scaled = self.recipe.scaled(loss, values)
            gradients = torch.autograd.grad(scaled, list(trainable.values()), allow_unused=True)
            found = {name: _dense(g) for name, g in zip(trainable, gradients, strict=True) if g is not None}
            found = self.recipe.unscaled(found, values)
            if not self.optimizers:
                found = self.recipe.clipped(found)
        outputs = {names.LOSS: loss.detach()}
        outputs |= {names.gradient(name): gradient for name, gradient in found.items()}
        for name, tensor in state.items():  # functional_call writes what the model reassigned back into `state`
            outputs[names.new(name)] = tensor.detach()
        return outputs | {names.output(name): part.detach() for name, part in wanted.items()}

    def update(
        self, values: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return new parameters and state by output name: the optimizers' own steps on the gradients in `outputs`."""
        given = {name: outputs[names.gradient(name)] for name in self.trainable if names.gradient(name) in outputs}

        parameters = dict(self.model.named_parameters())

        def update(gradients: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
            state = {n: {slot: values[names.state(n, slot)] for slot in slots} for n, slots in self.state.items()}
            settings = {id(value): values[name] for name, value in self.settings.items()}
            made = []
            for optimizer in self.optimizers:
                new, after = updates.updated(optimizer, parameters, values, gradients, state, settings)
                new |= {names.state(n, slot): value for n, slots in after.items() for slot, value in slots.items()}
                made.append(new)
            return made

        owned = [list(updates.owned(optimizer, {n: parameters[n] for n in given})) for optimizer in self.optimizers]
        with traceback.annotate({"phase": "optimizer", "module": ""}):
            new = self.recipe.updated(values, given, update, owned)
        return {names.new(name): value for name, value in new.items()}

    def forward(
        self, values: Mapping[str, torch.Tensor], watch: repeated.Listing, restored: bool
    ) -> list[torch.Tensor]:
        """Run the forward pass alone, and return loss, the module's tensors and `wanted` parts.

        Plain numbers that it stores in modules stay, and other attributes that it sets, unless they are `restored`.
        """
        state = {name: values[name].clone() for name in self.own}
        watch.origins.began(state, self.trainable)
        with traceback.annotate({"phase": "forward", "module": ""}), torch.enable_grad():
            around = as_it_was(self.model, counting=True) if restored else nullcontext()
            loss, wanted = self._loss(state, values, watch, around)
        return [loss, *state.values(), *wanted.values()]

    def _loss(
        self,
        state: dict[str, torch.Tensor],
        values: Mapping[str, torch.Tensor],
        watch: TorchDispatchMode,
        around: AbstractContextManager[None] | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and the `wanted` parts.

        `state` has parameters and buffers by name, and afterwards those of the forward pass, which runs in the context
        `around`; by default modules are as they were after it.
        """
        positional, keyword = self.batch.arguments([values[name] for name in self.batch.names])
        whole = _Whole(self.model, self.loss)
        within = {_INSIDE + name: value for name, value in state.items()}
        with around or as_it_was(self.model), watch, _paths(self.model):
            loss, output = torch.func.functional_call(whole, within, (positional, keyword))
        state.update({name: within[_INSIDE + name] for name in state})
        return _scalar(loss, self.loss is None), parts_of(output, self.wanted)


_INSIDE = "model."


class _Whole(torch.nn.Module):
    """Model and loss as one module, so that the loss's reads of the model (a penalty on its weights) are traced,
    too."""

    def __init__(self, model: torch.nn.Module, loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        self._loss = (loss,)  # in a tuple, so that it is not a submodule

    def forward(self, positional: tuple[Any, ...], keyword: dict[str, Any]) -> tuple[Any, Any]:
        (loss,) = self._loss
        return loss_of(self.model, loss, positional, keyword)


_ORDERED = (list, deque)


def _holds(value: Any) -> bool:
    """Return whether an attribute is a container that a run may fill: the module's parameters, a cache."""
    return type(value) in (dict, OrderedDict, defaultdict, set, *_ORDERED)  # a subclass may refuse to be cleared


@contextmanager
def as_it_was(model: torch.nn.Module, counting: bool = False) -> Iterator[None]:
    """Restore attributes that modules set in a run (caches, outputs), because their tensors have no data.

    Lists and dicts in attributes have the same entries again. Counters are restored too, unless `counting`.
    """
    before = [
        (module, dict(vars(module)), [(value, value.copy()) for value in vars(module).values() if _holds(value)])
        for module in model.modules()
    ]
    try:
        yield
    finally:
        counted = repeated.numbers(model) if counting else []
        for module, attributes, containers in before:
            vars(module).clear()
            vars(module).update(attributes)
            for container, entries in containers:
                container.clear()
                (container.extend if isinstance(container, _ORDERED) else container.update)(entries)
        for module, own in counted:
            vars(module).update(own)


@contextmanager
def _paths(model: torch.nn.Module) -> Iterator[None]:
    """Label the nodes traced inside the context with the path of their module."""
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


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient with all its rows: torch's own of a sparse embedding has only those that were read."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _scalar(loss: Any, from_model: bool) -> torch.Tensor:
    give_loss = Message("return the loss alone, as .loss or under the key 'loss', or pass {}", Setting("loss"))
    whose = "the model (no loss was given)" if from_model else "the loss function"
    if loss is None and from_model:
        labels = "are the labels in the batch ('labels' for transformers' models)? Otherwise pass {}"
        raise ConversionError("the model (no loss was given) returned no loss: {}", Message(labels, Setting("loss")))
    if not isinstance(loss, torch.Tensor):
        hint = give_loss if from_model else "return the loss"
        raise ConversionError("{} returned {}, not the scalar loss: {}", whose, type(loss).__name__, hint)
    if loss.numel() != 1 or not loss.is_floating_point():
        hint = give_loss if from_model else "reduce it, with .mean() for instance"
        kind = f"{loss.dtype} of shape {tuple(loss.shape)}"
        raise ConversionError("{} returned {}, not a scalar loss: {}", whose, kind, hint)
    if not torch.is_grad_enabled():
        raise ConversionError("gradients are switched off: make the step outside torch.no_grad() and inference_mode()")
    if not loss.requires_grad:
        raise ConversionError("the loss depends on no trainable parameter: check requires_grad, and detach()")
    return loss.reshape(()) if loss.dim() else loss
