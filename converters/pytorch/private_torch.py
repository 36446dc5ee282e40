"""What the converter takes from torch beyond its documented interface: all of it, and nothing else does.

The torch extra has an upper bound for its sake; `tests/converters/test_private_torch.py` checks that it is there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias
from unittest.mock import patch

import onnx
import onnx_ir as ir
import torch
from torch._decomp import get_decompositions  # torch's own rules for operators that ONNX has no counterpart for
from torch._dispatch.python import enable_python_dispatcher  # rules take part while tensors have no data
from torch._dynamo.source import ConstantSource  # a name for the sizes of an input, which symbolic sizes need
from torch._export.utils import _compiling_state_context  # models ask whether they are being exported
from torch._functorch._aot_autograd.logging_utils import (
    setup_stacktrace_preservation_hooks,  # backward nodes say which forward node they are of
)
from torch._subclasses.fake_tensor import (
    FakeTensor,  # tensors without data
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import (  # what is changed in place becomes values
    FunctionalTensor,
    FunctionalTensorMode,
    dispatch_functionalize,
)
from torch.distributions import Distribution
from torch.fx import traceback  # labels of nodes (phase, module) that last through a trace
from torch.fx.experimental.proxy_tensor import make_fx  # the trace itself
from torch.fx.experimental.symbolic_shapes import (  # sizes that vary
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.onnx._internal.exporter import _decomp, _registration
from torch.onnx._internal.fx.passes import type_promotion
from torch.utils import _pytree as pytree  # structures of arguments, flat and back
from torch.utils import (
    checkpoint as _checkpoint,  # what recomputes a region in the backward pass, either way
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # sees every operator
    _disable_current_modes,  # computes a constant while tracing
)

__all__ = [
    "ConstantSource",
    "DimDynamic",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "Operator",
    "ShapeEnv",
    "StatelessSymbolicContext",
    "TorchDispatchMode",
    "compiling",
    "computed_now",
    "dispatch_functionalize",
    "enable_python_dispatcher",
    "get_decompositions",
    "gradient_hooks",
    "hooks_left_out",
    "make_fx",
    "old_weight_norm",
    "pytree",
    "remembering",
    "setup_stacktrace_preservation_hooks",
    "traceback",
    "unvalidated",
    "was_changed",
    "without_checkpoints",
    "without_replicas",
    "without_translation",
]  # fmt: skip

Operator: TypeAlias = torch._ops.OpOverload

old_weight_norm = torch._weight_norm  # what `torch.nn.utils.weight_norm` calls
compiling: Callable[[], Any] = _compiling_state_context
computed_now: Callable[[], Any] = _disable_current_modes


def gradient_hooks(parameter: torch.Tensor) -> tuple[Callable[..., Any], ...]:
    """What the user registered with ``parameter.register_hook``, in order."""
    return tuple((parameter._backward_hooks or {}).values())


def hooks_left_out(held: torch.Tensor | torch.optim.Optimizer) -> bool:
    """Are there hooks that no graph calls: after a gradient was accumulated, or around the optimizer's step?"""
    of_parameter = ("_post_accumulate_grad_hooks",)
    of_optimizer = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(getattr(held, n, None) for n in (of_parameter if isinstance(held, torch.Tensor) else of_optimizer))


def was_changed(tensor: FunctionalTensor) -> bool:
    """Is what a tensor of a trace stands for changed in place, by itself or by way of a view?"""
    changed: Callable[[torch.Tensor], bool] = torch._functionalize_has_data_mutation  # type: ignore[attr-defined]
    return changed(tensor.elem)


def without_translation(opset: int) -> dict[Any, Callable[..., Any]]:
    """How torch takes apart the operators that its exporter cannot translate to this opset."""
    known: Any = set(_decomp.get_onnx_implemented_overloads(_translations(opset)))
    return _decomp.create_onnx_friendly_decomposition_table(known)


_registry = _registration.ONNXRegistry.from_torchlib


@cache
def _translations(opset: int) -> _registration.ONNXRegistry:
    """All that the exporter knows to translate; it takes a second to read."""
    return _registry(opset_version=opset)


@contextmanager
def remembering() -> Iterator[None]:
    """The exporter does not work out anew what it has worked out: it takes half the time.

    It reads its translations in every export, the signature of an operator at every use, and computes the type and
    shape of every node that the trace has them of.
    """
    signature = ir.schemas.OpSignature.from_op_schema
    signatures: dict[tuple[str, str, int], Any] = {}

    def of_schema(schema: onnx.defs.OpSchema) -> Any:
        key = schema.domain, schema.name, schema.since_version
        if key not in signatures:
            signatures[key] = signature(schema)
        return signatures[key]

    def translations(opset_version: int) -> _registration.ONNXRegistry:
        mine = copy.copy(_translations(opset_version))
        mine.functions = {target: list(known) for target, known in mine.functions.items()}  # what is added is ours
        return mine

    promotion: Any = type_promotion._TypePromotionInterpreter

    def of_trace(self: Any, node: torch.fx.Node) -> Any:
        if rule := type_promotion.get_type_promotion_rule(node, self.type_promotion_table):
            with self._set_current_node(node):
                self._maybe_promote_node(node, rule)
        computed = node.op != "call_function" or node.meta.get("val") is None
        return super(promotion, self).run_node(node) if computed else node.meta["val"]

    with (
        patch.object(ir.schemas.OpSignature, "from_op_schema", staticmethod(of_schema)),
        patch.object(_registration.ONNXRegistry, "from_torchlib", staticmethod(translations)),
        patch.object(promotion, "run_node", of_trace),
    ):
        yield


@contextmanager
def unvalidated() -> Iterator[None]:
    """Without the checks of distributions' parameters, which read values."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextmanager
def without_replicas() -> Iterator[None]:
    """`torch.nn.DataParallel` runs its module on the whole batch."""

    def forward(self: torch.nn.DataParallel[torch.nn.Module], *positional: Any, **keyword: Any) -> Any:
        return self.module(*positional, **keyword)

    with patch.object(torch.nn.DataParallel, "forward", forward):
        yield


class _Plain:
    """In place of ``CheckpointFunction``: the region runs like any other code."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *values: Any) -> Any:
        return function(*values)


def _plainly(*_: Any, **__: Any) -> Iterator[None]:
    """In place of what surrounds a region that is checkpointed without reentrance: nothing."""
    yield


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """`torch.utils.checkpoint` recomputes nothing: a graph of the step has every operator once."""
    own = {"CheckpointFunction": _Plain, "_checkpoint_without_reentrant_generator": _plainly}
    before = {name: getattr(_checkpoint, name) for name in own}
    try:
        for name, stand_in in own.items():
            setattr(_checkpoint, name, stand_in)
        yield
    finally:
        for name, original in before.items():
            setattr(_checkpoint, name, original)
