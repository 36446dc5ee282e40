"""Mutants: a small training step's bytes, or its parts, changed at random."""

from __future__ import annotations

import random

import onnx

from tests.support.graphs import mlp

OPS = ("Tanh", "MatMul", "Reshape", "Split", "If", "Loop", "Scan", "Dropout", "Cast", "Concat", "Einsum", "SequenceAt",
       "Conv", "Gemm", "Size", "Transpose", "Constant", "MaxPool", "Where", "Nonsense")  # fmt: skip


BASE = mlp(layers=3, batch=64, width=8)
KINDS = ("bytes", "model")


def mutant(kind: str, seed: int) -> bytes:
    """A file with a few of its bytes changed, or a model with a few of its parts changed, whatever becomes of it."""
    generator = random.Random(seed)
    if kind == "bytes":
        return _bytes(BASE.SerializeToString(), generator)
    model = onnx.ModelProto()
    model.CopyFrom(BASE)
    for _ in range(generator.randrange(1, 4)):
        _mutate(model, generator)
    return model.SerializeToString()


def _bytes(data: bytes, generator: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(generator.randrange(1, 6)):
        place = generator.randrange(len(changed))
        kind = generator.randrange(4)
        if kind == 0:
            changed[place] = generator.randrange(256)
        elif kind == 1:
            del changed[place : place + generator.randrange(1, 50)]
        elif kind == 2:
            changed[place:place] = generator.randbytes(generator.randrange(1, 20))
        else:
            changed[place] ^= 1 << generator.randrange(8)
    return bytes(changed)


def _mutate(model: onnx.ModelProto, generator: random.Random) -> None:
    """Change one thing, legal or not."""
    graph = model.graph
    nodes = graph.node
    node = generator.choice(nodes) if nodes else None
    names = [*(n for x in nodes for n in x.output), *(v.name for v in graph.input), ""]
    value = generator.choice([*graph.input, *graph.output, *graph.value_info])

    def some_shape() -> None:
        dims = value.type.tensor_type.shape.dim
        if dims and generator.random() < 0.7:
            generator.choice(dims).dim_value = generator.choice([0, 1, -1, 3, 2**31, 2**62, 64])
        elif dims and generator.random() < 0.5:
            generator.choice(dims).dim_param = "n"
        else:
            value.type.tensor_type.shape.dim.add().dim_value = generator.choice([1, 5])

    def some_tensor() -> None:
        if graph.initializer:
            tensor = generator.choice(graph.initializer)
            tensor.dims.append(generator.choice([0, -1, 2, 2**40])) if generator.random() < 0.5 else tensor.ClearField(
                "raw_data"
            )

    changes = [some_shape, some_tensor]
    changes.append(lambda: setattr(value.type.tensor_type, "elem_type", generator.randrange(0, 30)))
    changes.append(lambda: graph.output.pop() if len(graph.output) else None)
    changes.append(lambda: setattr(value, "name", generator.choice(names)))
    if node is not None:
        changes += [
            lambda: nodes.remove(node), lambda: nodes.append(node),
            lambda: setattr(node, "op_type", generator.choice(OPS)),
            lambda: setattr(node, "domain", generator.choice(["", "ai.onnx", "com.microsoft", "x"])),
            lambda: node.input.append(generator.choice(names)), lambda: node.output.append(generator.choice(names)),
            lambda: node.ClearField("input"), lambda: node.ClearField("attribute"),
            lambda: node.input.__setitem__(0, generator.choice(names)) if node.input else None,
            lambda: node.output.__setitem__(0, generator.choice(names)) if node.output else None,
            lambda: node.attribute.add(name="axis", i=generator.randrange(-9, 9), type=2),
            lambda: nodes.insert(0, nodes.pop()),
        ]  # fmt: skip
    generator.choice(changes)()
