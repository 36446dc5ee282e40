"""Unusual but legal graphs: each is rewritten, runs on stock ONNX Runtime, gives the same outputs, keeps its budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import onnx_remat
from onnx_remat.errors import ModelError, UsageError
from onnx_remat.findings.check import check
from onnx_remat.ir.expand import expand
from onnx_remat.measure import processes
from onnx_remat.ort.executed import as_executed
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Preparation
from tests.support.graphs import feeds_for, mlp, run_model, same_bits
from tests.support.slow import few

pytest.importorskip("onnxruntime")
make = helper.make_node
LAYERS, BATCH, WIDTH = 6, 512, 32
FULL = [BATCH, WIDTH]
F, I64, BOOL, STRING = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING


@dataclass(frozen=True)
class Odd:
    """How to make an odd graph, the budget, whether outputs repeat from run to run, what must occur only once."""

    build: Callable[[], onnx.ModelProto]
    budget: str
    repeatable: bool
    once: Sequence[str]
    options: dict[str, object]


ODD: dict[str, Odd] = {}


def odd(budget: str = "80%", repeatable: bool = True, once: Sequence[str] = (), **options: object):
    """Register the change that a function makes to the MLP (or the model it returns) under the function's name."""

    def register(change):
        def build() -> onnx.ModelProto:
            model = mlp(layers=LAYERS, batch=BATCH, width=WIDTH)
            return change(model) or model

        ODD[change.__name__] = Odd(build, budget, repeatable, once, options)
        return change

    return register


def typed(name: str, shape: Sequence[int | str] | None, dtype: int = F) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def constant(model: onnx.ModelProto, name: str, array: object) -> str:
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return name


def splice(model: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], out: str, layer: int = 2) -> None:
    """Put nodes between a layer's activation and the next layer, which then reads `out`."""
    place = next(i for i, n in enumerate(model.graph.node) if n.name == f"mm{layer + 1}")
    model.graph.node[place].input[0] = out
    for node in reversed(nodes):
        model.graph.node.insert(place, node)


def output(model: onnx.ModelProto, name: str, shape: Sequence[int | str] | None, dtype: int = F) -> None:
    model.graph.output.append(typed(name, shape, dtype))


def body(nodes, outputs, inputs=(), name="body", initializers=()) -> onnx.GraphProto:
    return helper.make_graph(list(nodes), name, list(inputs), list(outputs), list(initializers))


# Control flow


@odd(once=["If"])
def if_with_captured_activations(m):
    m.graph.input.append(typed("c", [], BOOL))
    yes = body([make("Mul", ["a2", "a1"], ["y"])], [typed("y", FULL)])
    no = body([make("Sub", ["a2", "a1"], ["n"])], [typed("n", FULL)])
    splice(m, [make("If", ["c"], ["odd"], name="if", then_branch=yes, else_branch=no)], "odd")


@odd(once=["If"])
def if_within_if(m):
    m.graph.input.append(typed("c", [], BOOL))
    deep = body([make("Mul", ["a0", "s"], ["d"])], [typed("d", FULL)])
    flat = body([make("Neg", ["a2"], ["f"])], [typed("f", FULL)])
    inner = make("If", ["c"], ["i"], then_branch=deep, else_branch=flat)
    yes = body([make("Tanh", ["a1"], ["s"]), inner], [typed("i", FULL)])
    no = body([make("Identity", ["a2"], ["n"])], [typed("n", FULL)])
    splice(m, [make("If", ["c"], ["odd"], name="if", then_branch=yes, else_branch=no)], "odd")


@odd(once=["If"])
def if_with_constant_branches(m):
    m.graph.input.append(typed("c", [], BOOL))
    branches = [
        body([], [typed(n, [WIDTH])], initializers=[numpy_helper.from_array(np.full(WIDTH, v, np.float32), n)])
        for n, v in (("one", 1.0), ("two", 2.0))
    ]
    pick = make("If", ["c"], ["k"], name="if", then_branch=branches[0], else_branch=branches[1])
    splice(m, [pick, make("Mul", ["a2", "k"], ["odd"], name="odd")], "odd")


