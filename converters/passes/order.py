"""The order of passes for each source of training graphs."""

from __future__ import annotations

from .add_in_order import add_in_order
from .add_to_softmax import add_to_softmax
from .attention_in_parts import attention_in_parts
from .base import Fact, Order
from .exact_sigmoids import exact_sigmoids
from .inherit_phases import inherit_phases
from .keep_nan import keep_nan
from .loss_in_parts import loss_in_parts
from .multiply_weight_gradients import multiply_weight_gradients
from .read_masks import read_masks
from .recompute_silu import recompute_silu
from .shorten_masked_softmax import shorten_masked_softmax
from .simplify import simplify
from .sink_constants import sink_constants
from .sum_once import sum_once
from .widen_halves import widen_halves
from .write_safely import write_safely

_MADE = frozenset({Fact.SHAPES, Fact.STATED})
_DONE = frozenset(Fact) - {Fact.STATED}
"""Facts that hold of a converted step."""

PYTORCH = Order(
    given=_MADE,
    passes=(
        multiply_weight_gradients,
        add_in_order,
        exact_sigmoids,
        add_to_softmax,  # before `simplify`, after which it recognises fewer of the losses that torch's exporter writes
        write_safely,
        simplify,
        sum_once,
        shorten_masked_softmax,
        loss_in_parts,
        inherit_phases,
        attention_in_parts,
        recompute_silu,
        widen_halves,
        sink_constants,
    ),
    promised=_DONE - {Fact.MASKS},
)
"""Passes over the graph that torch's exporter writes."""

PYTORCH_OUTPUTS = Order(given=PYTORCH.promised, passes=(read_masks,), promised=_DONE)
"""Passes that run once the watched outputs of the check are removed, since those may read a mask."""

JAX_LOWERED = Order(given=_MADE, passes=(add_in_order, exact_sigmoids, keep_nan), promised=_MADE | {Fact.ORDERED})
"""Passes over lowered primitives, before nodes have phases."""

JAX = Order(
    given=JAX_LOWERED.promised | {Fact.PHASES, Fact.MASKS},  # JAX has no Dropout op: its models draw masks themselves
    passes=(
        multiply_weight_gradients,
        write_safely,
        simplify,
        sum_once,
        add_to_softmax,
        attention_in_parts,
        widen_halves,
        sink_constants,
    ),
    promised=_DONE,
)
"""Passes over the step once its nodes have phases."""

FORWARD = Order(
    given=_MADE | {Fact.PHASES},
    passes=(
        write_safely,
        simplify,
    ),
    promised=_MADE | {Fact.PHASES, Fact.LEAN, Fact.SAFE},
)
"""Passes over a forward model before differentiation."""

DIFFERENTIATED = Order(
    given=_MADE | {Fact.PHASES},
    passes=(
        add_in_order,
        exact_sigmoids,
        write_safely,
        simplify,
        sum_once,
        add_to_softmax,
        loss_in_parts,
        attention_in_parts,
        widen_halves,
        sink_constants,
        read_masks,
    ),
    promised=_DONE,
)
"""Passes over a forward model and its backward pass."""

ORDERS = {
    "pytorch": PYTORCH,
    "pytorch, outputs": PYTORCH_OUTPUTS,
    "jax, lowered": JAX_LOWERED,
    "jax": JAX,
    "onnx, forward": FORWARD,
    "onnx, differentiated": DIFFERENTIATED,
}
"""All orders, by name."""
