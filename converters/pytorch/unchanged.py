"""Facts about the user's module, loss and optimizers that a step relies on, and the errors if they change."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from onnx_remat.errors import UsageError

from .private_state import gradient_hooks, hooks_left_out, module_hooks
from .updates import REPLACED

SettingPlace: TypeAlias = tuple[int, int, str]
"""Place of a setting: index of the optimizer, index of the group, and key."""

ModulePlace: TypeAlias = tuple[str, str]
"""Place of a module: "model" or "loss", and the path in it."""

_NEW = "make a new step"
_NOT_READ = REPLACED | {
    "params", "param_names", "initial_lr", "max_lr", "min_lr", "base_lr", "max_momentum", "base_momentum", "swa_lr",
}  # fmt: skip
"""Settings of groups that a step does not read, or that schedulers keep there, and no optimizer reads."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about module, loss and optimizers that the step relies on.

    Attributes
    ----------
    modules : mapping of ModulePlace to (module, bool)
        Each module, also of a loss that is one, and whether it is in train mode.
    parameters : mapping of str to bool
        Whether each parameter requires a gradient, by name.
    places : mapping of str to (int, int)
        Optimizer and group of each parameter.
    hooks : mapping of str to tuple
        Hooks on the gradient of each parameter.
    constants : mapping of SettingPlace to object
        Settings that are constants of the step.
    hooked_optimizers, hooked_parameters : tuple of str
        Those with hooks that a graph cannot call.
    module_hooks : mapping of ModulePlace to tuple
        Hooks on the forward and backward pass of each module that has any.
    buffers : frozenset of str
        Names of the module's buffers.
    autocast : torch.dtype or None
        The type of autocast around the step; None where it is off.
    """

    modules: Mapping[ModulePlace, tuple[torch.nn.Module, bool]]
    parameters: Mapping[str, bool]
    places: Mapping[str, tuple[int, int]]
    hooks: Mapping[str, tuple[Any, ...]]
    constants: Mapping[SettingPlace, Any]
    hooked_optimizers: tuple[str, ...]
    hooked_parameters: tuple[str, ...]
    module_hooks: Mapping[ModulePlace, tuple[Any, ...]]
    buffers: frozenset[str]
    autocast: torch.dtype | None

    @staticmethod
    def of(
        model: torch.nn.Module,
        optimizers: tuple[torch.optim.Optimizer, ...],
        inputs: Collection[SettingPlace],
        parameters: Mapping[str, torch.nn.Parameter] | None = None,
        loss: Any = None,
    ) -> Facts:
        """Return the current facts; `inputs` are the settings that are not constants, `parameters` the module's."""
        owners = {"model": model} | ({"loss": loss} if isinstance(loss, torch.nn.Module) else {})
        modules = {(name, path): each for name, owner in owners.items() for path, each in owner.named_modules()}
        parameters = dict(model.named_parameters()) if parameters is None else parameters
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        groups = [(o, g, group) for o, user in enumerate(optimizers) for g, group in enumerate(user.param_groups)]
        return Facts(
            {place: (module, module.training) for place, module in modules.items()},
            {name: parameter.requires_grad for name, parameter in parameters.items()},
            {name_of[id(p)]: (o, g) for o, g, group in groups for p in group["params"] if id(p) in name_of},
            {name: hooks for name, parameter in parameters.items() if (hooks := gradient_hooks(parameter))},
            {
                (o, g, key): _value(group[key])
                for o, g, group in groups
                for key in group
                if key not in _NOT_READ and (o, g, key) not in inputs
            },
            tuple(type(user).__qualname__ for user in optimizers if hooks_left_out(user)),
            tuple(name for name, parameter in parameters.items() if hooks_left_out(parameter)),
            {place: hooks for place, module in modules.items() if (hooks := module_hooks(module))},
            frozenset(name for name, _ in model.named_buffers()),
            _autocast(next(iter(parameters.values())).device.type if parameters else "cpu"),
        )

    def check(self, now: Facts) -> None:
        """Raise UsageError, with a remedy, if a fact changed."""
        for message in (*self._modules(now), *self._parameters(now), *self._settings(now)):
            raise UsageError(message)

    def _modules(self, now: Facts) -> Iterator[str]:
        for place, (module, training) in self.modules.items():
            found, mode = now.modules.get(place, (None, training))
            if found is not module:
                yield f"{_named(place)} was replaced or is gone: {_NEW}"
            if mode != training:
                owner, path = place
                which = f".get_submodule({path!r})" if path else ""
                call = f"{owner}{which}.{'train' if training else 'eval'}()"
                if place == ("model", "") and not training:  # transformers' from_pretrained returns such models
                    yield (
                        "the step was made of a module in eval mode, in which Dropout does nothing: call model.train() "
                        f"and {_NEW}, or {call} to go on with this one"
                    )
                else:
                    yield f"{_named(place)} is not in the mode of the step: call {call} first"
        for place in sorted(now.modules.keys() - self.modules.keys()):
            yield f"{_named(place)} was added since the step was made: {_NEW}"
        for place in sorted(self.module_hooks.keys() | now.module_hooks.keys()):
            if self.module_hooks.get(place) != now.module_hooks.get(place):
                yield f"the hooks on {_named(place)} are others than when the step was made: {_NEW}"
        for name in sorted(now.buffers - self.buffers):
            yield f"buffer {name} was added since the step was made: {_NEW}"
        if now.autocast != self.autocast:
            before, after = (each or "off" for each in (self.autocast, now.autocast))
            yield f"autocast around the step is {after}, and was {before} when it was made: call it so, or {_NEW}"

    def _parameters(self, now: Facts) -> Iterator[str]:
        for name, place in self.places.items():
            if name not in now.places:
                yield f"parameter {name} is gone from the module or the optimizer: {_NEW}, and an optimizer if it is"
            elif now.places[name] != place:
                yield f"parameter {name} is in another group of the optimizer than when the step was made: {_NEW}"
        for name in now.places:
            if name not in self.places:
                yield f"parameter {name} was added to the optimizer since the step was made: {_NEW}"
            if now.parameters[name] != self.parameters.get(name, now.parameters[name]):
                change = "unfrozen" if now.parameters[name] else "frozen"
                yield f"parameter {name} was {change} since the step was made: {_NEW}"
            if now.hooks.get(name) != self.hooks.get(name):
                yield f"the hooks on parameter {name} are others than when the step was made: {_NEW}"

        for name in sorted(now.parameters.keys() - self.parameters.keys()):
            yield f"parameter {name} was added since the step was made: {_NEW}"

    def _settings(self, now: Facts) -> Iterator[str]:
        before = {*self.hooked_optimizers, *self.hooked_parameters}
        for which in sorted({*now.hooked_optimizers, *now.hooked_parameters} - before):
            yield f"{which} has hooks since the step was made, which a graph cannot call: remove them"
        for setting in sorted(self.constants.keys() | now.constants.keys()):
            before, after = (facts.constants.get(setting, "missing") for facts in (self, now))
            if before != after and setting in self.constants:  # schedulers add settings of their own
                _, group, key = setting
                yield (
                    f"the optimizer's {key} (group {group}) changed from {before} to {after}: it is a constant of the "
                    "step; only lr may change (for OneCycleLR: cycle_momentum=False)"
                )


def _named(place: ModulePlace) -> str:
    owner, path = place
    if not path:
        return "the module" if owner == "model" else "the loss"
    return f"module {path!r}" + ("" if owner == "model" else " of the loss")


def _autocast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _value(setting: Any) -> Any:
    """Return a copy that compares by value."""
    if isinstance(setting, torch.Tensor | np.ndarray):
        return setting.tolist()
    return tuple(map(_value, setting)) if isinstance(setting, list | tuple) else setting
