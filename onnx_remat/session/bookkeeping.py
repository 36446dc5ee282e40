"""ONNX Runtime's bookkeeping: the memory that a session takes beyond tensors and workspace."""

from __future__ import annotations

BYTES = 3_400_000
"""Bytes that a session takes whatever its graph, beyond a session of one node; see `bookkeeping_bytes`."""

BYTES_PER_NODE = 5_850
"""Bytes for each node."""

BYTES_PER_KERNEL = 1_500
"""Additional bytes for each fused kernel: machine code, and a description of its inputs."""

BYTES_PER_CONVOLUTION = 185_000
"""Additional bytes for each distinct convolution: the code that oneDNN makes for it and for its copies."""


def bookkeeping_bytes(nodes: int, kernels: int = 0, convolutions: int = 0) -> int:
    """Bound the bytes that a session takes for a graph of `nodes`, small values included; `kernels` of them are fused,
    which compute so many distinct `convolutions`.

    An upper line over measurements of fifteen graphs of 149 to 10,257 nodes, rewritten to 60 % (``python -m
    scripts.bench resident``, onnxruntime 1.32.0, two threads): none took more, those of few nodes up to 3.2 MB less. On
    Python 3.13 the same file took 0.5 MB more than on 3.11. With AVX-512, oneDNN's code is larger: a step of many
    convolutions can take more than this.
    """
    return BYTES + BYTES_PER_NODE * nodes + BYTES_PER_KERNEL * kernels + BYTES_PER_CONVOLUTION * convolutions
