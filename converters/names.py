"""Names of inputs and outputs, the same in every converter's training graph.

Inputs are parameters and buffers under the framework's names, optimizer state, then the batch. Outputs are the loss,
then gradients (without an optimizer) or new parameters and new state, then new buffers. A training loop feeds each
`new.<name>` back as `<name>`.
"""

from __future__ import annotations

from onnx_remat.ir.naming import GRADIENT, NEW

LOSS = "loss"


def gradient(parameter: str) -> str:
    """Return the name of the output with a parameter's gradient.

    >>> gradient("fc.weight")
    'grad.fc.weight'
    """
    return GRADIENT + parameter


def new(name: str) -> str:
    """Return the name of the output with the next value of an input: a parameter, a buffer, an optimizer state.

    >>> new("fc.weight"), new(state("fc.weight", "exp_avg"))
    ('new.fc.weight', 'new.state.fc.weight.exp_avg')
    """
    return NEW + name


def state(parameter: str, slot: str) -> str:
    """Return the name of the input with one piece of optimizer state.

    >>> state("fc.weight", "momentum_buffer")
    'state.fc.weight.momentum_buffer'
    """
    return f"state.{parameter}.{slot}"


def batch(index: int) -> str:
    """Return the default name of input number `index` of the batch.

    >>> batch(0)
    'input.0'
    """
    return f"input.{index}"


def outside(index: int) -> str:
    """Return the name of input number `index` for tensors that only the user's code refers to.

    >>> outside(0)
    'outside.0'
    """
    return f"outside.{index}"


def output(part: str) -> str:
    """Return the name of the output with a part of the model's output.

    >>> output("logits"), output("output")
    ('output.logits', 'output')
    """
    return part if part == "output" else f"output.{part}"
