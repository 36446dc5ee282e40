"""CUDA's own libraries, where ONNX Runtime does not find them by itself."""

from __future__ import annotations

import contextlib
import io


def load_cuda() -> None:
    """Load what pip installed of CUDA and cuDNN, before a session is made that needs them.

    ``onnxruntime-gpu[cuda,cudnn]``, and PyTorch, bring these libraries in folders where no loader looks. Without them
    onnxruntime makes a session on the CPU instead, and only its log says why. Where there are none, the system's are
    found as ever; versions before 1.21 know no other.
    """
    import onnxruntime

    if preload := getattr(onnxruntime, "preload_dlls", None):
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find, needed or not
            preload()
