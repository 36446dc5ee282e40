"""A row of the table of hostile files, and those rows whose trouble lies in how a file says something.

Bytes that are no model, names, types, tensors, attributes, bodies, functions, versions, and too many of everything;
where data lies and what operators do is in tests/fuzz/test_hostile_files.py.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

node = helper.make_node
REFUSED, ANSWERED = (4,), (0, 3, 4)  # exit codes: what the libraries let through, a plan may be made of
Change = Callable[[onnx.ModelProto], object]


@dataclass(frozen=True)
class Hostile:
    """A change of a small training step, the exit codes and a part of the message it deserves.

    A change returns the file's bytes, where they are not those of the model it has changed.
    """

    name: str
    change: Change
    message: str = ""
    codes: tuple[int, ...] = REFUSED
    slow: bool = False


def typed(name: str, shape: list[int | str | None] | None, dtype: int = 1) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def rows() -> Iterator[Hostile]:
    """All that this module knows."""
    for name, change in BYTES.items():
        message = "listed twice" if name == "bytes: twice the model" else "is not an ONNX model"
        yield Hostile(name, lambda m, change=change: change(m.SerializeToString()), message)
    for name, change in FIELDS.items():
        yield Hostile(name, change, WORDS.get(name, ""), REFUSED if name in WORDS else ANSWERED)


# --- bytes that are no model -----------------------------------------------------------------------------------------


def field(number: int, kind: int, payload: bytes) -> bytes:
    """One field of a protobuf message."""
    return varint(number << 3 | kind) + payload


def varint(value: int) -> bytes:
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def deep(levels: int) -> bytes:
    """Messages in messages: a graph with a node with an attribute with a graph, and so on."""
    inner = b""
    for _ in range(levels):
        for number in (6, 5, 1):
            inner = field(number, 2, varint(len(inner)) + inner)
    return field(7, 2, varint(len(inner)) + inner)


BYTES: dict[str, Callable[[bytes], bytes]] = {
    "bytes: a single zero": lambda _: b"\0",
    "bytes: all ones": lambda _: b"\xff" * 999,
    "bytes: zeros": lambda _: b"\0" * 9999,
    "bytes: a compressed model": gzip.compress,
    "bytes: a picture": lambda _: b"\x89PNG\r\n\x1a\n" + b"\0" * 200,
    "bytes: a pickle": lambda _: b"\x80\x04\x95\x1e\0\0\0\0\0\0\0\x8c\x05posix\x8c\x06system\x93.",
    "bytes: JSON": lambda _: b'{"graph": {"node": []}}',
    "bytes: a varint without end": lambda _: b"\x08" + b"\x80" * 5000,
    "bytes: a length of 2**62": lambda data: data + field(7, 2, varint(2**62)),
    "bytes: a length beyond the end": lambda data: data + field(7, 2, varint(2**30)),
    "bytes: a group that never ends": lambda data: data + field(99, 3, b"") * 5000,
    "bytes: field number zero": lambda data: data + b"\x00\x00",
    "bytes: a wire type that there is not": lambda data: data + b"\x0f",
    "bytes: messages 400 deep": lambda _: deep(400),
    "bytes: messages 2000 deep": lambda _: deep(2000),
    "bytes: half of it": lambda data: data[: len(data) // 2],
    "bytes: reversed": lambda data: data[::-1],
    "bytes: a tensor alone": lambda _: numpy_helper.from_array(np.zeros(4)).SerializeToString(),
    "bytes: doubles": lambda _: struct.pack("<100d", *[1.5] * 100),
    "bytes: twice the model": lambda data: data + data,
}


# --- what a model says -----------------------------------------------------------------------------------------------

FIELDS: dict[str, Change] = {}
WORDS = {
    "names: an empty result in the middle": "node 'mm0' makes nothing: it has no outputs",
    "names: one letter for everything": "node 'act0' reads 'z0', which nothing defines: the model",
    "graph: none at all": "is not an ONNX model: it has no graph",
    "graph: nothing but outputs": "graph output 'loss' is made by no node",
    "graph: the loss made twice": "value 'loss' is defined twice (node 'Neg'): names must be",
    "graph: an input made by a node": "value 'x' is defined twice (node 'Neg'): names must be",
    "graph: two nodes that wait for each other": "node 'Add' reads 'b', which is made only later: sort the",
    "types: a symbolic name of a megabyte": "symbolic dimensions are not bound",
    "types: dimensions whose product is 2**64": "a tensor of shape [4294967296, 4294967296] exceeds any",
    "types: dimensions whose product is 2**63": "a tensor of shape [2097152, 2097152, 2097152] exceeds any",
    "types: a sequence as an input": "value 's', a graph input, is a sequence, whose size is",
    "types: an optional as an input": "value 'o', a graph input, is a optional, whose size is",
    "types: a map as an input": "value 'm', a graph input, is a map, whose size is not",
    "types: a sparse tensor as an input": "value 's', a graph input, is a sparse_tensor, whose size",
    "types: a data type of -1": "there is no data type -1",
    "types: the loss is of strings": "ONNX Runtime cannot load the model",
    "types: a dimension that contradicts itself": "the model states float[4, 8] for value 'z0', but by shape",
    "versions: an opset of -1": "the model uses opset -1: the installed onnx package knows",
    "versions: an opset of 2**63 - 1": "the model uses opset 9223372036854775807: the installed",
    "graph: 20,000 initializers": "ONNX shape inference refuses the model",
    "tensors: raw data too short": "initializer 'held' needs 16 bytes, it has 15",
    "tensors: raw data too long": "initializer 'held' needs 16 bytes, it has 17",
    "tensors: integers for floats": "initializer 'held' needs 4 entries, it has 0",
    "tensors: dimensions whose product is 2**64": "initializer 'held': a tensor of shape [4294967296",
    "tensors: dimensions whose product overflows to 4": "initializer 'held': a tensor of shape",
    "tensors: a dimension of -1": "initializer 'held' has a negative dimension: [-1]",
    "tensors: a data type of 99": "initializer 'held': there is no data type 99",
    "tensors: strings in raw data": "initializer 'held' needs 128 bytes, it has 16",
    "tensors: 4 bits, uneven": "ONNX Runtime cannot load the model",
    "tensors: 4 bits, too few": "initializer 'held' needs 5 bytes, it has 1",
    "tensors: complex numbers, half of one": "initializer 'held' needs 8 entries, it has 7",
    "tensors: one billion of nothing": "initializer 'held' needs 1000000000 entries, it has 0",
    "tensors: no name": "a initializer has no name",
    "tensors: sparse indices out of range": "ONNX Runtime cannot load the model",
    "tensors: sparse of 2**62 elements": "a tensor of shape [4611686018427387904] exceeds any",
    "attributes: an unknown one": "ONNX Runtime cannot load the model",
    "attributes: one without a name": "ONNX Runtime cannot load the model",
    "attributes: without a type": "node 'shown' (Softmax): attribute 'axis' must be of type",
    "attributes: another type than stated": "node 'shown' (Softmax): attribute 'axis' must be of type",
    "attributes: a million axes": "ONNX shape inference refuses the model",
    "attributes: a reference outside a function": "node 'shown' (Softmax) is not as its operator is defined",
    "attributes: a graph for a number": "node 'shown' (Softmax): attribute 'axis' must be of type",
    "attributes: a letter that is no UTF-8": "node 'shown' (Einsum) is not as its operator is defined",
    "attributes: an equation of a megabyte": "ONNX Runtime cannot load the model",
    "attributes: one twice": "ONNX Runtime cannot load the model",
    "bodies: branches of two shapes": "the shape of value 'shown', made by node 'shown' (If)",
    "bodies: a branch with an output too many": "memory of node 'shown' (If) while it runs: graph output",
    "bodies: a branch without outputs": "ONNX shape inference refuses the model",
    "bodies: an output nobody makes": "node 'shown' reads 'ghost', which nothing defines: the",
    "bodies: an output of the graph around": "ONNX Runtime cannot load the model",
    "bodies: a name of the graph around": "memory of node 'shown' (If) while it runs: value 'x' is",
    "bodies: a branch that reads itself": "memory of node 'shown' (If) while it runs: node 'Neg'",
    "bodies: a branch that takes inputs": "memory of node 'shown' (If) while it runs: node 'Neg'",
    "bodies: a branch that reads its own If": "node 'shown' reads 'shown', which is made only later",
    "bodies: a Loop of 2**63 - 1 turns": "the shape of value 'shown', made by node 'shown' (Loop)",
    "bodies: a Loop that never ends": "the shape of value 'shown', made by node 'shown' (Loop)",
    "bodies: a Loop whose state is not made": "node 'shown' reads 'b', which nothing defines: the model",
    "bodies: a Loop whose body is cyclic": "ONNX shape inference refuses the model",
    "types: a dimension that is negative in a body": "memory of node 'shown' (If) while it runs: value 'r' has",
    "functions: the same twice": "the model's functions cannot be inlined",
    "functions: the name of a standard op": "the model's functions cannot be inlined",
    "functions: an output nobody makes": "the model cannot be read: ConvertError: Output shown is",
    "functions: one input twice": "node 'Neg' (Neg) lacks its input 'X'",
    "functions: reads what is not there": "the model cannot be read: ConvertError: Input ghost is",
    "functions: makes its own input": "value 'x' is defined twice (node 'Neg'): names must be",
    "functions: an operator nobody knows": "the model's functions cannot be inlined",
    "functions: a body of a domain that is not imported": "the model's functions cannot be inlined",
    "functions: called with too many inputs": "the model's functions cannot be inlined",
}
"""Of the message each refusal deserves. What is not here is allowed by ONNX, or nobody asks: it must do no harm."""


def says(name: str) -> Callable[[Change], Change]:
    """Register a change."""

    def register(change: Change) -> Change:
        FIELDS[name] = change
        return change

    return register


def appended(model: onnx.ModelProto, kind: str, inputs: list[str], output: str, **attributes: object) -> onnx.NodeProto:
    """A node whose result the graph outputs."""
    model.graph.node.append(node(kind, inputs, [output], name=output, **attributes))
    model.graph.output.append(onnx.ValueInfoProto(name=output))
    return model.graph.node[-1]


def renamed(name: str) -> Change:
    """Another name for a node, and for what it makes."""

    def change(m: onnx.ModelProto) -> None:
        m.graph.node[0].name = name
        appended(m, "Neg", ["x"], name).name = f"{name} too"

    return change


FIELDS |= {
    "names: a line break in a node": renamed("first\nonnx-remat: all is well"),
    "names: an escape sequence": renamed("\x1b[2J\x1b[31mred"),
    "names: a megabyte": renamed("n" * 2**20),
    "names: right to left": renamed("\u202eevil"),
    "names: a path as a node's": renamed("../../etc/passwd"),
    "names: quotes and braces": renamed("'\"{0}%s%n$(id)`id`"),
    "names: an empty result in the middle": lambda m: m.graph.node[0].output.__setitem__(0, ""),
    "names: one letter for everything": lambda m: [n.output.__setitem__(0, "a") for n in m.graph.node],
    "graph: none at all": lambda m: m.ClearField("graph"),
    "graph: an output that is an input": lambda m: m.graph.output.append(typed("x", [8, 4])),
    "graph: nothing but outputs": lambda m: [m.graph.ClearField("node"), m.graph.ClearField("input")],
    "graph: a documentation of 10 MB": lambda m: setattr(m.graph, "doc_string", "d" * 10**7),
    "graph: the loss made twice": lambda m: m.graph.node.append(node("Neg", ["x"], ["loss"])),
    "graph: an input made by a node": lambda m: m.graph.node.append(node("Neg", ["t"], ["x"])),
    "graph: two nodes that wait for each other": lambda m: m.graph.node.extend(
        [node("Add", ["x", "b"], ["a"]), node("Add", ["a", "x"], ["b"])]
    ),
    "types: an input of 2,000 dimensions": lambda m: m.graph.input.append(typed("big", [1] * 2000)),
    "types: a symbolic name of a megabyte": lambda m: m.graph.input.append(typed("big", ["d" * 2**20])),
    "types: dimensions of zero": lambda m: m.graph.input.append(typed("none", [0, 0])),
    "types: dimensions whose product is 2**64": lambda m: m.graph.input.append(typed("big", [2**32, 2**32])),
    "types: dimensions whose product is 2**63": lambda m: m.graph.input.append(typed("big", [2**21] * 3)),
    "types: a sequence as an input": lambda m: m.graph.input.append(
        helper.make_tensor_sequence_value_info("s", 1, [4])
    ),
    "types: an optional as an input": lambda m: m.graph.input.append(
        helper.make_value_info("o", helper.make_optional_type_proto(helper.make_tensor_type_proto(1, [4])))
    ),
    "types: a map as an input": lambda m: m.graph.input.append(
        helper.make_value_info("m", helper.make_map_type_proto(7, helper.make_tensor_type_proto(1, [4])))
    ),
    "types: a sparse tensor as an input": lambda m: m.graph.input.append(
        helper.make_value_info("s", helper.make_sparse_tensor_type_proto(1, [4, 4]))
    ),
    "types: a data type of -1": lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", -1),
    "types: the loss is of strings": lambda m: setattr(m.graph.output[0].type.tensor_type, "elem_type", 8),
    "types: a dimension that contradicts itself": lambda m: m.graph.value_info.extend(
        [typed("z0", [8, 4]), typed("z0", [4, 8])]
    ),
    "metadata: one key twice": lambda m: [m.metadata_props.add(key="k", value=v) for v in "ab"],
    "metadata: not of ours, 10 MB": lambda m: m.metadata_props.add(key="k", value="v" * 10**7),
    "metadata: 10,000 entries": lambda m: [m.metadata_props.add(key=f"k{i}", value="v") for i in range(10_000)],
    "versions: an IR version of zero": lambda m: setattr(m, "ir_version", 0),
    "versions: an IR version of -1": lambda m: setattr(m, "ir_version", -1),
    "versions: an opset of -1": lambda m: setattr(m.opset_import[0], "version", -1),
    "versions: an opset of 2**63 - 1": lambda m: setattr(m.opset_import[0], "version", 2**63 - 1),
    "versions: a domain nobody knows, unused": lambda m: m.opset_import.append(helper.make_opsetid("x", 1)),
    "versions: a negative model version": lambda m: setattr(m, "model_version", -(2**63)),
    "training: an empty one": lambda m: m.training_info.add(),
    "quantisation: of what is not there": lambda m: m.graph.quantization_annotation.add(tensor_name="ghost"),
}


@says("graph: 2,000 inputs nobody reads")
def inputs(m: onnx.ModelProto) -> None:
    m.graph.input.extend(typed(f"in{i}", [1]) for i in range(2000))


@says("graph: 5,000 outputs")
def outputs(m: onnx.ModelProto) -> None:
    for i in range(5000):
        appended(m, "Neg", ["loss"], f"out{i}")


@says("graph: 20,000 initializers")
def initializers(m: onnx.ModelProto) -> None:
    m.graph.initializer.extend(numpy_helper.from_array(np.zeros(1, "f"), f"w{i}") for i in range(20_000))


@says("graph: initializers nobody reads, one name in another case")
def case(m: onnx.ModelProto) -> None:
    m.graph.initializer.extend(numpy_helper.from_array(np.zeros(1, "f"), name) for name in ("K", "k"))


@says("graph: 30,000 stated shapes")
def stated(m: onnx.ModelProto) -> None:
    m.graph.value_info.extend(typed(f"v{i}", [1]) for i in range(30_000))


@says("graph: a sum of 20,000 inputs")
def wide(m: onnx.ModelProto) -> None:
    appended(m, "Sum", ["x"] * 20_000, "many")


@says("graph: 10,000 nodes nobody reads")
def idle(m: onnx.ModelProto) -> None:
    m.graph.node.extend(node("Neg", ["x"], [f"idle{i}"]) for i in range(10_000))


@says("graph: a chain of 3,000 Identities")
def chain(m: onnx.ModelProto) -> None:
    m.graph.node.extend(node("Identity", [f"c{i}" if i else "x"], [f"c{i + 1}"]) for i in range(3000))
    m.graph.output.append(onnx.ValueInfoProto(name="c3000"))


# Tensors: an initializer of four floats, and what is wrong with it.


def tensor(**fields: object) -> Change:
    """Another initializer, read by a node."""

    def change(m: onnx.ModelProto) -> None:
        m.graph.initializer.append(TensorProto(**({"name": "held", "data_type": 1, "dims": [4]} | fields)))
        appended(m, "Identity", ["held"], "shown")

    return change


FOUR = np.ones(4, "f").tobytes()
FIELDS |= {
    "tensors: raw data too short": tensor(raw_data=FOUR[:-1]),
    "tensors: raw data too long": tensor(raw_data=FOUR + b"\0"),
    "tensors: both raw and typed data": tensor(raw_data=FOUR, float_data=[1] * 4),
    "tensors: integers for floats": tensor(int64_data=[1] * 4),
    "tensors: dimensions whose product is 2**64": tensor(dims=[2**32, 2**32], raw_data=FOUR),
    "tensors: dimensions whose product overflows to 4": tensor(dims=[2**62 + 1, 4], raw_data=FOUR),
    "tensors: a dimension of -1": tensor(dims=[-1], raw_data=FOUR),
    "tensors: a data type of 99": tensor(data_type=99, raw_data=FOUR),
    "tensors: strings as a weight": tensor(data_type=8, string_data=[b"a"] * 4),
    "tensors: strings in raw data": tensor(data_type=8, raw_data=FOUR),
    "tensors: 4 bits, uneven": tensor(data_type=22, dims=[3], raw_data=b"\x11\x01"),
    "tensors: 4 bits, too few": tensor(data_type=22, dims=[9], raw_data=b"\x11"),
    "tensors: a segment": tensor(raw_data=FOUR, segment=TensorProto.Segment(begin=2**40, end=-1)),
    "tensors: complex numbers, half of one": tensor(data_type=14, float_data=[1] * 7),
    "tensors: one billion of nothing": tensor(dims=[10**9]),
    "tensors: no name": lambda m: m.graph.initializer.add(data_type=1, dims=[4], raw_data=FOUR),
}


@says("tensors: sparse indices out of range")
def out_of_range(m: onnx.ModelProto) -> None:
    sparse = m.graph.sparse_initializer.add(dims=[4])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(2, "f"), "held"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([0, 10**12])))


@says("tensors: sparse of 2**62 elements")
def sparse_giant(m: onnx.ModelProto) -> None:
    sparse = m.graph.sparse_initializer.add(dims=[2**62])
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, "f"), "held"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.array([0])))


# Attributes.


def attribute(kind: str, **fields: object) -> Change:
    def change(m: onnx.ModelProto) -> None:
        appended(m, kind, ["x"], "shown").attribute.append(AttributeProto(**fields))

    return change


FIELDS |= {
    "attributes: an unknown one": attribute("Neg", name="nonsense", type=2, i=1),
    "attributes: one without a name": attribute("Softmax", type=2, i=1),
    "attributes: without a type": attribute("Softmax", name="axis", i=1),
    "attributes: another type than stated": attribute("Softmax", name="axis", type=1, i=1),
    "attributes: a million axes": attribute("Transpose", name="perm", type=7, ints=[0] * 10**6),
    "attributes: a reference outside a function": attribute("Softmax", name="axis", type=2, ref_attr_name="ghost"),
    "attributes: a graph for a number": attribute("Softmax", name="axis", type=5, g=onnx.GraphProto(name="g")),
    "attributes: a letter that is no UTF-8": attribute("Einsum", name="equation", type=3, s=b"\xff\xfe->"),
    "attributes: an equation of a megabyte": attribute("Einsum", name="equation", type=3, s=b"a" * 2**20),
}


@says("attributes: one twice")
def twice(m: onnx.ModelProto) -> None:
    shown = appended(m, "Softmax", ["x"], "shown", axis=0)
    shown.attribute.append(helper.make_attribute("axis", 1))


# Bodies.


def graph(
    nodes: list[onnx.NodeProto], made: list[str], given: list[onnx.ValueInfoProto] | None = None, **shape: object
) -> onnx.GraphProto:
    return helper.make_graph(nodes, "body", given or [], [typed(name, shape.get(name, [8, 4])) for name in made])


def chosen(then: onnx.GraphProto, other: onnx.GraphProto) -> Change:
    """An If over two bodies."""

    def change(m: onnx.ModelProto) -> None:
        m.graph.input.append(typed("c", [], TensorProto.BOOL))
        appended(m, "If", ["c"], "shown", then_branch=then, else_branch=other)

    return change


def turned(trips: int | None, *nodes: onnx.NodeProto) -> Change:
    """A Loop: of so many turns, or of as many as its condition says."""

    def change(m: onnx.ModelProto) -> None:
        for name, value in (("trips", np.array(trips or 0)), ("yes", np.array(True))):
            m.graph.initializer.append(numpy_helper.from_array(value, name))
        given = [typed("i", [], 7), typed("go", [], 9), typed("a", [8, 4])]
        body = helper.make_graph(
            [node("Identity", ["go"], ["on"]), *nodes], "body", given, [typed("on", [], 9), typed("b", [8, 4])]
        )
        appended(m, "Loop", ["trips" if trips else "", "yes", "x"], "shown", body=body)

    return change


NEG = graph([node("Neg", ["x"], ["r"])], ["r"])
FIELDS |= {
    "bodies: branches of two shapes": chosen(NEG, graph([node("ReduceSum", ["x"], ["r"])], ["r"], r=[1, 1])),
    "bodies: a branch with an output too many": chosen(NEG, graph([node("Neg", ["x"], ["r"])], ["r", "r"])),
    "bodies: a branch without outputs": chosen(NEG, graph([], [])),
    "bodies: an output nobody makes": chosen(NEG, graph([], ["ghost"])),
    "bodies: an output of the graph around": chosen(NEG, graph([], ["x"])),
    "bodies: a name of the graph around": chosen(NEG, graph([node("Neg", ["t"], ["x"])], ["x"])),
    "bodies: a branch that reads itself": chosen(NEG, graph([node("Neg", ["r"], ["r"])], ["r"])),
    "bodies: a branch that takes inputs": chosen(NEG, graph([node("Neg", ["q"], ["r"])], ["r"], [typed("q", [8, 4])])),
    "bodies: a branch that reads its own If": chosen(NEG, graph([node("Neg", ["shown"], ["r"])], ["r"])),
    "bodies: a Loop of 2**63 - 1 turns": turned(2**63 - 1, node("Neg", ["a"], ["b"])),
    "bodies: a Loop that never ends": turned(None, node("Neg", ["a"], ["b"])),
    "bodies: a Loop whose state is not made": turned(3),
    "bodies: a Loop whose body is cyclic": turned(3, node("Neg", ["d"], ["b"]), node("Neg", ["b"], ["d"])),
    "types: a dimension that is negative in a body": chosen(NEG, graph([node("Neg", ["x"], ["r"])], ["r"], r=[-8, 4])),
}


# Functions.


def function(
    name: str = "F",
    nodes: list[onnx.NodeProto] | None = None,
    given: tuple[str, ...] = ("a",),
    domain: str = "my",
    call: bool = True,
    made: str = "b",
    **more: object,
) -> Change:
    """A function of the file, called where it is not said otherwise."""

    def change(m: onnx.ModelProto) -> None:
        imports = [helper.make_opsetid("", 18)]
        body = [node("Neg", ["a"], ["b"])] if nodes is None else nodes
        m.functions.append(helper.make_function(domain, name, list(given), [made], body, imports, **more))
        if domain:
            m.opset_import.append(helper.make_opsetid(domain, 1))
        if call:
            appended(m, name, ["x"], "shown", domain=domain)

    return change


@says("functions: the same twice")
def same_twice(m: onnx.ModelProto) -> None:
    function()(m)
    m.functions.append(m.functions[0])


FIELDS |= {
    "functions: one nobody calls": function(call=False),
    "functions: of 5,000 nodes": function(
        nodes=[node("Neg", ["a"], [f"n{i}"]) for i in range(5000)] + [node("Neg", ["a"], ["b"])]
    ),
    "functions: the name of a standard op": function(name="Tanh", domain=""),
    "functions: an output nobody makes": function(made="ghost"),
    "functions: one input twice": function(given=("a", "a")),
    "functions: one attribute twice": function(attributes=["k", "k"]),
    "functions: no name": function(name=""),
    "functions: reads what is not there": function(nodes=[node("Neg", ["ghost"], ["b"])]),
    "functions: makes its own input": function(nodes=[node("Neg", ["a"], ["a"]), node("Neg", ["a"], ["b"])]),
    "functions: an operator nobody knows": function(nodes=[node("Nonsense", ["a"], ["b"])]),
    "functions: a body of a domain that is not imported": function(nodes=[node("Neg", ["a"], ["b"], domain="far")]),
    "functions: called with too many inputs": lambda m: [function()(m), m.graph.node[-1].input.extend(["x", "x"])],
}
