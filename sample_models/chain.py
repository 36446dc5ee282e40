"""A uniform chain, for tests of peak memory against theory."""

from __future__ import annotations

import onnx

import sample_models.layers  # noqa: F401  (registers the layers)
from sample_models.step import TrainingGraph


def chain(n: int, width: int, batch: int) -> onnx.ModelProto:
    """A training step over a chain of `n` equal units ``x[i] = tanh(x[i-1])``.

    ::

        forward    x[0] = input.0 + bias        x[i] = Tanh(x[i-1])  for i = 1..n        loss = ReduceL2(x[n])
        backward   g[n] = x[n] / loss           g[i-1] = g[i] - (g[i] * x[i]) * x[i]     for i = n..1
        optimizer  new.bias = bias - learning_rate * ReduceSum(g[0], axis 0)

    Backward reads every unit's output, so each of x[1] .. x[n] is kept or recomputed; x[0] dies once x[1] is
    there. The nodes have **one** topological order: the gradient starts from the loss, and every backward
    node needs the gradient that reaches it. No runtime can execute them in another.

    Parameters
    ----------
    n : int
        Number of units, at least 1.
    width, batch : int
        Every x[i] and g[i] is float32 of shape (batch, width): A = 4 * batch * width bytes.

    Notes
    -----
    The peak is at unit n's backward, where these are live: input.0, x[1] .. x[n], g[n], and the products
    ``g[n] * x[n]`` and ``(g[n] * x[n]) * x[n]``, the second possibly in place of the first. Alongside them stand
    S = 4 * width + 16 bytes: bias, learning rate, reduction axis, loss. With every value freed after its last
    reader, inputs, constants, intermediates and outputs of the whole step together peak at

    ========================================  =====================
    no node writes over its input             ``(n + 4) * A + S``
    elementwise nodes write over dying ones   ``(n + 3) * A + S``
    ========================================  =====================

    as `peak_bytes` gives. ONNX Runtime 1.31 on the CPU reaches the first: it runs Tanh in place, but not Mul.

    Recomputation cannot go below 5 A + S (4 A + S in place): at unit i's backward, input.0, x[i], g[i] and
    the two products are live, whatever else is not.

    Examples
    --------
    >>> model = chain(3, width=4, batch=2)
    >>> [node.op_type for node in model.graph.node][:5]
    ['Add', 'Tanh', 'Tanh', 'Tanh', 'ReduceL2']
    """
    graph = TrainingGraph("chain")
    x = graph.shift(graph.batch_input(0, (batch, width)), "bias", (width,))
    for index in range(n):
        with graph.scope(f"unit.{index + 1}"):
            x = graph.tanh(x)
    return graph.finish(graph.norm(x), learning_rate=0.5)


def peak_bytes(n: int, width: int, batch: int, in_place: bool = False) -> int:
    """The peak of `chain` in file order, as its notes derive it."""
    activation = 4 * batch * width
    return (n + (3 if in_place else 4)) * activation + 4 * width + 16


def build() -> onnx.ModelProto:
    """The committed chain: 32 units of 2 MiB each."""
    return chain(32, width=256, batch=2048)
