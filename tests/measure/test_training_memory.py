"""Random values for training that is measured."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from onnx_remat.measure.training_memory import state_for
from onnx_remat.session.plan_session import Array


def test_state_in_half_precision_is_small_floats_as_in_float32():
    """Of bfloat16 numpy has the bits alone: 0 and 1 among them would be zeros and denormals."""
    for kind in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16):
        array = Array("w", kind, (300, 7))
        made = state_for((array,))["w"]
        numbers = array.numbers(made).astype(np.float32)
        assert made.dtype == array.dtype_name and 0.0099 < numbers.min() < numbers.max() < 0.111
        assert len(np.unique(numbers)) > 100
