"""What a session takes of the machine's memory besides tensors and workspace: ONNX Runtime's bookkeeping."""

from __future__ import annotations

BOOKS_BYTES = 3_400_000
"""What a session takes whatever its graph, over a session of one node; see `books`."""

BOOKS_BYTES_PER_NODE = 5_850
"""What it takes for each node."""

BOOKS_BYTES_PER_KERNEL = 1_500
"""What it takes besides for each node that is a fused kernel: machine code, and a description of its inputs."""


def books(nodes: int, kernels: int = 0) -> int:
    """Bytes that a session takes for a graph of so many nodes, some of them fused kernels, small values included.

    A line over what fifteen graphs of 149 to 10,257 nodes were seen to take, rewritten to 60 % (``python -m
    scripts.bench resident``, onnxruntime 1.32.0, two threads): none took more, those of few nodes up to 3.2 MB less. On
    Python 3.13 the same file was seen to take 0.5 MB more than on 3.11.
    """
    return BOOKS_BYTES + BOOKS_BYTES_PER_NODE * nodes + BOOKS_BYTES_PER_KERNEL * kernels
