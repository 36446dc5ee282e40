"""ONNX Runtime's bookkeeping: the memory that a session takes beyond tensors and workspace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx_remat.session.lean_graph import LeanNode

BYTES = 3_600_000
"""Bytes that a session takes whatever its graph, beyond a session of one node; see `bookkeeping_bytes`."""

BYTES_PER_VALUE = 6_000
"""Bytes for each value that a node writes, and for the node."""

BYTES_PER_KERNEL = 1_850
"""Additional bytes for each fused kernel: machine code, and a description of its inputs."""


def bookkeeping_bytes(values: int, kernels: int = 0, code: int = 0) -> int:
    """Bound the bytes that a session takes for a graph whose nodes write so many `values`, small values included.

    `kernels` of the nodes are fused, and oneDNN makes so many bytes of `code` for them. Nodes are a worse measure: a
    kernel writes up to ten values.

    An upper line over measurements of steps of 102 to 9,007 values, each fused and unfused, two of them rewritten
    (``python -m scripts.bench bookkeeping``, onnxruntime 1.32.0, two threads, on AVX-512 and on AVX2, where a session
    takes about 1.2 MB more): none took more, some 9 MB less. They included 1 to 2 MB of libraries' code, which
    `measure.training_memory` no longer counts.
    """
    return BYTES + BYTES_PER_VALUE * values + BYTES_PER_KERNEL * kernels + code


def values_of(steps: Iterable[LeanNode]) -> int:
    """Return how many values some nodes write."""
    return sum(len(step.writes) for step in steps)