def loop_body(extra: Sequence[onnx.NodeProto] = (), scan: bool = False) -> onnx.GraphProto:
    nodes = [
        make("Identity", ["go"], ["go_on"]),
        make("Mul", ["h", "a1"], ["p"]),
        make("Tanh", ["p"], ["next"]),
        *extra,
    ]
    outputs = [typed("go_on", [], BOOL), typed("next", FULL)]
    if scan:
        nodes.append(make("ReduceMean", ["next", "axis"], ["mean"], keepdims=0))
        outputs.append(typed("mean", [WIDTH]))
    return body(nodes, outputs, [typed("i", [], I64), typed("go", [], BOOL), typed("h", FULL)])


@odd(once=["Loop"])
def loop_with_captures(m):
    constant(m, "trips", np.int64(3))
    splice(m, [make("Loop", ["trips", "", "a2"], ["odd"], name="loop", body=loop_body())], "odd")


@odd(once=["Loop"])
def loop_with_scan_outputs(m):
    constant(m, "trips", np.int64(3))
    constant(m, "axis", np.array([0]))
    splice(m, [make("Loop", ["trips", "", "a2"], ["odd", "means"], name="loop", body=loop_body(scan=True))], "odd")
    output(m, "means", [3, WIDTH])


@odd(once=["Scan"])
def scan_with_captures(m):
    inner = body(
        [make("Add", ["s", "row"], ["acc"]), make("Mul", ["row", "k"], ["o"])],
        [typed("acc", [WIDTH]), typed("o", [WIDTH])],
        [typed("s", [WIDTH]), typed("row", [WIDTH])],
    )  # fmt: skip
    constant(m, "start", np.zeros(WIDTH, np.float32))
    constant(m, "k", np.full(WIDTH, 0.5, np.float32))
    splice(m, [make("Scan", ["start", "a2"], ["sum", "odd"], name="scan", body=inner, num_scan_inputs=1)], "odd")
    output(m, "sum", [WIDTH])


@odd(once=["If"])
def body_names_shadow_nothing_but_look_like_clones(m):
    m.graph.input.append(typed("c", [], BOOL))
    yes = body([make("Mul", ["a2", "a2"], ["a1__remat1"])], [typed("a1__remat1", FULL)])
    no = body([make("Identity", ["a2"], ["z1__remat1"])], [typed("z1__remat1", FULL)])
    splice(m, [make("If", ["c"], ["odd"], name="if", then_branch=yes, else_branch=no)], "odd")


# Functions


def import_domain(m, domain: str) -> None:
    m.opset_import.append(helper.make_opsetid(domain, 1))


def function(name: str, nodes, inputs=("a",), outputs=("b",), attributes=()) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("my", 1)]
    return helper.make_function("my", name, list(inputs), list(outputs), list(nodes), opsets, list(attributes))


@odd()
def local_function(m):
    import_domain(m, "my")
    m.functions.append(function("Cube", [make("Mul", ["a", "a"], ["t"]), make("Mul", ["t", "a"], ["b"])]))
    splice(m, [make("Cube", ["a2"], ["odd"], name="cube", domain="my")], "odd")


@odd()
def functions_within_functions(m):
    import_domain(m, "my")
    m.functions.append(function("Square", [make("Mul", ["a", "a"], ["b"])]))
    m.functions.append(
        function("Fourth", [make("Square", ["a"], ["t"], domain="my"), make("Square", ["t"], ["b"], domain="my")])
    )
    splice(m, [make("Fourth", ["a2"], ["odd"], name="fourth", domain="my")], "odd")


@odd()
def function_with_attributes(m):
    import_domain(m, "my")
    leaky = make("LeakyRelu", ["a"], ["b"])
    leaky.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    m.functions.append(function("Leak", [leaky], attributes=["slope"]))
    splice(m, [make("Leak", ["a2"], ["odd"], name="leak", domain="my", slope=0.3)], "odd")


@odd()
def function_called_twice_with_clashing_names(m):
    import_domain(m, "my")
    m.functions.append(function("Twice", [make("Add", ["a", "a"], ["z3"]), make("Tanh", ["z3"], ["b"])]))
    splice(m, [make("Twice", ["a2"], ["p"], domain="my"), make("Twice", ["p"], ["odd"], domain="my")], "odd")


