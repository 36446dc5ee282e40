"""All imports from torch beyond its documented interface, except for `private_state`'s.

They are the reason for the upper bound of the torch extra; `tests/converters/test_private_torch.py` checks that they
exist.
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
from torch._decomp import get_decompositions  # torch's rules for operators without an ONNX counterpart
from torch._dispatch.python import enable_python_dispatcher  # applies rules to tensors without data
from torch._dynamo.source import ConstantSource  # a name for the sizes of an input, which symbolic sizes need
from torch._export.utils import _compiling_state_context  # models ask whether they are being exported
from torch._functorch._aot_autograd.logging_utils import (
    setup_stacktrace_preservation_hooks,  # labels backward nodes with their forward node
)
from torch._subclasses.fake_tensor import (
    FakeTensor,  # tensors without data
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import (  # turns changes in place into values
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
from torch.nn.modules import transformer
from torch.onnx._internal.exporter import _decomp, _registration
from torch.onnx._internal.fx.passes import type_promotion
from torch.utils import _pytree as pytree  # structures of arguments, flat and back
from torch.utils import (
    checkpoint as _checkpoint,  # recomputation of a region in the backward pass
)
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # sees every operator
    _disable_current_modes,  # computes a constant while tracing
)
from torch.utils._sympy.functions import Mod  # conditions on sizes
from torch.utils._sympy.printers import PythonPrinter  # and their text

__all__ = [
    "ConstantSource",
    "DimDynamic",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "Mod",
    "Operator",
    "PythonPrinter",
    "ShapeEnv",
    "StatelessSymbolicContext",
    "TorchDispatchMode",
    "compiling",
    "computed_now",
    "dispatch_functionalize",
    "enable_python_dispatcher",
    "get_decompositions",
    "make_fx",
    "old_weight_norm",
    "pytree",
    "remembering",
    "setup_stacktrace_preservation_hooks",
    "traceback",
    "unvalidated",
    "was_changed",
    "without_checkpoints",
    "without_comparison_of_masks",
    "without_replicas",
    "without_translation",
]  # fmt: skip

Operator: TypeAlias = torch._ops.OpOverload

old_weight_norm = torch._weight_norm  # what `torch.nn.utils.weight_norm` calls
compiling: Callable[[], Any] = _compiling_state_context
computed_now: Callable[[], Any] = _disable_current_modes


def was_changed(tensor: FunctionalTensor) -> bool:
    """Return whether a traced tensor was changed in place, directly or through a view."""
    changed: Callable[[torch.Tensor], bool] = torch._functionalize_has_data_mutation  # type: ignore[attr-defined]
    return changed(tensor.elem)


def without_translation(opset: int) -> dict[Any, Callable[..., Any]]:
    """Return torch's decompositions of the operators that its exporter cannot translate to this opset."""
    known: Any = set(_decomp.get_onnx_implemented_overloads(_translations(opset)))
    return _decomp.create_onnx_friendly_decomposition_table(known)


_registry = _registration.ONNXRegistry.from_torchlib


@cache
def _translations(opset: int) -> _registration.ONNXRegistry:
    """Return the exporter's translations, which take a second to read."""
    return _registry(opset_version=opset)


@contextmanager
def remembering() -> Iterator[None]:
    """Cache results of the exporter inside the context, which halves its time.

    Without it, the exporter reads its translations in every export and the signature of an operator at every use, and
    computes types and shapes that the trace already has.
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
        mine.functions = {target: list(known) for target, known in mine.functions.items()}  # the caller may add to it
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
    """Disable the checks of distributions' parameters, which read values."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@contextmanager
def without_replicas() -> Iterator[None]:
    """Let `torch.nn.DataParallel` run its module on the whole batch."""

    def forward(self: torch.nn.DataParallel[torch.nn.Module], *positional: Any, **keyword: Any) -> Any:
        return self.module(*positional, **keyword)

    with patch.object(torch.nn.DataParallel, "forward", forward):
        yield


@contextmanager
def without_comparison_of_masks() -> Iterator[None]:
    """Let `torch.nn.Transformer` take a mask as it is: it would read whether it is causal, for a faster kernel."""

    def is_causal(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        return is_causal is True

    with patch.object(transformer, "_detect_is_causal_mask", is_causal):
        yield


class _Plain:
    """Replacement of ``CheckpointFunction`` that runs the region like any other code."""

    @staticmethod
    def apply(function: Callable[..., Any], _: bool, *values: Any) -> Any:
        return function(*values)


def _plainly(*_: Any, **__: Any) -> Iterator[None]:
    """Replacement, without effect, of the context around a region that is checkpointed without reentrance."""
    yield


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """Disable the recomputation of `torch.utils.checkpoint`, so that the graph has every operator once."""
    own = {"CheckpointFunction": _Plain, "_checkpoint_without_reentrant_generator": _plainly}
    before = {name: getattr(_checkpoint, name) for name in own}
    try:
        for name, stand_in in own.items():
            setattr(_checkpoint, name, stand_in)
        yield
    finally:
        for name, original in before.items():
            setattr(_checkpoint, name, original)
