"""Random steps over the ops that converters write, and hostile inputs for them: the ground of the differential fuzzer.

A step is a chain of matrices h0, h1, ... Every layer also works out *sides* of its matrix, each by one entry of the
op table; the way back, from the last layer to the first, reads all matrices and sides again, as a backward pass does.
What a side makes of a NaN reaches only its own output, so that NaN in one place does not hide faults in others.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.support.graphs import model_of

SIDE = 24
MATRIX, IMAGE = [SIDE, SIDE], [1, 4, SIDE // 2, SIDE // 2]
FLOAT, BOOL, INT32, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64
OPSET = 20


class Steps:
    """One random step; `wanted` ops are drawn for its sides, all ops of the table otherwise."""

    def __init__(self, seed: int, layers: int = 5, sides: int = 2, wanted: list[str] | None = None) -> None:
        self.random = random.Random(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: dict[str, object] = {"x": MATRIX, "y": MATRIX, "n": (INT64, MATRIX), "k": (INT64, MATRIX)}
        self.outputs: dict[str, object] = {}
        self.constants: dict[str, np.ndarray] = {"tenth": np.float32(0.1)}
        entries = [wanted[i % len(wanted)] for i in range(layers * sides)] if wanted else []
        h, kept = "x", []
        for i in range(layers):
            names = entries[i * sides : (i + 1) * sides] or self.random.sample(sorted(TABLE), sides)
            found = [TABLE[name](self, name, h) for name in names]
            kept.append((h, found))
            h = self.layer(h, i)
        loss = self.op("ReduceMean", [h], keepdims=0)
        self.nodes.append(helper.make_node("Identity", [loss], ["loss"], name="loss"))
        self.outputs["loss"] = []
        g = self.op("Sub", [h, "y"])
        for i, (value, found) in reversed(list(enumerate(kept))):
            for j, side in enumerate(found):
                weighed = self.op("Mul", [side, value])
                self.output(f"side{i}.{j}", self.op("ReduceMax", [weighed, self.const(np.array([0]))], keepdims=0))
            slope = self.op("Tanh", [value])
            g = self.op("Tanh", [self.op("MatMul", [self.op("Mul", [g, slope]), f"w{i}"])])
            self.output(f"new.w{i}", self.op("Sub", [f"w{i}", self.op("Mul", [g, "tenth"])]))

    def layer(self, h: str, i: int) -> str:
        """The next matrix: by a product or a convolution."""
        self.inputs[f"w{i}"] = MATRIX
        product = self.op("MatMul", [h, f"w{i}"])
        if self.random.random() < 0.4:
            image = self.op("Conv", [self.image(product), self.weight([4, 4, 3, 3])], pads=[1] * 4)
            product = self.flat(self.op("Relu", [image]))
        return self.op("Tanh", [self.op("Mul", [product, "tenth"])])

    def op(self, op_type: str, inputs: list[str], count: int = 1, **attributes: object) -> str:
        """Append a node; the name of its first output."""
        number = len(self.nodes)
        outputs = [f"{op_type}.{number}" + (f".{i}" if i else "") for i in range(count)]
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=f"n{number}.{op_type}", **attributes))
        return outputs[0]

    def const(self, array: np.ndarray) -> str:
        name = f"const{len(self.constants)}"
        self.constants[name] = array
        return name

    def weight(self, shape: list[int], positive: bool = False) -> str:
        name = f"weight{len(self.inputs)}" + (".var" if positive else "")
        self.inputs[name] = shape
        return name

    def output(self, name: str, made: str) -> None:
        self.nodes.append(helper.make_node("Identity", [made], [name], name=f"out.{name}"))
        self.outputs[name] = MATRIX if name.startswith("new.") else None

    def image(self, name: str) -> str:
        return self.op("Reshape", [name, self.const(np.array(IMAGE))])

    def flat(self, name: str) -> str:
        return self.op("Reshape", [name, self.const(np.array(MATRIX))])

    def number(self, name: str, kind: int = FLOAT) -> str:
        return self.op("Cast", [name], to=kind)

    def axis(self) -> str:
        return self.const(np.array([self.random.randrange(2)]))

    def condition(self, h: str) -> str:
        return self.op("Greater", [h, "y"])

    def model(self) -> onnx.ModelProto:
        shapes = {name: [SIDE] if shape is None else shape for name, shape in self.outputs.items()}
        return model_of(self.nodes, self.inputs, shapes, self.constants, opset=OPSET)


Entry = Callable[[Steps, str, str], str]
TABLE: dict[str, Entry] = {}
"""How to make a float matrix with each op: step, op type, float matrix -> float matrix."""


def entry(*names: str) -> Callable[[Entry], Entry]:
    def enter(make: Entry) -> Entry:
        TABLE.update(dict.fromkeys(names, make))
        return make

    return enter


_UNARY = (
    "Abs Acos Acosh Asin Asinh Atan Atanh Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid HardSwish Identity "
    "LeakyRelu Log LogSoftmax LpNormalization Mish Neg Reciprocal Relu Round Selu Sigmoid Sign Sin Sinh Softmax "
    "Softplus Softsign Sqrt Tan Tanh ThresholdedRelu Trilu"
)
for _name in _UNARY.split():
    TABLE[_name] = lambda s, op, h: s.op(op, [h])
for _name in ["Add", "Sub", "Mul", "Div", "Max", "Min", "Pow", "PRelu", "Sum", "Mean", "MatMul", "Gemm"]:
    TABLE[_name] = lambda s, op, h: s.op(op, [h, "y"])
for _name in ["Equal", "Greater", "Less", "GreaterOrEqual", "LessOrEqual"]:
    TABLE[_name] = lambda s, op, h: s.number(s.op(op, [h, "y"]))
for _name in ["And", "Or", "Xor"]:
    TABLE[_name] = lambda s, op, h: s.number(s.op(op, [s.condition(h), s.op("Less", [h, "x"])]))
for _name in ["BitwiseAnd", "BitwiseOr", "BitwiseXor"]:
    TABLE[_name] = lambda s, op, h: s.op("Mul", [s.number(s.op(op, ["n", "k"])), h])
for _name in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"):
    TABLE[f"Reduce{_name}"] = lambda s, op, h: s.op("Add", [s.op(op, [h, s.axis()]), h])
for _name in ["ArgMax", "ArgMin"]:
    TABLE[_name] = lambda s, op, h: s.op("Add", [s.number(s.op(op, [h], axis=1)), h])
for _name in ["IsNaN", "IsInf"]:
    TABLE[_name] = lambda s, op, h: s.number(s.op(op, [h]))
for _name in ["GlobalAveragePool", "GlobalMaxPool"]:
    TABLE[_name] = lambda s, op, h: s.flat(s.op("Add", [s.op(op, [s.image(h)]), s.image(h)]))


@entry("Where")
def _(s: Steps, op: str, h: str) -> str:
    return s.op(op, [s.condition(h), h, "y"])


@entry("Not")
def _(s: Steps, op: str, h: str) -> str:
    return s.number(s.op(op, [s.condition(h)]))


@entry("BitwiseNot")
def _(s: Steps, op: str, h: str) -> str:
    return s.op("Mul", [s.number(s.op(op, ["n"])), h])


@entry("BitShift")
def _(s: Steps, op: str, h: str) -> str:
    places = s.const(np.array(3, np.uint64))
    return s.op("Add", [s.number(s.op(op, [s.number("k", TensorProto.UINT64), places], direction="LEFT")), h])


@entry("Mod")
def _(s: Steps, op: str, h: str) -> str:
    return s.op(op, [h, "y"], fmod=1)


@entry("Clip")
def _(s: Steps, op: str, h: str) -> str:
    return s.op(op, [h, s.const(np.float32(-0.5)), s.const(np.float32(0.5))])


@entry("Cast", "CastLike")
def _(s: Steps, op: str, h: str) -> str:
    kind = s.random.choice([TensorProto.DOUBLE, INT32, BOOL])
    if op == "Cast":
        return s.number(s.op("Cast", ["n" if kind == INT32 else h], to=kind))
    return s.op(op, [s.op("Cast", [h], to=TensorProto.DOUBLE), h])


@entry("CumSum")
def _(s: Steps, op: str, h: str) -> str:
    return s.op(op, [h, s.const(np.array(s.random.randrange(2)))])


@entry("Einsum")
def _(s: Steps, op: str, h: str) -> str:
    return s.op(op, [h, "y"], equation="ij,kj->ik")


@entry("Transpose")
def _(s: Steps, op: str, h: str) -> str:
    return s.op(op, [h], perm=[1, 0])


@entry("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _(s: Steps, op: str, h: str) -> str:
    axes = s.const(np.array([1]))
    if op == "Reshape":
        return s.flat(s.op("Sin", [s.image(h)]))
    if op == "Flatten":
        return s.flat(s.op("Exp", [s.op(op, [h], axis=0)]))
    return s.op("Squeeze", [s.op("Exp", [s.op("Unsqueeze", [h, axes])]), axes])


@entry("Concat", "Split")
def _(s: Steps, op: str, h: str) -> str:
    first = s.op("Split", [h], 2, axis=0, num_outputs=2)
    pair = [first, f"{first}.1"] if s.random.random() < 0.5 else [first, first]
    return s.op("Concat", pair, axis=0)


@entry("Slice", "Tile")
def _(s: Steps, op: str, h: str) -> str:
    wide = s.op("Tile", [h, s.const(np.array([2, 1]))])
    bounds = [s.const(np.array([i])) for i in (SIDE // 2, SIDE // 2 + SIDE, 0)]
    return s.op("Slice", [wide, *bounds])


@entry("Expand")
def _(s: Steps, op: str, h: str) -> str:
    row = s.op("ReduceSum", [h, s.const(np.array([0]))])
    return s.op(op, [row, s.const(np.array(MATRIX))])


@entry("Pad")
def _(s: Steps, op: str, h: str) -> str:
    wide = s.op(op, [h, s.const(np.array([0, 1, 0, 1]))], mode=s.random.choice(["constant", "reflect", "edge"]))
    return s.op("Slice", [wide, *(s.const(np.array([i])) for i in (0, SIDE, 1))])


@entry("Gather")
def _(s: Steps, op: str, h: str) -> str:
    return s.op(op, [h, s.const(np.arange(SIDE)[::-1] - SIDE // 2)], axis=0)


@entry("GatherElements")
def _(s: Steps, op: str, h: str) -> str:
    index = np.random.default_rng(0).integers(-SIDE, SIDE, MATRIX)
    return s.op(op, [h, s.const(index)], axis=1)


@entry("GatherND")
def _(s: Steps, op: str, h: str) -> str:
    return s.op(op, [h, s.const(np.arange(SIDE)[::-1].reshape(SIDE, 1).copy())])


@entry("ScatterElements")
def _(s: Steps, op: str, h: str) -> str:
    index = np.argsort(np.random.default_rng(1).random(MATRIX), axis=1)
    return s.op(op, [h, s.const(index), "y"], axis=1, reduction=s.random.choice(["none", "add"]))


@entry("ScatterND")
def _(s: Steps, op: str, h: str) -> str:
    index = s.const(np.arange(SIDE)[::2].reshape(-1, 1).copy())
    return s.op(op, [h, index, s.op("Gather", ["y", s.const(np.arange(SIDE // 2))], axis=0)])


@entry("OneHot")
def _(s: Steps, op: str, h: str) -> str:
    hot = s.op(op, [s.op("ArgMax", [h], axis=1, keepdims=0), s.const(np.int64(SIDE)), s.const(np.float32([0, 1]))])
    return s.op("Mul", [hot, h])


@entry("TopK")
def _(s: Steps, op: str, h: str) -> str:
    values = s.op(op, [h, s.const(np.array([SIDE]))], 2, axis=1)
    return s.op("Add", [values, s.number(f"{values}.1")]) if s.random.random() < 0.5 else s.op("Exp", [values])


@entry("Range", "ConstantOfShape", "EyeLike", "Shape", "Size")
def _(s: Steps, op: str, h: str) -> str:
    if op == "EyeLike":
        return s.op("Mul", [s.op(op, [h]), h])
    if op == "Size":
        return s.op("Mul", [s.number(s.op(op, [h])), h])
    zeros = s.op("ConstantOfShape", [s.op("Shape", [h])])
    steps = s.op("Range", [s.const(np.float32(a)) for a in (0, SIDE, 1)])
    return s.op("Mul", [s.op("Add", [zeros, steps]), h])


@entry("MaxPool")
def _(s: Steps, op: str, h: str) -> str:
    count = s.random.choice([1, 2, 2])
    pooled = s.op(op, [s.image(h)], count, kernel_shape=[3, 3], pads=[1] * 4)
    return s.flat(s.op("Add", [pooled, s.number(f"{pooled}.1")]) if count == 2 else s.op("Neg", [pooled]))


@entry("AveragePool", "LRN")
def _(s: Steps, op: str, h: str) -> str:
    more = {"size": 3} if op == "LRN" else {"kernel_shape": [3, 3], "pads": [1] * 4}
    return s.flat(s.op(op, [s.image(h)], **more))


@entry("Conv", "ConvTranspose")
def _(s: Steps, op: str, h: str) -> str:
    return s.flat(s.op(op, [s.image(h), s.weight([4, 4, 3, 3]), s.weight([4])], pads=[1] * 4))


@entry("BatchNormalization")
def _(s: Steps, op: str, h: str) -> str:
    names = [s.weight([4]), s.weight([4]), s.weight([4]), s.weight([4], positive=True)]
    made = s.op(op, [s.image(h), *names], 3, training_mode=1)
    for i in (1, 2):
        s.nodes[-1].output[i] = f"new.{names[i + 1]}"
        s.outputs[f"new.{names[i + 1]}"] = [4]
    return s.flat(made)


@entry("InstanceNormalization")
def _(s: Steps, op: str, h: str) -> str:
    return s.flat(s.op(op, [s.image(h), s.weight([4]), s.weight([4])]))


@entry("LayerNormalization")
def _(s: Steps, op: str, h: str) -> str:
    made = s.op(op, [h, s.weight([SIDE]), s.weight([SIDE])], 3)
    return s.op("Mul", [made, f"{made}.2"]) if s.random.random() < 0.5 else s.op("Exp", [made])


@entry("DepthToSpace", "SpaceToDepth")
def _(s: Steps, op: str, h: str) -> str:
    return s.flat(s.op("SpaceToDepth", [s.op("Neg", [s.op("DepthToSpace", [s.image(h)], blocksize=2)])], blocksize=2))


@entry("Resize")
def _(s: Steps, op: str, h: str) -> str:
    size = s.const(np.float32([1, 1, 2, 2]))
    return s.flat(s.op("MaxPool", [s.op(op, [s.image(h), "", size])], kernel_shape=[2, 2], strides=[2, 2]))


@entry("If")
def _(s: Steps, op: str, h: str) -> str:
    number = len(s.nodes)
    out = [helper.make_tensor_value_info(f"branch{number}", FLOAT, MATRIX)]
    bodies = [
        helper.make_graph([helper.make_node(kind, [h, "y"], [f"branch{number}"])], kind, [], out)
        for kind in ("Add", "Sub")
    ]
    positive = s.op("Greater", [s.op("ReduceMean", [h], keepdims=0), s.const(np.float32(0))])
    return s.op(op, [positive], then_branch=bodies[0], else_branch=bodies[1])


_HOSTILE = np.array(
    [0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-45, -1e-40, 3e38, -3e38, 1.1754944e-38, 1.0, -1.0, 0.5], np.float32
)
_LIMITS = np.array([0, 1, -1, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**53 + 1])


def hostile_feeds(model: onnx.ModelProto, seed: int, share: float) -> dict[str, np.ndarray]:
    """Inputs of a step, of which a share is zeros of both signs, NaN, infinities, denormals, huge or at its limits."""
    generator = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        shape = [d.dim_value for d in value.type.tensor_type.shape.dim]
        if value.type.tensor_type.elem_type == INT64:
            plain, odd = generator.integers(-9, 9, shape), generator.choice(_LIMITS, shape)
        else:
            plain = generator.standard_normal(shape).astype(np.float32)
            plain = np.abs(plain) if value.name.endswith(".var") else plain
            odd = generator.choice(_HOSTILE, shape)
        feeds[value.name] = np.where(generator.random(shape) < share, odd, plain).astype(plain.dtype)
    return feeds