@odd()
def functions_that_have_names_of_standard_ops(m):
    import_domain(m, "my")
    m.functions.append(function("Gemm", [make("Tanh", ["a"], ["b"])]))
    m.functions.append(function("Transpose", [make("Neg", ["a"], ["b"])]))
    nodes = [make("Gemm", ["a2"], ["p"], domain="my"), make("Transpose", ["p"], ["odd"], domain="my")]
    splice(m, nodes, "odd")


# Sequences and optionals


@odd(once=["SequenceConstruct", "SequenceAt"])
def sequence_of_activations(m):
    constant(m, "one", np.int64(1))
    nodes = [
        make("SequenceConstruct", ["a0", "a1", "a2"], ["seq"], name="seq"),
        make("SequenceAt", ["seq", "one"], ["odd"], name="at"),
    ]
    splice(m, nodes, "odd")


@odd(once=["SplitToSequence"])
def split_to_sequence_and_back(m):
    nodes = [
        make("SplitToSequence", ["a2"], ["seq"], axis=1, name="split"),
        make("ConcatFromSequence", ["seq"], ["odd"], axis=1, name="join"),
    ]
    splice(m, nodes, "odd")
    m.graph.value_info.append(typed("odd", FULL))


@odd(once=["SequenceInsert"])
def sequence_that_grows_and_shrinks(m):
    constant(m, "nil", np.int64(0))
    nodes = [
        make("SequenceEmpty", [], ["q0"], name="q0"), make("SequenceInsert", ["q0", "a1"], ["q1"], name="q1"),
        make("SequenceInsert", ["q1", "a2"], ["q2"], name="q2"),
        make("SequenceErase", ["q2", "nil"], ["q3"], name="q3"),
        make("SequenceLength", ["q3"], ["n"], name="n"), make("SequenceAt", ["q3", "nil"], ["odd"], name="at"),
    ]  # fmt: skip
    splice(m, nodes, "odd")
    m.graph.value_info.append(typed("odd", FULL))
    output(m, "n", [], I64)


@odd(once=["SequenceConstruct"])
def sequence_as_an_output(m):
    splice(
        m,
        [make("SequenceConstruct", ["a0", "a1"], ["seq"], name="seq"), make("Neg", ["a2"], ["odd"], name="neg")],
        "odd",
    )
    m.graph.output.append(helper.make_tensor_sequence_value_info("seq", F, FULL))


@odd()
def optional_and_back(m):
    nodes = [
        make("Optional", ["a2"], ["maybe"], name="opt"),
        make("OptionalGetElement", ["maybe"], ["odd"], name="get"),
    ]
    splice(m, [*nodes, make("OptionalHasElement", ["maybe"], ["has"], name="has")], "odd")
    output(m, "has", [], BOOL)


# Element types


@odd()
def quantise_and_back(m):
    constant(m, "scale", np.float32(0.01))
    constant(m, "zero", np.uint8(128))
    nodes = [
        make("QuantizeLinear", ["a2", "scale", "zero"], ["q"], name="q"),
        make("DequantizeLinear", ["q", "scale", "zero"], ["odd"], name="dq"),
    ]
    splice(m, nodes, "odd")


@odd()
def integer_matmul(m):
    constant(m, "wq", np.arange(WIDTH * WIDTH, dtype=np.int8).reshape(WIDTH, WIDTH))
    nodes = [
        make("DynamicQuantizeLinear", ["a2"], ["q", "qs", "qz"], name="dql"),
        make("MatMulInteger", ["q", "wq", "qz"], ["qi"], name="mmi"),
        make("Cast", ["qi"], ["qf"], to=F, name="qf"), make("Mul", ["qf", "qs"], ["odd"], name="odd"),
    ]  # fmt: skip
    splice(m, nodes, "odd")


@odd()
def four_bit_weights(m):
    m.opset_import[0].version = 21
    m.graph.initializer.append(
        helper.make_tensor("four", TensorProto.INT4, [WIDTH, WIDTH], [i % 15 - 7 for i in range(WIDTH * WIDTH)])
    )
    constant(m, "scale", np.float32(0.1))
    splice(
        m,
        [
            make("DequantizeLinear", ["four", "scale"], ["wf"], name="dq"),
            make("MatMul", ["a2", "wf"], ["odd"], name="odd"),
        ],
        "odd",
    )


