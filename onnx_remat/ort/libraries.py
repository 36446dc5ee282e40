"""CUDA's libraries, in case ONNX Runtime does not find them by itself."""

from __future__ import annotations

import contextlib
import io


def load_cuda() -> None:
    """Load the CUDA and cuDNN libraries that pip installed, before creating a session that needs them.

    ``onnxruntime-gpu[cuda,cudnn]``, and PyTorch, install these libraries in folders that no loader searches. Without
    them onnxruntime silently creates a session on the CPU; only its log says why. If there are none, the loader finds
    the system's; versions before 1.21 support only those.
    """
    import onnxruntime

    if preload := getattr(onnxruntime, "preload_dlls", None):
        with contextlib.redirect_stdout(io.StringIO()):  # it prints missing libraries, needed or not
            preload()
