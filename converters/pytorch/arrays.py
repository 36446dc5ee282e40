"""Conversion of tensors to numpy arrays and back, bfloat16 included."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch


def array(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor as a numpy array."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return np.asarray(tensor.numpy())


def tensor(value: np.ndarray) -> torch.Tensor:
    """Return a numpy array as a tensor; a copy."""
    if value.dtype.name == "bfloat16":  # not as a view of its bits: a mode may compute in another type
        return torch.from_numpy(value.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.array(value))


def view(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a contiguous tensor as a numpy array; bfloat16 as its bits."""
    tensor = tensor.detach()
    return np.asarray(tensor.view(torch.uint16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy())
