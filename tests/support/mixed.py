"""Random graphs in which everything meets: types, bodies, functions, views, constants, and each way to store a tensor.

Every value of the pool is a matrix of floats in [-1, 1] or close to it; a *part* reads some and adds one, by way of
another type, a body, a function and so on. What nobody reads becomes an output. Parts of `steps.TABLE` are among them.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_remat.session.plan_session import SessionRequest
from tests.support import poisoned
from tests.support.outcomes import (
    LEVELS,
    ROUNDING,
    WRONG,
    Outcome,
    rewrite_outcome,
    session_outcome,
    stock,
    unsettled,
)  # fmt: skip
from tests.support.steps import MATRIX, SIDE, TABLE, Steps

FLOAT, DOUBLE, HALF, BFLOAT16 = TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16
INT64, INT8, UINT8, BOOL = TensorProto.INT64, TensorProto.INT8, TensorProto.UINT8, TensorProto.BOOL
UNSTABLE = {"LpNormalization", "Pow", "Mod", "Div", "Reciprocal", "Tan", "Log", "Exp", "ReduceProd"}
"""Ops of the table that make huge numbers out of small ones: rounding would show in all that reads them."""

make = helper.make_node
Part = Callable[["Mixed"], str]
PARTS: dict[str, Part] = {}


def part(build: Part) -> Part:
    PARTS[build.__name__] = build
    return build


class Mixed(Steps):
    """One random graph.

    Parameters
    ----------
    seed : int
    size : int
        Parts.
    wanted : sequence of str
        Parts that it has at least.

    Attributes
    ----------
    parts : list of str
        Those that it has.
    """

    def __init__(self, seed: int, size: int = 12, wanted: tuple[str, ...] = ()) -> None:
        self.random = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: dict[str, object] = {"x": MATRIX, "y": MATRIX, "n": (INT64, MATRIX), "k": (INT64, MATRIX)}
        self.inputs["flag"] = (BOOL, [])
        self.outputs: dict[str, object] = {}
        self.constants: dict[str, np.ndarray] = {"tenth": np.float32(0.1)}
        self.defaults: list[str] = []
        self.sparse: list[str] = []
        self.functions: list[onnx.FunctionProto] = []
        self.pool = ["x", "y"]
        self.uncaptured: set[str] = set()
        self.stated: dict[str, list[int]] = {}
        chosen = [*wanted, *self.random.choices(sorted(PARTS), k=max(0, size - len(wanted)))]
        self.random.shuffle(chosen)
        self.parts = chosen
        for name in chosen:
            made = PARTS[name](self)
            if self.random.random() < 0.5:
                made = self.op("Tanh", [made])
            self.pool.append(made)
            if self.random.random() < 0.2:
                self.pool.append(self.view(made))
                self.uncaptured |= {self.pool[-1]} if made in self.uncaptured else set()
        self.opset = self.random.choice([20, 20, 20, 21, 22])
        self._finish()

    # --- what parts are made of ---------------------------------------------------------------------------------------

    def pick(self) -> str:
        """Some matrix made so far: the last one, or any, so that many are read late and several times."""
        return self.pool[-1] if self.random.random() < 0.4 else self.random.choice(self.pool)

    def outer(self) -> str:
        """A matrix for a body to read: ONNX Runtime 1.32 crashes where that is dequantized, or a view of such."""
        return self.random.choice([name for name in self.pool if name not in self.uncaptured])

    def chance(self, share: float = 0.5) -> bool:
        return self.random.random() < share

    def normal(self, shape: list[int], kind: type = np.float32) -> str:
        """A constant of random numbers."""
        return self.const((self.numbers.standard_normal(shape) * 0.3).astype(kind))

    def cast(self, name: str, kind: int) -> str:
        return self.op("Cast", [name], to=kind)

    def view(self, name: str) -> str:
        """The same matrix behind views, or a copy of it turned around twice."""
        kind = self.random.choice(["Identity", "Reshape", "Squeeze", "Flatten", "Transpose", "Dropout"])
        if kind == "Identity":
            return self.op("Identity", [name])
        if kind == "Dropout":
            return self.op("Dropout", [name])
        if kind == "Transpose":
            return self.op("Transpose", [self.op("Transpose", [name], perm=[1, 0])], perm=[1, 0])
        if kind == "Squeeze":
            axes = self.const(np.array([0]))
            return self.op("Squeeze", [self.op("Unsqueeze", [name, axes]), axes])
        return self.flat(self.op("Flatten", [name], axis=0) if kind == "Flatten" else self.image(name))

    def body(self, nodes: list[onnx.NodeProto], outputs: dict[str, object], inputs: dict[str, object] | None = None):
        """A graph for If, Loop or Scan."""

        def typed(names: dict[str, object]) -> list[onnx.ValueInfoProto]:
            return [
                helper.make_tensor_value_info(n, *(k if isinstance(k, tuple) else (FLOAT, k))) for n, k in names.items()
            ]

        return helper.make_graph(nodes, f"body{len(self.nodes)}", typed(inputs or {}), typed(outputs))

    def scalar(self, name: str) -> str:
        """A truth that depends on a matrix."""
        mean = self.op("ReduceMean", [name], keepdims=0)
        return self.op("Greater", [mean, self.const(np.float32(0))])

    # --- the whole ----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """Read old values again, as a backward pass does, and make outputs of what nobody reads."""
        for name in self.random.sample(self.pool, min(4, len(self.pool))):
            self.pool.append(self.op("Mul", [self.pool[-1], name]))
        loss = self.op("ReduceMean", [self.pool[-1]], keepdims=0)
        read = {name for node in self.nodes for name in _reads(node)}
        loose = [name for name in self.pool if name not in read and name not in self.inputs]
        for number, name in enumerate(loose):
            self.outputs[name] = MATRIX
            if number % 3 == 0:  # one with a name of its own, by an Identity: a view that is an output
                self.output(f"new.w{number}", name)
                self.inputs[f"w{number}"] = MATRIX
                self.pool.append(f"w{number}")
        self.outputs[loss] = []
        for name in self.random.sample(self.pool, 2):  # read and an output as well; perhaps an input, or a view
            self.outputs[name] = MATRIX
        if self.chance(0.3):
            self.outputs[self.normal(MATRIX)] = MATRIX
        if self.chance(0.2):
            self.outputs["x"] = MATRIX

    def model(self) -> onnx.ModelProto:
        nodes = [*self.nodes]
        outputs = [helper.make_tensor_value_info(n, *(s if isinstance(s, tuple) else (FLOAT, s)))
                   for n, s in self.outputs.items()]  # fmt: skip
        inputs = {**self.inputs, **{name: list(self.constants[name].shape) for name in self.defaults}}
        stored = {n: a for n, a in self.constants.items() if n not in self.sparse}
        graph = helper.make_graph(
            nodes, "mixed", [helper.make_tensor_value_info(n, *(s if isinstance(s, tuple) else (FLOAT, s)))
                             for n, s in inputs.items()],
            outputs, [numpy_helper.from_array(np.asarray(a), n) for n, a in stored.items()],
            value_info=[helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in self.stated.items()],
            sparse_initializer=[_sparse(name, self.constants[name]) for name in self.sparse],
        )  # fmt: skip
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid("own", 1)]
        for function in self.functions:
            for entry in function.opset_import:
                if not entry.domain:
                    entry.version = self.opset
        return helper.make_model(graph, opset_imports=imports, ir_version=10, functions=self.functions)

    def feeds(self, seed: int) -> dict[str, np.ndarray]:
        """Inputs by name; of those with a default, some."""
        generator = np.random.default_rng(seed)
        made: dict[str, np.ndarray] = {}
        for name, kind in self.inputs.items():
            dtype, shape = kind if isinstance(kind, tuple) else (FLOAT, kind)
            if dtype == INT64:
                made[name] = generator.integers(-9, 9, shape)
            elif dtype == BOOL:
                made[name] = np.array(bool(seed % 2))
            else:
                made[name] = np.tanh(generator.standard_normal(shape)).astype(np.float32)
                made[name] = np.abs(made[name]) if name.endswith(".var") else made[name]
        fed = [name for i, name in enumerate(self.defaults) if (seed + i) % 2]
        return made | {name: generator.standard_normal(self.constants[name].shape).astype(np.float32) for name in fed}

    def write(self, folder: Path) -> onnx.ModelProto | Path:
        """The model, or a file of it whose larger initializers lie next to it, for every third graph."""
        model = self.model()
        if "external" not in self.parts:
            return model
        path = folder / "model.onnx"
        onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=256)
        return path


def _reads(node: onnx.NodeProto) -> list[str]:
    """What a node reads, in its bodies too."""
    inner = [name for attribute in node.attribute for each in attribute.g.node for name in _reads(each)]
    inner += [value.name for attribute in node.attribute for value in attribute.g.output]
    return [*node.input, *inner]


def _sparse(name: str, dense: np.ndarray) -> onnx.SparseTensorProto:
    at = np.flatnonzero(dense)
    values = numpy_helper.from_array(dense.ravel()[at], name)
    return helper.make_sparse_tensor(values, numpy_helper.from_array(at.astype(np.int64), f"{name}_at"), dense.shape)


OUTLIERS = 0.1
"""Share of an output in which a step of 8 bits, or a choice, may fall otherwise after optimisations."""

COARSE = 2e-2
"""How far the file may be from its original where a step of 8 bits falls otherwise and a product spreads it."""

QUANTIZED = {"there_and_back", "quantized_op", "per_axis", "dynamically_quantized"}
BUDGETS = ("100%", "60%")


def try_graph(seed: int) -> str | dict[str, Outcome]:
    """What becomes of the graph of a seed; see `judge`."""
    return judge(Mixed(seed), seed)


def stock_results(seed: int) -> None:
    """Run the graph of a seed in stock ONNX Runtime at every level, and nothing else."""
    graph = Mixed(seed)
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"), contextlib.suppress(Exception):
        model = graph.write(Path(folder))
        for level in LEVELS:
            stock(model, level, graph.feeds(seed))


def judge(graph: Mixed, seed: int) -> str | dict[str, Outcome]:
    """What becomes of a graph, by column of the table, or why stock ONNX Runtime does not run it."""
    feeds = graph.feeds(seed)
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        model = graph.write(Path(folder))
        try:
            expected = {level: stock(model, level, feeds) for level in LEVELS}
        except Exception as error:
            return str(error).partition("\n")[0]
        near = COARSE if QUANTIZED.intersection(graph.parts) else ROUNDING
        found = {f"rewrite {b}": rewrite_outcome(model, b, feeds, expected, OUTLIERS, True, near) for b in BUDGETS}
        for level in LEVELS:
            judged = partial(session_outcome, model, level, feeds, expected[level], donate=bool(seed % 2))
            outcome = judged(OUTLIERS)
            if outcome.kind == WRONG and level != "disable":
                shares = unsettled(model, level, feeds, expected[level][0])
                outcome = judged({name: max(OUTLIERS, share) for name, share in shares.items()})
            found[f"Session {level}"] = outcome
        level = LEVELS[seed % len(LEVELS)]
        request = SessionRequest(level=level, donate=bool(seed % 2))
        with contextlib.suppress(poisoned.UnpoisonableError):
            found["poisoned slab"] = poisoned.outcome(model, request, feeds, expected[level][0], OUTLIERS)
    return found


# --- ops of the table, and patterns that ONNX Runtime fuses -----------------------------------------------------------


@part
def of_table(m: Mixed) -> str:
    name = m.random.choice(sorted(set(TABLE) - UNSTABLE - {"If"}))
    return m.op("Tanh", [TABLE[name](m, name, m.pick())])


@part
def product(m: Mixed) -> str:
    made = m.op("MatMul", [m.pick(), m.pick() if m.chance() else m.normal(MATRIX)])
    return m.op("Add", [made, m.normal([SIDE])]) if m.chance() else m.op("Mul", [made, "tenth"])


@part
def product_of_views(m: Mixed) -> str:
    turned = m.op("Transpose", [m.pick()], perm=[1, 0])
    pair = [turned, m.pick()] if m.chance() else [m.pick(), turned]
    return m.op("Mul", [m.op("MatMul", pair), "tenth"])


@part
def gelu(m: Mixed) -> str:
    x = m.op("Add", [m.pick(), m.normal([SIDE])])
    inner = m.op("Erf", [m.op("Div", [x, m.const(np.float32(2**0.5))])])
    return m.op("Mul", [m.op("Mul", [x, m.op("Add", [inner, m.const(np.float32(1))])]), m.const(np.float32(0.5))])


@part
def layer_norm(m: Mixed) -> str:
    x = m.pick()
    d = m.op("Sub", [x, m.op("ReduceMean", [x, m.const(np.array([-1]))])])
    var = m.op("ReduceMean", [m.op("Pow", [d, m.const(np.float32(2))]), m.const(np.array([-1]))])
    scaled = m.op("Div", [d, m.op("Sqrt", [m.op("Add", [var, m.const(np.float32(1e-2))])])])
    return m.op("Add", [m.op("Mul", [scaled, m.normal([SIDE])]), m.normal([SIDE])])


@part
def convolution(m: Mixed) -> str:
    """Channels that fill blocks of 8, or do not; depthwise or not; weights that are constants or inputs."""
    channels = m.random.choice([4, 8, 9, 16, 36])
    rest = {4: [12, 12], 8: [8, 9], 9: [8, 8], 16: [6, 6], 36: [4, 4]}[channels]
    group = channels if m.chance() else 1
    weight = [channels, channels // group, 3, 3]
    w = m.normal(weight) if m.chance(0.7) else m.weight(weight)
    image = m.op("Reshape", [m.pick(), m.const(np.array([1, channels, *rest]))])
    made = m.op("Conv", [image, w] + ([m.normal([channels])] if m.chance() else []), pads=[1] * 4, group=group)
    if m.chance():
        made = m.op("Add", [made, image])
    if m.chance():
        made = m.op("Relu", [made])
    return m.op("Mul", [m.flat(made), "tenth"])


@part
def leaky_twice(m: Mixed) -> str:
    return m.op("LeakyRelu", [m.op("LeakyRelu", [m.pick()], alpha=0.1)], alpha=0.2)


# --- other types ------------------------------------------------------------------------------------------------------

_HALF = ("Abs", "Neg", "Relu", "Tanh", "Sigmoid", "Softmax", "Erf", "Gelu", "Cos", "Softplus", "Elu", "Floor", "Mish")


@part
def half(m: Mixed) -> str:
    """A few ops in float16; most have no kernel."""
    h = m.cast(m.pick(), HALF)
    for _ in range(m.random.randrange(1, 5)):
        other = m.cast(m.pick(), HALF)
        kind = m.random.choice(["one", "one", "two", "product", "concat", "conv", "reduce"])
        if kind == "one":
            h = m.op(m.random.choice(_HALF), [h])
        elif kind == "two":
            h = m.op(m.random.choice(["Add", "Sub", "Mul", "Max", "Min"]), [h, other])
        elif kind == "product":
            h = m.op("Mul", [m.op("MatMul", [h, other]), m.const(np.float16(0.1))])
        elif kind == "concat":
            both = m.op("Concat", [h, other], axis=0)
            h = m.op("Slice", [both, *(m.const(np.array([i])) for i in (5, 5 + SIDE, 0))])
        elif kind == "conv":
            image = m.op("Conv", [m.image(h), m.normal([4, 4, 3, 3], np.float16)], pads=[1] * 4)
            h = m.op("Mul", [m.flat(image), m.const(np.float16(0.1))])
        else:
            h = m.op("Mul", [h, m.op("ReduceMean", [other, m.const(np.array([1]))])])
    if m.chance(0.3):
        m.outputs[h] = (HALF, MATRIX)
    return m.cast(h, FLOAT)


@part
def half_if(m: Mixed) -> str:
    """float16 across the edge of a body."""
    h = m.cast(m.pick(), HALF)
    n = len(m.nodes)
    bodies = [
        m.body([make(op, [h], [f"in{n}"]), make("Softplus", [f"in{n}"], [f"out{n}"])], {f"out{n}": (HALF, MATRIX)})
        for op in ("Sin", "Tanh")
    ]
    return m.cast(m.op("If", ["flag"], then_branch=bodies[0], else_branch=bodies[1]), FLOAT)


@part
def double(m: Mixed) -> str:
    d = m.op("Add", [m.cast(m.pick(), DOUBLE), m.normal([SIDE], np.float64)])
    d = m.op(m.random.choice(["Tanh", "Sin", "Relu", "Softmax", "Neg", "Sigmoid"]), [d])
    if m.chance():
        d = m.op("Mul", [m.op("MatMul", [d, m.cast(m.pick(), DOUBLE)]), m.const(np.float64(0.1))])
    if m.chance(0.3):
        m.outputs[d] = (DOUBLE, MATRIX)
    return m.cast(d, FLOAT)


@part
def bfloat16(m: Mixed) -> str:
    """What runs in it: copies, views, signs."""
    h = m.cast(m.pick(), BFLOAT16)
    kind = m.random.choice(["Identity", "Transpose", "Concat", "Flatten"])
    if kind == "Concat":
        both = m.op("Concat", [h, m.cast(m.pick(), BFLOAT16)], axis=0)
        return m.op("Slice", [m.cast(both, FLOAT), *(m.const(np.array([i])) for i in (3, 3 + SIDE, 0))])
    if kind == "Flatten":
        return m.flat(m.cast(m.op("Flatten", [h], axis=0), FLOAT))
    return m.cast(m.op(kind, [h]), FLOAT)


@part
def integers(m: Mixed) -> str:
    kind = m.random.choice([TensorProto.INT32, INT64])
    i = m.cast(m.op("Mul", [m.pick(), m.const(np.float32(50))]), kind)
    i = m.op(m.random.choice(["Add", "Mul", "Max", "Sub"]), [i, m.cast("n", kind)])
    if m.chance(0.3):
        m.outputs[i] = (kind, MATRIX)
    return m.op("Tanh", [m.op("Mul", [m.cast(i, FLOAT), "tenth"])])


@part
def masks(m: Mixed) -> str:
    mask = m.op("Greater", [m.pick(), m.pick()])
    mask = m.op(m.random.choice(["And", "Or", "Xor"]), [mask, m.op("Not", [m.op("Less", [m.pick(), "x"])])])
    if m.chance(0.3):
        m.outputs[mask] = (BOOL, MATRIX)
    return m.op("Where", [mask, m.pick(), m.pick()])


# --- quantized --------------------------------------------------------------------------------------------------------


def _quantized(m: Mixed, name: str) -> tuple[str, list[str]]:
    """A matrix in 8 bits, and the scale and zero point."""
    signed = m.chance()
    kind = np.int8 if signed else np.uint8
    step = m.const(np.float32(0.0173))
    zero = m.const(kind(3 if signed else 128))
    return m.op("QuantizeLinear", [name, step, zero]), [step, zero]


def _dequantized(m: Mixed, name: str) -> str:
    m.uncaptured.add(name)
    return name


@part
def there_and_back(m: Mixed) -> str:
    """Quantized, and read back by one or two that each take it for their own."""
    q, by = _quantized(m, m.pick())
    back = m.op("DequantizeLinear", [q, *by])
    if m.chance():
        m.pool.append(m.op("Tanh", [back]))
    if m.chance(0.3):
        m.pool.append(m.op("DequantizeLinear", [q, *by]))
    if m.chance(0.3):
        m.outputs[q] = (UINT8 if m.constants[by[1]].dtype == np.uint8 else INT8, MATRIX)
    return m.op("Mul", [back, m.pick()]) if m.chance() else _dequantized(m, back)


@part
def quantized_op(m: Mixed) -> str:
    """An op between DequantizeLinear and QuantizeLinear, as ONNX Runtime replaces it by one in 8 bits."""
    q, by = _quantized(m, m.pick())
    back = m.op("DequantizeLinear", [q, *by])
    kind = m.random.choice(["MatMul", "Add", "Relu", "Transpose", "MaxPool", "Sigmoid"])
    if kind == "MatMul":
        weights = m.const(m.numbers.integers(-60, 60, MATRIX).astype(np.int8))
        w = m.op("DequantizeLinear", [weights, m.const(np.float32(0.003)), m.const(np.int8(0))])
        made = m.op("MatMul", [back, w])
    elif kind == "Add":
        q2, by2 = _quantized(m, m.pick())
        made = m.op("Add", [back, m.op("DequantizeLinear", [q2, *by2])])
    elif kind == "MaxPool":
        made = m.flat(m.op("MaxPool", [m.image(back)], kernel_shape=[3, 3], pads=[1] * 4))
    else:
        made = m.op(kind, [back])
    q3, by3 = _quantized(m, made)
    return _dequantized(m, m.op("DequantizeLinear", [q3, *by3]))


@part
def per_axis(m: Mixed) -> str:
    """Stored weights in 8 bits, a scale for every column."""
    weights = m.const(m.numbers.integers(-90, 90, MATRIX).astype(np.int8))
    scales = m.const((np.arange(SIDE, dtype=np.float32) + 1) * 1e-3)
    w = m.op("DequantizeLinear", [weights, scales, m.const(np.zeros(SIDE, np.int8))], axis=1)
    if m.chance():
        m.pool.append(m.op("Mul", [w, m.pick()]))
    return m.op("Mul", [m.op("MatMul", [m.pick(), w]), "tenth"])


@part
def dynamically_quantized(m: Mixed) -> str:
    q = m.op("DynamicQuantizeLinear", [m.pick()], 3)
    return _dequantized(m, m.op("DequantizeLinear", [q, f"{q}.1", f"{q}.2"]))


# --- bodies -----------------------------------------------------------------------------------------------------------


@part
def branches(m: Mixed) -> str:
    """An If: captures, constants of its own, a value handed through; its condition fed, computed or constant."""
    n, one, two = len(m.nodes), m.outer(), m.outer()
    then = [make("Mul", [one, two], [f"a{n}"]), make("Tanh", [f"a{n}"], [f"then{n}"])]
    held = helper.make_tensor(f"held{n}", FLOAT, [SIDE], m.numbers.standard_normal(SIDE).astype(np.float32))
    otherwise = m.random.choice([
        [make("Identity", [two], [f"else{n}"])],
        [make("Constant", [], [f"c{n}"], value=held), make("Add", [one, f"c{n}"], [f"else{n}"])],
    ])  # fmt: skip
    which = m.random.choice(["flag", "data", "constant"])
    condition = "flag" if which == "flag" else m.scalar(one) if which == "data" else m.const(np.bool_(m.chance()))
    then_body, else_body = m.body(then, {f"then{n}": MATRIX}), m.body(otherwise, {f"else{n}": MATRIX})
    return m.op("If", [condition], then_branch=then_body, else_branch=else_body)


@part
def nested_branches(m: Mixed) -> str:
    n, one, two = len(m.nodes), m.outer(), m.outer()
    inner = make(
        "If", ["flag"], [f"inner{n}"],
        then_branch=m.body([make("Sin", [f"mid{n}"], [f"s{n}"])], {f"s{n}": MATRIX}),
        else_branch=m.body([make("Sub", [f"mid{n}", two], [f"d{n}"])], {f"d{n}": MATRIX}),
    )  # fmt: skip
    then = m.body([make("Add", [one, two], [f"mid{n}"]), inner], {f"inner{n}": MATRIX})
    otherwise = m.body([make("Identity", [one], [f"o{n}"])], {f"o{n}": MATRIX})
    return m.op("If", [m.scalar(two)], then_branch=then, else_branch=otherwise)


@part
def branches_of_two(m: Mixed) -> str:
    """Two results, of which one may be read by nobody."""
    n, one, two = len(m.nodes), m.outer(), m.outer()
    kinds = {f"p{n}": MATRIX, f"q{n}": MATRIX}
    then = m.body([make("Neg", [one], [f"p{n}"]), make("Relu", [two], [f"q{n}"])], kinds)
    otherwise = m.body([make("Abs", [two], [f"p{n}"]), make("Identity", [one], [f"q{n}"])], kinds)
    made = m.op("If", ["flag"], 2, then_branch=then, else_branch=otherwise)
    return m.op("Mul", [made, f"{made}.1"]) if m.chance() else made


@part
def loop(m: Mixed) -> str:
    """State carried, an outer value read, something collected from each turn."""
    n, outer = len(m.nodes), m.outer()
    turn = m.body(
        [make("Identity", [f"go{n}"], [f"on{n}"]), make("Mul", [f"h{n}", outer], [f"t{n}"]),
         make("Tanh", [f"t{n}"], [f"next{n}"]), make("ReduceMean", [f"next{n}"], [f"seen{n}"], keepdims=0)],
        {f"on{n}": (BOOL, []), f"next{n}": MATRIX, f"seen{n}": []},
        {f"i{n}": (INT64, []), f"go{n}": (BOOL, []), f"h{n}": MATRIX},
    )  # fmt: skip
    made = m.op("Loop", [m.const(np.array(3)), "" if m.chance() else m.const(np.bool_(True)), m.pick()], 2, body=turn)
    m.stated[f"{made}.1"] = [3]
    return m.op("Add", [made, m.op("ReduceMean", [f"{made}.1"], keepdims=0)])


@part
def scan(m: Mixed) -> str:
    n, outer = len(m.nodes), m.outer()
    row = [SIDE]
    step = m.body(
        [make("Add", [f"s{n}", f"r{n}"], [f"a{n}"]), make("Tanh", [f"a{n}"], [f"state{n}"]),
         make("MatMul", [f"state{n}", outer], [f"p{n}"]), make("Sin", [f"p{n}"], [f"row{n}"])],
        {f"state{n}": row, f"row{n}": row}, {f"s{n}": row, f"r{n}": row},
    )  # fmt: skip
    made = m.op("Scan", [m.normal(row), m.pick()], 2, body=step, num_scan_inputs=1)
    return f"{made}.1"


@part
def branch_in_loop(m: Mixed) -> str:
    n, outer = len(m.nodes), m.outer()
    inner = make(
        "If", ["flag"], [f"next{n}"],
        then_branch=m.body([make("Sub", [f"h{n}", outer], [f"u{n}"])], {f"u{n}": MATRIX}),
        else_branch=m.body([make("Max", [f"h{n}", outer], [f"v{n}"])], {f"v{n}": MATRIX}),
    )  # fmt: skip
    turn = m.body(
        [make("Identity", [f"go{n}"], [f"on{n}"]), inner], {f"on{n}": (BOOL, []), f"next{n}": MATRIX},
        {f"i{n}": (INT64, []), f"go{n}": (BOOL, []), f"h{n}": MATRIX},
    )  # fmt: skip
    return m.op("Tanh", [m.op("Loop", [m.const(np.array(2)), "", m.pick()], body=turn)])


# --- functions --------------------------------------------------------------------------------------------------------


@part
def function(m: Mixed) -> str:
    """Two calls of a function of the model, which calls another and has an attribute."""
    if not m.functions:
        imports = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
        leaky = make("LeakyRelu", ["t"], ["u"])
        leaky.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
        inner = helper.make_function(
            "own", "Inner", ["a", "b"], ["u"], [make("Mul", ["a", "b"], ["t"]), leaky], imports, ["slope"]
        )
        call = make("Inner", ["p", "q"], ["r"], domain="own", slope=0.3)
        outer = helper.make_function(
            "own", "Outer", ["p", "q"], ["s", "r"], [call, make("Add", ["r", "p"], ["s"])], imports
        )
        m.functions += [inner, outer]
    first = m.op("Outer", [m.pick(), m.pick()], 2, domain="own")
    second = m.op("Inner", [first, m.pick()], domain="own", slope=m.random.choice([0.1, 0.5]))
    return m.op("Add", [second, f"{first}.1"]) if m.chance() else second


@part
def of_functions(m: Mixed) -> str:
    """Ops that ONNX defines by others."""
    name = m.random.choice(
        ["Celu", "HardSwish", "Mish", "Shrink", "ThresholdedRelu", "MeanVarianceNormalization", "Softsign"]
    )
    if name == "MeanVarianceNormalization":
        return m.op("Tanh", [m.flat(m.op(name, [m.image(m.pick())], axes=[0, 2, 3]))])
    return m.op(name, [m.pick()])


# --- constants and shapes ---------------------------------------------------------------------------------------------


@part
def foldable(m: Mixed) -> str:
    """A chain of constants, read by what is not."""
    c = m.op("Sin", [m.op("Add", [m.normal(MATRIX), m.normal([SIDE])])])
    c = m.op("Transpose", [c], perm=[1, 0]) if m.chance() else m.op("MatMul", [c, m.normal(MATRIX)])
    return m.op("Tanh", [m.op("Add", [c, m.pick()])]) if m.chance(0.8) else m.op("Tanh", [c])


@part
def constant_node(m: Mixed) -> str:
    value = numpy_helper.from_array(m.numbers.standard_normal(MATRIX).astype(np.float32))
    return m.op("Mul", [m.pick(), m.op("Constant", [], value=value)])


@part
def with_default(m: Mixed) -> str:
    """An input that need not be fed."""
    name = m.normal(MATRIX if m.chance() else [SIDE])
    m.defaults.append(name)
    return m.op("Mul", [m.pick(), name])


@part
def sparse_weight(m: Mixed) -> str:
    name = m.const(np.where(m.numbers.random(MATRIX) < 0.1, 1, 0).astype(np.float32))
    m.sparse.append(name)
    return m.op("Mul", [m.op("MatMul", [m.pick(), name]), "tenth"])


@part
def external(m: Mixed) -> str:
    """The model is a file whose larger initializers lie next to it: see `Mixed.write`."""
    return m.op("Mul", [m.pick(), m.normal(MATRIX)])


@part
def shapes(m: Mixed) -> str:
    """Sizes computed from sizes, and a matrix shaped by them."""
    s = m.op("Shape", [m.image(m.pick())])
    rows = m.op("Gather", [s, m.const(np.array([2]))])
    half = m.op("Div", [m.op("Mul", [rows, m.const(np.array([4]))]), m.const(np.array([2]))])
    shape = m.op("Concat", [half, m.const(np.array([-1]))], axis=0)
    made = m.op("Reshape", [m.pick(), shape])
    if m.chance():
        filled = m.op("Expand", [m.normal([SIDE]), shape if False else m.op("Shape", [made])])
        return m.op("Mul", [made, filled])
    return made


@part
def dropout(m: Mixed) -> str:
    """In training mode, with a seed; its mask may be read."""
    ratio = m.const(np.float32(m.random.choice([0.0, 0.3])))
    made = m.op("Dropout", [m.pick(), ratio, m.const(np.bool_(m.chance(0.7)))], 2, seed=m.random.randrange(1, 99))
    return m.op("Mul", [made, m.cast(f"{made}.1", FLOAT)]) if m.chance() else made


@part
def many_readers(m: Mixed) -> str:
    """A value, and views of it, read by several at different times."""
    h = m.op("Sigmoid", [m.pick()])
    image = m.image(h)
    m.pool += [m.flat(m.op("Neg", [image])), m.op("Transpose", [h], perm=[1, 0]), h]
    return m.op("Add", [m.op("Mul", [h, h]), m.flat(m.op("Relu", [image]))])


@part
def pieces(m: Mixed) -> str:
    """Split, and put together again; a piece may be empty, or read by nobody."""
    count = m.random.choice([2, 3, 4])
    first = m.op("Split", [m.pick()], count, axis=0, num_outputs=count)
    every = [first, *(f"{first}.{i}" for i in range(1, count))]
    m.random.shuffle(every)
    if m.chance(0.3):
        zero = m.const(np.array([0]))
        every.append(m.op("Slice", [first, zero, zero]))
    return m.op("Concat", every, axis=0)


@part
def listed(m: Mixed) -> str:
    """Through a sequence, and through text."""
    if m.chance():
        both = m.op("ConcatFromSequence", [m.op("SequenceConstruct", [m.pick(), m.pick()])], axis=0)
        m.stated[both] = [2 * SIDE, SIDE]
        return m.op("Slice", [both, *(m.const(np.array([i])) for i in (7, 7 + SIDE, 0))])
    text = m.op("Cast", ["n"], to=TensorProto.STRING)
    return m.op("Mul", [m.op("Cast", [text], to=FLOAT), m.op("Mul", [m.pick(), "tenth"])])


@part
def merged(m: Mixed) -> str:
    """Equal nodes, which are made one."""
    h = m.pick()
    first, second = (m.op("Sin", [m.op("Neg", [h])]) for _ in range(2))
    m.pool.append(first)
    return m.op("Add", [second, m.op("Identity", [m.pick()])])
