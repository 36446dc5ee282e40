"""One naming for every converter's training graph.

Inputs are parameters and buffers under the framework's own names, optimizer state, then the batch; outputs are the
loss, then gradients (no optimizer) or new parameters and new state, then new buffers. A training loop feeds each
`new.<name>` back as `<name>`.
"""

from __future__ import annotations

from onnx_remat.ir.naming import GRADIENT, NEW

LOSS = "loss"


def gradient(parameter: str) -> str:
    """Output that holds a parameter's gradient.

    >>> gradient("fc.weight")
    'grad.fc.weight'
    """
    return GRADIENT + parameter


def new(name: str) -> str:
    """Output that holds the next value of an input: a parameter, a buffer, an optimizer state.

    >>> new("fc.weight"), new(state("fc.weight", "exp_avg"))
    ('new.fc.weight', 'new.state.fc.weight.exp_avg')
    """
    return NEW + name


def state(parameter: str, slot: str) -> str:
    """Input that holds one piece of optimizer state.

    >>> state("fc.weight", "momentum_buffer")
    'state.fc.weight.momentum_buffer'
    """
    return f"state.{parameter}.{slot}"


def batch(index: int) -> str:
    """Default name of the batch's input number `index`.

    >>> batch(0)
    'input.0'
    """
    return f"input.{index}"


def outside(index: int) -> str:
    """Input for a tensor that only the user's code holds, number `index`.

    >>> outside(0)
    'outside.0'
    """
    return f"outside.{index}"
