"""Memory reuse in a `Session`: ``new.<name>`` in place of ``<name>``, outputs in place of dying inputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnx_remat.ir.naming import renewals
from onnx_remat.memory.donation import donatable
from onnx_remat.memory.problem import Problem
from onnx_remat.ort.kernels.in_place import may_overwrite
from onnx_remat.ort.prepare import Compiled


def with_donations(compiled: Compiled) -> Compiled:
    """Return the same step with its state updated in place wherever an order of the ops allows it.

    An op that itself reads the old value may overwrite it if its kernel was measured to be safe over that input.
    """
    graph, problem, tensors = compiled.graph, compiled.problem, compiled.tensors
    number = {name: i for i, name in enumerate(graph.values)}
    outputs = [name for name, value in graph.values.items() if value.is_output]
    producer = graph.makers
    may_read = np.zeros(problem.n_values, np.bool_)
    pairs = []
    for new, old in renewals(graph.fed, outputs).items():
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


def with_slab_donations(compiled: Compiled) -> Problem:
    """Return the problem of a step in which every output may reuse an input that its kernel may overwrite.

    A `Session` does so if the input dies (`session.offsets`); ONNX Runtime's own allocation does so for few kernels.
    Bounds for a loop hold for this problem.
    """
    graph, tensors, kinds = compiled.graph, compiled.tensors, dict[tuple[object, ...], int]()
    slots: list[list[int]] = []
    for op in graph.ops:
        position = {slot: i for i, slot in enumerate(s for s, name in enumerate(op.inputs) if name)}
        for out, made in enumerate(op.outputs):
            if not made:
                continue
            kind = tensors[made].dtype, tensors[made].shape
            same = [s for s in position if (tensors[op.inputs[s]].dtype, tensors[op.inputs[s]].shape) == kind]
            slots.append([position[s] for s in same if may_overwrite(compiled.kernels, op.node, s, out, kind[0])])
    sizes = ((tensors[name].dtype, tensors[name].shape) for name in graph.values)
    return replace(
        compiled.problem,
        outputs_join=True,
        inplace_ptr=np.cumsum([0, *map(len, slots)]).astype(np.int32),
        inplace_slots=np.array([slot for each in slots for slot in each], np.int32),
        shape_class=np.array([kinds.setdefault(size, len(kinds)) for size in sizes], np.int32),
    )
