"""Donation of a compiled step: which ``new.<name>`` the plan may count as lying in the memory of ``<name>``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnx_remat.donation import donatable
from onnx_remat.ir.naming import renewals
from onnx_remat.ort.kernels.in_place import may_overwrite
from onnx_remat.ort.prepare import Compiled


def with_donations(compiled: Compiled) -> Compiled:
    """The same step, its renewed state lying in the memory of the old one wherever an order of the ops allows it.

    An op that reads the old value itself may renew it where its kernel was measured to be safe over that input.
    """
    graph, problem, tensors = compiled.graph, compiled.problem, compiled.tensors
    number = {name: i for i, name in enumerate(graph.values)}
    outputs = [name for name, value in graph.values.items() if value.is_output]
    producer = graph.producer()
    may_read = np.zeros(problem.n_values, np.bool_)
    pairs = []
    for new, old in renewals(number, outputs).items():
        same = (tensors[new].dtype, tensors[new].shape) == (tensors[old].dtype, tensors[old].shape)
        if new not in producer or not same or graph.values[old].is_output:
            continue
        op = graph.ops[producer[new]]
        out, slots = op.outputs.index(new), [slot for slot, name in enumerate(op.inputs) if name == old]
        may_read[number[new]] = bool(slots) and all(
            may_overwrite(compiled.kernels, op.node, slot, out, tensors[new].dtype) for slot in slots
        )
        pairs.append((number[new], number[old]))
    flagged = replace(problem, donee_may_read=may_read)
    return replace(compiled, problem=donatable(flagged, pairs).apply(flagged))
