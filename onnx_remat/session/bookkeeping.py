"""ONNX Runtime's bookkeeping: the memory that a session takes beyond tensors and workspace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx_remat.session.lean_graph import LeanNode

BYTES = 2_900_000
"""Bytes that a session takes whatever its graph, beyond a session of one node; see `bookkeeping_bytes`."""

BYTES_PER_VALUE = 6_000
"""Bytes for each value that a node writes, and for the node."""

BYTES_PER_KERNEL = 1_850
"""Additional bytes for each fused kernel: machine code, and a description of its inputs."""

BYTES_PER_CONVOLUTION = 147_000
"""Additional bytes for each distinct convolution: the code that oneDNN makes for it and for its copies."""


def bookkeeping_bytes(values: int, kernels: int = 0, convolutions: int = 0) -> int:
    """Bound the bytes that a session takes for a graph whose nodes write so many `values`, small values included.

    `kernels` of the nodes are fused, which compute so many distinct `convolutions`. Nodes are a worse measure: a kernel
    writes up to ten values.

    An upper line over measurements of steps of 102 to 9,007 values, each fused and unfused (``python -m scripts.bench
    bookkeeping``, onnxruntime 1.32.0, two threads, AVX-512): none took more, some 9 MB less. A ViT that was rewritten
    took 1.6 MB more. On Python 3.13 the same file took 0.5 MB more than on 3.11.
    """
    return BYTES + BYTES_PER_VALUE * values + BYTES_PER_KERNEL * kernels + BYTES_PER_CONVOLUTION * convolutions


def values_of(steps: Iterable[LeanNode]) -> int:
    """Return how many values some nodes write."""
    return sum(len(step.writes) for step in steps)