def through(m, dtype: int) -> None:
    splice(
        m,
        [make("Cast", ["a2"], ["narrow"], to=dtype, name="down"), make("Cast", ["narrow"], ["odd"], to=F, name="up")],
        "odd",
    )


@odd()
def float16_between(m):
    through(m, TensorProto.FLOAT16)


@odd()
def bfloat16_between(m):
    through(m, TensorProto.BFLOAT16)


@odd()
def float8_between(m):
    through(m, TensorProto.FLOAT8E4M3FN)


@odd()
def double_between(m):
    through(m, TensorProto.DOUBLE)


@odd()
def strings_alongside_the_step(m):
    m.graph.input.append(typed("name", [3], STRING))
    constant(m, "suffix", np.array(["!"], dtype=object))
    m.graph.node.append(make("StringConcat", ["name", "suffix"], ["loud"], name="loud"))
    output(m, "loud", [3], STRING)


@odd()
def masks_of_bool(m):
    nodes = [
        make("Greater", ["a2", "a1"], ["mask"], name="mask"), make("Not", ["mask"], ["unmask"], name="unmask"),
        make("Where", ["unmask", "a2", "a1"], ["odd"], name="odd"),
    ]  # fmt: skip
    splice(m, nodes, "odd")


@odd()
def sparse_initializer(m):
    values = helper.make_tensor("sw", F, [3], [1.0, 2.0, 3.0])
    indices = helper.make_tensor("si", I64, [3], [0, WIDTH + 1, 2 * WIDTH + 5])
    m.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [WIDTH, WIDTH]))
    splice(m, [make("MatMul", ["a2", "sw"], ["odd"], name="odd")], "odd")


# Shapes


@odd(dims={"batch": BATCH})
def dynamic_dim_bound(m):
    return mlp(layers=LAYERS, batch=BATCH, width=WIDTH, dims="batch")


@odd(dims={"batch": BATCH})
def dims_of_which_one_follows_from_another(m):
    model = mlp(layers=LAYERS, batch=BATCH, width=WIDTH, dims="batch")
    model.graph.value_info.append(typed("a2", ["derived_name", WIDTH]))
    return model


@odd()
def empty_tensors(m):
    m.graph.input.append(typed("none", [0, WIDTH]))
    splice(
        m,
        [
            make("Concat", ["a2", "none"], ["odd"], axis=0, name="odd"),
            make("Neg", ["none"], ["nothing"], name="nothing"),
        ],
        "odd",
    )
    output(m, "nothing", [0, WIDTH])


@odd()
def scalars_everywhere(m):
    nodes = [make("ReduceMax", ["a2"], ["top"], keepdims=0, name="top"), make("Sqrt", ["top"], ["root"], name="root")]
    splice(m, [*nodes, make("Div", ["a2", "root"], ["odd"], name="odd")], "odd")
    output(m, "root", [])


@odd()
def shapes_computed_in_the_graph(m):
    constant(m, "rev", np.array([1, 0]))
    nodes = [
        make("Shape", ["a2"], ["shape"], name="shape"), make("Gather", ["shape", "rev"], ["flipped"], name="flipped"),
        make("Reshape", ["a2", "flipped"], ["tall"], name="tall"),
        make("Reshape", ["tall", "shape"], ["odd"], name="odd"),
    ]  # fmt: skip
    splice(m, nodes, "odd")


@odd()
def nine_dimensions(m):
    constant(m, "many", np.array([2, 2, 2, 2, 2, 2, 2, 4, WIDTH]))
    constant(m, "flat", np.array(FULL))
    nodes = [make("Reshape", ["a2", "many"], ["deep"], name="deep"), make("Sin", ["deep"], ["sin"], name="sin")]
    splice(m, [*nodes, make("Reshape", ["sin", "flat"], ["odd"], name="odd")], "odd")


@odd()
def size_one_and_broadcasts(m):
    constant(m, "axis", np.array([1]))
    splice(
        m,
        [make("ReduceSum", ["a2", "axis"], ["col"], name="col"), make("Mul", ["a2", "col"], ["odd"], name="odd")],
        "odd",
    )


# Ends of the graph


