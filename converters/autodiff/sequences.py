"""Replace sequences by tensors: gradient rules handle tensors only."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..constants import static


def unpack_sequences(graph: ir.Graph) -> bool:
    """Replace SplitToSequence by Split if its parts are only read at known positions (torch.split); return whether any
    was.

    Call it after shape inference.
    """
    found = False
    for node in list(graph):
        uses = list(node.outputs[0].uses()) if node.op_type == "SplitToSequence" else []
        source = node.inputs[0] if node.inputs else None
        if not uses or source is None or any(use.node.op_type != "SequenceAt" for use in uses):
            continue
        places = [static(use.node.inputs[1]) for use in uses if use.node.inputs[1] is not None]
        given = node.inputs[1] if len(node.inputs) > 1 else None
        sizes = static(given) if given is not None else None
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
        if sizes is None or any(place is None for place in places):
            continue
        if sizes.ndim == 0:
            length = source.shape[axis] if source.shape is not None else None
            if not isinstance(length, int):
                continue
            size = int(sizes)
            sizes = np.asarray([min(size, length - first) for first in range(0, length, size)])
        lengths = ir.Value(name=f"{node.name}.sizes", const_value=ir.tensor(sizes.astype(np.int64)))
        lengths.shape, lengths.type = ir.Shape(sizes.shape), ir.TensorType(ir.DataType.INT64)
        graph.register_initializer(lengths)
        split = ir.node("Split", [source, lengths], {"axis": axis}, num_outputs=len(sizes), name=f"{node.name}.split")
        split.metadata_props["phase"] = "forward"
        graph.insert_before(node, split)
        for index, value in enumerate(split.outputs):
            value.name, value.type = f"{node.name}.part.{index}", source.type
        for use, place in zip(uses, places, strict=True):
            assert place is not None
            use.node.op_type = "Identity"  # its result may be an output, which keeps its name
            use.node.resize_inputs(1)
            use.node.replace_input_with(0, split.outputs[int(place)])
        graph.remove(node, safe=True)
        found = True
    return found
