"""What exports import, imported once: each export of `budgeted` runs in a fork of this process."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def _exports_are_warm() -> None:
    """Import what a fork would, and read torch's translations: over two seconds, in each of hundreds of exports."""
    if "onnxscript" not in sys.modules or "torch" not in sys.modules:
        return
    import torch._dynamo  # noqa: F401
    from onnx_remat.converters.pytorch import prepare, program

    from onnx_remat.memory import layout

    program._untranslated(prepare.OPSET)
    layout.load_greedy()
    layout.load_search()
    layout.load_later_searches()