@odd()
def one_value_in_two_slots(m):
    splice(
        m, [make("MatMul", ["a2", "w0"], ["p"], name="p"), make("Where", ["t1", "p", "p"], ["odd"], name="odd")], "odd"
    )
    m.graph.input.append(typed("t1", FULL, BOOL))


@odd("88%")
def outputs_that_others_read(m):
    for i in (1, 3):
        output(m, f"a{i}", FULL)


@odd()
def input_straight_to_output(m):
    output(m, "x", FULL)


@odd()
def initializer_straight_to_output(m):
    output(m, constant(m, "fixed", np.arange(5, dtype=np.float32)), [5])


@odd()
def constants_of_all_kinds(m):
    nodes = [
        make("Constant", [], ["k1"], value_float=0.5), make("Constant", [], ["k2"], value_ints=[BATCH, WIDTH]),
        make("Constant", [], ["k3"], value_floats=[1.0] * WIDTH),
        make("Constant", [], ["k4"], value=helper.make_tensor("v", F, [1], [2.0])),
        make("Constant", [], ["k5"], value_string=b"text"),
        make("Mul", ["a2", "k1"], ["o1"], name="o1"), make("Reshape", ["o1", "k2"], ["o2"], name="o2"),
        make("Mul", ["o2", "k3"], ["o3"], name="o3"), make("Mul", ["o3", "k4"], ["odd"], name="odd"),
    ]  # fmt: skip
    splice(m, nodes, "odd")


@odd()
def initializers_that_are_inputs(m):
    m.graph.input.append(typed("lr", []))
    constant(m, "w1", np.full((WIDTH, WIDTH), 0.01, np.float32))


@odd()
def absent_optional_inputs(m):
    constant(m, "most", np.float32(0.4))
    splice(m, [make("Clip", ["a2", "", "most"], ["odd"], name="clip")], "odd")


