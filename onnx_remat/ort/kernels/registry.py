"""Execution providers by users' names."""

from __future__ import annotations

from dataclasses import replace

from onnx_remat.errors import UsageError, did_you_mean
from onnx_remat.ort.kernels.base import Kernels
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.kernels.cuda import CUDA
from onnx_remat.ort.kernels.cuda_workspace import rules

_RECORDS = {record.name: record for record in (CPU, CUDA)}

PROVIDERS = tuple(_RECORDS)
"""Names that the command line takes."""


def kernels_of(provider: str, library_workspace: int | None = None) -> Kernels:
    """Return the facts about a provider's kernels.

    Parameters
    ----------
    provider : str
        One of `PROVIDERS`.
    library_workspace : int, optional
        Bytes to allow for cuDNN's workspace in a convolution, instead of the provider's own margin.

    Raises
    ------
    UsageError
        There is no such provider, or it does not use the library.

    Examples
    --------
    >>> kernels_of("cpu").execution_providers
    ('CPUExecutionProvider',)
    """
    if provider not in _RECORDS:
        have = ", ".join(_RECORDS)
        raise UsageError(f"unknown provider {provider!r}{did_you_mean(provider, _RECORDS) or f': choose from {have}'}")
    record = _RECORDS[provider]
    if library_workspace is None:
        return record
    if record is not CUDA:
        raise UsageError(f"a workspace for cuDNN is for provider 'cuda', not {provider!r}")
    return replace(record, workspace=rules(library_workspace), library_workspace=library_workspace)
