"""Random values for training that is measured, and what of a process is not training."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto

from onnx_remat.measure import training_memory
from onnx_remat.measure.probe import library_bytes
from onnx_remat.measure.training_memory import state_for
from onnx_remat.session.arrays import Array


def test_state_in_half_precision_is_small_floats_as_in_float32():
    """Of bfloat16 numpy has the bits alone: 0 and 1 among them would be zeros and denormals."""
    for kind in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16):
        array = Array("w", kind, (300, 7))
        made = state_for((array,))["w"]
        numbers = array.numbers(made).astype(np.float32)
        assert made.dtype == array.dtype_name and 0.0099 < numbers.min() < numbers.max() < 0.111
        assert len(np.unique(numbers)) > 100


def mapped(path: Path, protection: int) -> mmap.mmap:
    """Map a file and read a byte of every page."""
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, protection)
    assert sum(pages[:: mmap.PAGESIZE]) > 0
    return pages


@pytest.mark.skipif(not training_memory.available(), reason="resident memory is read from /proc")
def test_pages_of_libraries_are_no_training_memory_and_pages_of_weights_are(tmp_path):
    """The kernel maps up to 2 MB more of ONNX Runtime's code where that is in its cache: a budget seemed missed."""
    library = Path(np._core._multiarray_umath.__file__)
    weights = tmp_path / "weights.bin"
    weights.write_bytes(library.read_bytes())
    before = library_bytes()
    with mapped(weights, mmap.PROT_READ):
        assert library_bytes() == pytest.approx(before, abs=1e6)
    with mapped(library, mmap.PROT_READ | mmap.PROT_EXEC):
        assert library_bytes() == pytest.approx(before + library.stat().st_size, abs=1e6)