@odd()
def absent_outputs_before_present_ones(m):
    constant(m, "shape3", np.array([4, BATCH // 4, WIDTH]))
    constant(m, "gw", np.full((1, 3 * 8, WIDTH), 0.01, np.float32))
    constant(m, "gr", np.full((1, 3 * 8, 8), 0.01, np.float32))
    m.graph.node.append(make("Reshape", ["a2", "shape3"], ["steps"], name="steps"))
    m.graph.node.append(make("GRU", ["steps", "gw", "gr"], ["", "last"], name="gru", hidden_size=8))
    output(m, "last", [1, BATCH // 4, 8])


@odd()
def unused_inputs_and_initializers(m):
    m.graph.input.append(typed("idle", [7]))
    constant(m, "useless", np.ones(9, np.float32))


@odd()
def dead_nodes(m):
    splice(m, [make("Tanh", ["a2"], ["dead"], name="dead"), make("Neg", ["a2"], ["odd"], name="odd")], "odd")


# Ops that must run once


def dropouts(m, **seed) -> None:
    constant(m, "ratio", np.float32(0.5))
    constant(m, "train", np.bool_(True))
    nodes = [make("Dropout", ["a2", "ratio", "train"], ["odd", "mask"], name="drop", **seed)]
    splice(m, nodes, "odd")
    m.graph.node.append(make("Cast", ["mask"], ["maskf"], to=F, name="maskf"))
    m.graph.node.append(make("ReduceSum", ["maskf"], ["kept"], name="kept", keepdims=0))
    m.graph.node.append(make("Sign", ["odd"], ["sign"], name="sign"))
    m.graph.node.append(make("Mul", ["sign", "sign"], ["alive"], name="alive"))
    m.graph.node.append(make("Sub", ["alive", "maskf"], ["torn"], name="torn"))
    m.graph.node.append(make("ReduceL1", ["torn"], ["zero"], name="zero", keepdims=0))
    output(m, "kept", [])
    output(m, "zero", [])


@odd(once=["Dropout"])
def dropout_seeded(m):
    dropouts(m, seed=11)


@odd(repeatable=False, once=["Dropout"])
def dropout_unseeded(m):
    """Forward and backward still see one mask: `zero` counts where they differ."""
    dropouts(m)


@odd()
def dropout_that_does_not_train(m):
    constant(m, "ratio", np.float32(0.5))
    constant(m, "train", np.bool_(False))
    splice(m, [make("Dropout", ["a2", "ratio", "train"], ["odd"], name="drop")], "odd")


@odd("88%", repeatable=False, once=["RandomNormal", "RandomNormalLike", "RandomUniformLike"])
def noise_of_all_kinds(m):
    nodes = [
        make("RandomNormal", [], ["n1"], shape=FULL, name="n1"), make("RandomNormalLike", ["a2"], ["n2"], name="n2"),
        make("RandomUniformLike", ["a2"], ["n3"], name="n3"), make("Bernoulli", ["n3"], ["n4"], name="n4"),
        make("Sum", ["a2", "n1", "n2", "n4"], ["odd"], name="odd"),
    ]  # fmt: skip
    splice(m, nodes, "odd")


@odd()
def batch_norm_updates_its_statistics_once(m):
    for name in ("gamma", "beta", "mean", "var"):
        constant(m, name, np.linspace(0.5, 1.5, WIDTH, dtype=np.float32))
    node = make(
        "BatchNormalization",
        ["a2", "gamma", "beta", "mean", "var"],
        ["odd", "mean2", "var2"],
        training_mode=1,
        name="bn",
    )
    splice(m, [node], "odd")
    output(m, "mean2", [WIDTH])
    output(m, "var2", [WIDTH])


@odd()
def contrib_ops(m):
    import_domain(m, "com.microsoft")
    nodes = [
        make("FusedMatMul", ["a2", "w0"], ["fm"], domain="com.microsoft", transB=1, alpha=0.5, name="fm"),
        make("Gelu", ["fm"], ["odd"], domain="com.microsoft", name="gelu"),
    ]  # fmt: skip
    splice(m, nodes, "odd")


@odd(allow_recompute=("com.microsoft::Gelu",))
def contrib_ops_that_may_be_recomputed(m):
    import_domain(m, "com.microsoft")
    splice(m, [make("Gelu", ["a2"], ["odd"], domain="com.microsoft", name="gelu")], "odd")


# Whole steps


@odd()
def two_models_in_one(m):
    other = mlp(layers=4, batch=256, width=16)
    merged = onnx.compose.merge_graphs(m.graph, onnx.compose.add_prefix(other, "b_").graph, io_map=[])
    merged.node.append(make("Add", ["loss", "b_loss"], ["total"], name="total"))
    merged.output.append(typed("total", []))
    merged.output.remove(next(o for o in merged.output if o.name == "b_loss"))
    return helper.make_model(merged, opset_imports=m.opset_import, ir_version=10)


@odd()
def several_losses_summed(m):
    place = next(i for i, n in enumerate(m.graph.node) if n.name == "mean")
    m.graph.node[place].output[0] = "main"
    m.graph.node.insert(place + 1, make("Sum", ["main", "aux"], ["loss"], name="sum"))
    m.graph.node.insert(place + 1, make("ReduceL1", ["a2"], ["aux"], name="aux", keepdims=0))


@odd()
def gradients_accumulated(m):
    for i in range(LAYERS):
        m.graph.input.append(typed(f"acc{i}", [WIDTH, WIDTH]))
        m.graph.node.append(make("Add", [f"acc{i}", f"dw{i}"], [f"new.acc{i}"], name=f"acc{i}"))
        output(m, f"new.acc{i}", [WIDTH, WIDTH])


@odd()
def tied_weights(m):
    next(n for n in m.graph.node if n.name == "mm4").input[1] = "w0"


@odd()
def nodes_that_compute_the_same(m):
    splice(m, [make("Tanh", ["z2"], ["twin"], name="twin"), make("Add", ["a2", "twin"], ["odd"], name="odd")], "odd")


# Names and versions


@odd()
def nodes_without_names(m):
    for node in m.graph.node:
        node.name = ""


@odd()
def strange_names(m):
    splice(
        m,
        [
            make("Tanh", ["a2"], ["a b/c:0 = 'ü'\n#%s{}"], name='naïve "node"\\'),
            make("Neg", ["a b/c:0 = 'ü'\n#%s{}"], ["x" * 5000], name="long"),
        ],
        "x" * 5000,
    )


@odd()
def names_like_ours(m):
    splice(
        m,
        [
            make("Tanh", ["a2"], ["a1__remat1"], name="act1__remat1"),
            make("Neg", ["a1__remat1"], ["onnx_remat.no_axes"], name="n"),
        ],
        "onnx_remat.no_axes",
    )


@odd()
def standard_domain_written_out(m):
    for node in m.graph.node[:5]:
        node.domain = "ai.onnx"


@odd()
def old_opset_and_ir(m):
    return mlp(layers=LAYERS, batch=BATCH, width=WIDTH, opset=13)


@odd()
def ir_without_node_metadata(m):
    m.ir_version = 8


@odd()
def newest_opset(m):
    m.opset_import[0].version = 24


@odd()
def documents_and_annotations(m):
    m.doc_string, m.producer_name, m.domain = "doc", "someone", "my.models"
    m.graph.doc_string = "graph doc"
    m.metadata_props.add(key="author", value="me")
    m.graph.node[0].metadata_props.add(key="module", value="layer0")
    m.training_info.add()
    note = m.graph.quantization_annotation.add(tensor_name="a2")
    note.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="lr")


def collective() -> onnx.ModelProto:
    """Data parallel: every gradient is summed over ranks by an op that only some builds of the runtime have."""
    model = mlp(layers=LAYERS, batch=BATCH, width=WIDTH)
    import_domain(model, "com.microsoft")
    for i in range(LAYERS):
        place = next(j for j, n in enumerate(model.graph.node) if n.name == f"step{i}")
        model.graph.node[place].input[0] = f"all{i}"
        model.graph.node.insert(
            place, make("NcclAllReduce", [f"dw{i}"], [f"all{i}"], name=f"all{i}", domain="com.microsoft")
        )
        model.graph.value_info.append(typed(f"all{i}", [WIDTH, WIDTH]))
    return model


def test_collective_ops_are_planned_around_and_never_cloned():
    with pytest.raises(ModelError, match=r"NcclAllReduce.*verify='none'"):
        onnx_remat.rewrite_model(collective(), "70%", effort=0.3, run_by="session")
    result = onnx_remat.rewrite_model(collective(), "70%", effort=0.3, run_by="session", verify="none")
    assert "custom ops" in result.report.notes[0] and result.report.recomputed
    assert sum(n.op_type == "NcclAllReduce" for n in result.model.graph.node) == LAYERS
    assert check(result.model, run=False).kept


def odd_feeds(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    empty = onnx.ModelProto()
    empty.CopyFrom(model)
    none = [
        v
        for v in model.graph.input
        if any(d.HasField("dim_value") and d.dim_value == 0 for d in v.type.tensor_type.shape.dim)
    ]
    for value in none:
        empty.graph.input.remove(value)
    feeds = feeds_for(empty, batch=BATCH)
    feeds |= {v.name: np.zeros([d.dim_value for d in v.type.tensor_type.shape.dim], np.float32) for v in none}
    for value in model.graph.input:
        if value.type.tensor_type.elem_type == STRING:
            feeds[value.name] = np.array(["a", "bc", "d"], dtype=object)
    return feeds


def same(first: Sequence[object], second: Sequence[object]) -> bool:
    for a, b in zip(first, second, strict=True):
        if isinstance(a, list):
            if not same(a, b):
                return False
        elif a.dtype == object:
            if a.tolist() != b.tolist():
                return False
        elif not same_bits([a], [b]):
            return False
    return True


def close(first: Sequence[object], second: Sequence[object]) -> bool:
    return all(
        close(a, b)
        if isinstance(a, list)
        else a.dtype == object or np.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)
        for a, b in zip(first, second, strict=True)
    )


ODDEST = [
    "if_within_if", "loop_with_captures", "scan_with_captures", "contrib_ops_that_may_be_recomputed",
    "functions_within_functions", "function_called_twice_with_clashing_names", "sequence_that_grows_and_shrinks",
    "optional_and_back", "four_bit_weights", "bfloat16_between", "sparse_initializer", "dynamic_dim_bound",
    "empty_tensors", "initializers_that_are_inputs", "dropout_unseeded", "noise_of_all_kinds",
    "batch_norm_updates_its_statistics_once", "names_like_ours", "old_opset_and_ir",
]  # fmt: skip


@pytest.mark.parametrize("name", few(ODD, ODDEST))
def test_odd_graphs_are_rewritten(name):
    case = ODD[name]
    model = case.build()
    before = model.SerializeToString(deterministic=True)
    result = onnx_remat.rewrite_model(model, case.budget, effort=0.05, run_by="session", **case.options)
    assert model.SerializeToString(deterministic=True) == before
    assert max(result.report.peaks_by_level.values()) <= result.report.budget < result.report.before.total
    feeds = odd_feeds(model)
    rewritten = run_model(result.model, feeds)
    if case.repeatable:
        assert same(run_model(model, feeds), rewritten)
        assert close(run_model(model, feeds, "all"), run_model(result.model, feeds, "all"))
    names = [o.name for o in model.graph.output]
    if "zero" in names:
        assert rewritten[names.index("zero")] == 0 < rewritten[names.index("kept")]
    as_run, _ = expand(model, CPU.no_kernel)
    counts = [sum(n.op_type == kind for n in g.graph.node) for kind in case.once for g in (as_run, result.model)]
    assert counts[::2] == counts[1::2] and (not counts or min(counts) > 0)


def wide_body(kind: str) -> onnx.ModelProto:
    """A step whose peak is inside a body: it widens an activation 16 times, three values of that size at once."""
    batch, width = 8192, 32
    wide = [make("MatMul", ["h", "wide"], ["p"]), make("Tanh", ["p"], ["q"]), make("Mul", ["p", "q"], ["r"])]
    wide += [make("MatMul", ["r", "back"], ["next"])]
    full, model = [batch, width], mlp(layers=2, batch=batch, width=width)
    constant(model, "wide", np.full((width, 16 * width), 0.01, np.float32))
    constant(model, "back", np.full((16 * width, width), 0.01, np.float32))
    if kind == "If":
        model.graph.input.append(typed("c", [], BOOL))
        branch = body([make("Identity", ["a0"], ["h"]), *wide], [typed("next", full)])
        nodes = [make("If", ["c"], ["odd"], name="If", then_branch=branch, else_branch=branch)]
    elif kind == "Loop":
        constant(model, "trips", np.int64(3))
        nodes = [make("Loop", ["trips", "", "a0"], ["odd"], name="Loop")]
        inputs = [typed("i", [], I64), typed("go", [], BOOL), typed("h", full)]
        inner = body([make("Identity", ["go"], ["on"]), *wide], [typed("on", [], BOOL), typed("next", full)], inputs)
        nodes[0].attribute.append(helper.make_attribute("body", inner))
    else:
        constant(model, "shape", np.array([2, batch // 2, width]))
        constant(model, "full", np.array(full))
        half = [batch // 2, width]
        inner = body(wide, [typed("next", half)], [typed("h", half)])
        nodes = [
            make("Reshape", ["a0", "shape"], ["folded"], name="folded"),
            make("Scan", ["folded"], ["scanned"], name="Scan", body=inner, num_scan_inputs=1),
            make("Reshape", ["scanned", "full"], ["odd"], name="odd"),
        ]
    splice(model, nodes, "odd", layer=0)
    return model


@pytest.mark.parametrize("kind", few(["If", "Loop", "Scan"], ["If", "Scan"]))
def test_memory_within_bodies_is_counted(kind, tmp_path):
    model = wide_body(kind)
    onnx.save(model, tmp_path / "m.onnx")
    executed = as_executed(model, None, "disable", Preparation(CPU))
    timeline = executed.timeline
    assert executed.compiled.graph.ops[executed.order.order[timeline.peak_step]].label == kind
    assert timeline.peak == pytest.approx(processes.measure(tmp_path / "m.onnx", "disable").peak_bytes, rel=0.03)


@pytest.mark.parametrize(
    ("op", "why"), [("::Dropout", "draws new samples in every run"), ("::MatMul", "is a standard op")]
)
def test_ops_that_are_known_need_no_leave_to_run_again(op, why):
    with pytest.raises(UsageError, match=f"allow_recompute=: '{op}' {why}"):
        onnx_remat.rewrite_model(mlp(layers=2, batch=64, width=8, seed_dropout="1"), "90%", allow_recompute=op)
