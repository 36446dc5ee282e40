"""Execution providers by the names users give them."""

from __future__ import annotations

from onnx_remat.errors import UsageError, did_you_mean
from onnx_remat.ort.kernels.base import Kernels
from onnx_remat.ort.kernels.cpu import CPU

PROVIDERS = ("cpu", "cuda")
"""Names that the command line takes."""

_RECORDS = {record.name: record for record in (CPU,)}


def kernels_of(provider: str) -> Kernels:
    """The facts about a provider's kernels.

    Raises
    ------
    UsageError
        No such provider, or its facts are not known yet.

    Examples
    --------
    >>> kernels_of("cpu").execution_providers
    ('CPUExecutionProvider',)
    """
    if provider in _RECORDS:
        return _RECORDS[provider]
    have = ", ".join(_RECORDS)
    if provider in PROVIDERS:
        raise UsageError(f"provider {provider!r}: what its kernels do with memory is not known yet; choose from {have}")
    raise UsageError(f"unknown provider {provider!r}{did_you_mean(provider, _RECORDS) or f': choose from {have}'}")
