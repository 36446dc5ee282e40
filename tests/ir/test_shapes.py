"""Types, shapes and bytes: every dtype, bound and unbound dimensions, computed shapes, and clear refusals."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnx_remat import Session, rewrite_model
from onnx_remat.errors import ModelError, ShapeError, UsageError
from onnx_remat.ir import graph, shapes
from onnx_remat.ir.dtypes import tensor_bytes
from onnx_remat.ir.metadata import SHAPES_KEY, TAG
from onnx_remat.ir.shapes import UNSEEN
from onnx_remat.memory.buffers import simulate
from onnx_remat.ort import runtime
from onnx_remat.ort.kernels.cpu import CPU
from onnx_remat.ort.prepare import Preparation, prepare
from onnx_remat.ort.shape_askers import SHAPE_ASKERS
from tests.support.graphs import mlp, model_of
from tests.support.slow import few

make = helper.make_node
INT64 = TensorProto.INT64


def inferred(model, **dims):
    return shapes.infer(graph.build(model), dims)


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("FLOAT", (2, 3), 24),
        ("DOUBLE", (2, 3), 48),
        ("FLOAT16", (5,), 10),
        ("BFLOAT16", (5,), 10),
        ("FLOAT8E4M3FN", (5,), 5),
        ("FLOAT8E5M2", (5,), 5),
        ("BOOL", (9,), 9),
        ("INT8", (3,), 3),
        ("UINT8", (3,), 3),
        ("INT16", (3,), 6),
        ("INT32", (3,), 12),
        ("INT64", (3,), 24),
        ("COMPLEX64", (3,), 24),
        ("COMPLEX128", (3,), 48),
        ("INT4", (4,), 2),
        ("UINT4", (5,), 3),
        ("FLOAT4E2M1", (7,), 4),
        ("STRING", (3,), 96),
        ("FLOAT", (), 4),
        ("FLOAT", (0, 7), 0),
        ("FLOAT", (1 << 20, 1 << 20), 1 << 42),
    ],
)
def test_bytes_by_dtype(dtype, shape, nbytes):
    assert tensor_bytes(TensorProto.DataType.Value(dtype), shape) == nbytes


@pytest.mark.parametrize("dtype", ["INT4", "UINT4", "BFLOAT16", "BOOL", "STRING", "FLOAT8E4M3FN"])
def test_inputs_of_unusual_types_are_sized(dtype):
    number = TensorProto.DataType.Value(dtype)
    nodes = [make("Identity", ["q"], ["y"], name="same")]
    model = model_of(nodes, {"q": (number, [3, 5])}, {"y": (number, [3, 5])}, opset=23)
    found = inferred(model)
    assert found["q"].nbytes == found["y"].nbytes == tensor_bytes(number, (3, 5))
    assert (found["y"].dtype, found["y"].shape) == (number, (3, 5))


def test_symbols_are_bound_and_followed():
    model = mlp(layers=2, width=64, dims="batch")
    found = inferred(model, batch=32)
    assert found["x"].shape == found["a1"].shape == (32, 64)
    assert found["T1"].shape == (64, 32)
    assert found["a1"].nbytes == 32 * 64 * 4
    assert found["a1"].symbolic == ("batch", 64)  # what the runtime will know from the file
    assert found["dw1"].symbolic == (64, 64)
    assert inferred(model, batch=1)["gz0"].nbytes == 256


def test_all_unbound_symbols_are_named_at_once():
    nodes = [make("MatMul", ["x", "w"], ["y"])]
    model = model_of(nodes, {"x": ["batch", "length", 8], "w": [8, "out"]}, {"y": ["batch", "length", "out"]})
    with pytest.raises(ShapeError) as caught:
        inferred(model)
    assert "batch, length, out" in str(caught.value)
    assert "pass dims={'batch': SIZE, 'length': SIZE, 'out': SIZE}" in str(caught.value)
    with pytest.raises(ShapeError, match=r"not bound: length; pass dims=\{'length': SIZE\}"):
        inferred(model, batch=2, out=3)
    assert inferred(model, batch=2, length=5, out=3)["y"].shape == (2, 5, 3)


def test_dims_the_model_does_not_have_are_refused():
    with pytest.raises(UsageError, match="no symbolic dimension 'seq': it has batch"):
        inferred(mlp(layers=1, dims="batch"), batch=3, seq=4)
    with pytest.raises(UsageError, match="all sizes of the model are fixed"):
        inferred(mlp(layers=1), batch=3)


def test_derived_symbols_of_intermediate_values_need_no_binding():
    """A tool wrote ``2*batch`` as the dimension's name: its size follows from the inputs."""
    info = [helper.make_tensor_value_info("c", TensorProto.FLOAT, ["2*batch", 8])]
    model = model_of(
        [make("Concat", ["x", "x"], ["c"], axis=0), make("Tanh", ["c"], ["y"])],
        {"x": ["batch", 8]}, {"y": ["rows", 8]}, value_info=info,
    )  # fmt: skip
    assert inferred(model, batch=3)["c"].shape == inferred(model, batch=3)["y"].shape == (6, 8)


def test_a_size_of_zero_is_a_size():
    assert inferred(mlp(layers=1, dims="batch"), batch=0)["a0"].nbytes == 0


def test_shapes_written_by_an_earlier_rewrite_are_understood():
    """`onnx_remat.p3.0=64` says 64, `=batch` says whatever batch is bound to; hiding Unsqueezes change nothing."""
    nodes = [
        make("Size", ["x"], ["size"], name="size"),
        make("Mul", ["size", "no_axes"], [UNSEEN], name="unseen"),
        make("Unsqueeze", ["x", UNSEEN], ["x__private"], name="hide"),
        make("Exp", ["x__private"], ["h"], name="exp"),
        make("Neg", ["h"], ["y"], name="neg"),
    ]
    info = [helper.make_tensor_value_info("h", TensorProto.FLOAT, [f"{TAG}p3.0=64", f"{TAG}p3.1=batch"])]
    model = model_of(
        nodes, {"x": [64, "batch"]}, {"y": [64, "batch"]},
        {"no_axes": np.zeros(0, np.int64)}, info,
    )  # fmt: skip
    found = inferred(model, batch=7)
    assert found["x__private"].shape == found["h"].shape == found["y"].shape == (64, 7)
    assert found["h"].symbolic == (f"{TAG}p3.0=64", f"{TAG}p3.1=batch")
    assert found["x__private"].symbolic is None  # the runtime cannot tell its rank
    with pytest.raises(ShapeError, match=r"not bound: batch; pass dims=\{'batch': SIZE\}$"):
        inferred(model)


def test_shapes_that_an_earlier_rewrite_left_open_are_in_the_metadata():
    """Of an op without shape inference, too; sizes may be symbolic."""
    nodes = [
        onnx.helper.make_node("Twice", ["x"], ["h"], name="twice", domain="my.ops"),
        make("Neg", ["h"], ["y"], name="neg"),
    ]
    model = model_of(nodes, {"x": [64, "batch"]}, {"y": [64, "batch"]}, {})
    model.opset_import.add(domain="my.ops", version=1)
    notes = model.metadata_props.add(key=SHAPES_KEY, value='{"h": [1, 64, "batch"]}')
    assert inferred(model, batch=7)["h"].shape == (64, 7)
    assert inferred(model, batch=7)["h"].symbolic is None  # the runtime does not read it
    for damaged in ("{", "[1]", '{"h": 3}', '{"h": []}', '{"h": ["float", 64]}'):
        notes.value = damaged
        with pytest.raises(ModelError, match=f"metadata '{SHAPES_KEY}' is damaged: rewrite the original again"):
            inferred(model, batch=7)


def test_shapes_computed_by_the_graph_are_followed():
    """Shape -> Gather -> Unsqueeze -> Concat -> Reshape, as exporters flatten a batch."""
    nodes = [
        make("Shape", ["x"], ["s"], name="shape"),
        make("Gather", ["s", "first"], ["b"], name="gather", axis=0),
        make("Unsqueeze", ["b", "axis"], ["b1"], name="unsqueeze"),
        make("Concat", ["b1", "rest"], ["target"], name="concat", axis=0),
        make("Reshape", ["x", "target"], ["flat"], name="reshape"),
        make("Tanh", ["flat"], ["y"], name="tanh"),
    ]
    constants = {"first": np.int64(0), "axis": np.array([0]), "rest": np.array([-1])}
    model = model_of(nodes, {"x": ["batch", 3, 5]}, {"y": ["batch", "flat"]}, constants)
    found = inferred(model, batch=4)
    assert found["flat"].shape == found["y"].shape == (4, 15)
    assert found["target"].shape == (2,) and found["b"].shape == ()
    assert found["y"].nbytes == 4 * 15 * 4


def test_shapes_computed_with_arithmetic_are_followed():
    nodes = [
        make("Shape", ["x"], ["s"], name="shape"),
        make("Slice", ["s", "start", "stop"], ["b"], name="slice"),
        make("Mul", ["b", "three"], ["n"], name="mul"),
        make("ConstantOfShape", ["n"], ["zeros"], name="zeros"),
        make("Expand", ["one", "n"], ["y"], name="expand"),
    ]
    constants = {
        "start": np.array([0]), "stop": np.array([1]), "three": np.array([3]), "one": np.ones(1, np.float32),
    }  # fmt: skip
    model = model_of(nodes, {"x": ["batch", 2]}, {"y": ["n"], "zeros": ["n"]}, constants)
    found = inferred(model, batch=4)
    assert found["y"].shape == found["zeros"].shape == (12,)


def test_scalar_arithmetic_and_reshaped_sizes_are_followed_without_a_runtime(monkeypatch):
    """As PyTorch's exporter flattens heads and batch, chains of it: the second size is of a value made by the first."""
    monkeypatch.setattr(runtime, "available", lambda: False)
    nodes = [
        make("Shape", ["x"], ["s"], name="shape", start=0, end=1),
        make("Squeeze", ["s"], ["b"], name="squeeze"),
        make("Mul", ["b", "three"], ["n"], name="mul"),
        make("Reshape", ["n", "flat"], ["n1"], name="reshape_n"),
        make("Concat", ["n1", "five"], ["target"], name="concat", axis=0),
        make("Reshape", ["x", "target"], ["heads"], name="reshape"),
        make("Size", ["heads"], ["all"], name="size"),
        make("Cast", ["all"], ["many"], name="cast", to=INT64),
        make("Reshape", ["many", "flat"], ["many1"], name="reshape_many"),
        make("Expand", ["one", "many1"], ["y"], name="expand"),
    ]
    constants = {
        "three": np.int64(3), "flat": np.array([-1]), "five": np.array([5]), "one": np.ones(1, np.float32),
    }  # fmt: skip
    model = model_of(nodes, {"x": ["batch", 15]}, {"heads": ["n", 5], "y": ["n"]}, constants)
    found = inferred(model, batch=4)
    assert found["heads"].shape == (12, 5)
    assert found["y"].shape == (60,)


def test_initializers_that_can_be_fed_are_no_sizes(monkeypatch):
    monkeypatch.setattr(runtime, "available", lambda: False)
    nodes = [make("Neg", ["n"], ["m"], name="neg"), make("ConstantOfShape", ["m"], ["y"], name="fill")]
    model = model_of(nodes, {"x": [2]}, {"y": ["k"]}, {"n": np.array([-3])})
    assert inferred(model)["y"].shape == (3,)
    model.graph.input.append(helper.make_tensor_value_info("n", INT64, [1]))
    with pytest.raises(ShapeError, match="'y'"):
        inferred(model)


def test_sequences_count_with_what_goes_into_them():
    nodes = [
        make("SequenceEmpty", [], ["none"]), make("SequenceInsert", ["none", "x"], ["one"]),
        make("SequenceConstruct", ["x", "x"], ["two"]), make("SequenceInsert", ["two", "x", "at"], ["three"]),
        make("SplitToSequence", ["x"], ["rows"], axis=0), make("SequenceLength", ["three"], ["y"]),
    ]  # fmt: skip
    tensors = inferred(model_of(nodes, {"x": [4, 4]}, {"y": (TensorProto.INT64, [])}, {"at": np.int64(0)}))
    assert [tensors[n].nbytes for n in ("none", "one", "two", "three", "rows")] == [0, 64, 128, 192, 64]
    assert tensors["two"].symbolic is None


def test_sequences_of_unknown_length_are_refused_by_value():
    model = model_of([make("SequenceLength", ["s"], ["y"])], {}, {"y": (TensorProto.INT64, [])})
    model.graph.input.append(helper.make_tensor_sequence_value_info("s", TensorProto.FLOAT, [4]))
    with pytest.raises(ShapeError, match="value 's', a graph input, is a sequence, whose size is not known"):
        inferred(model)


def test_a_body_that_reads_a_sequence_is_refused_by_node():
    inner = make("SequenceAt", ["s", "at"], ["z"])
    body = helper.make_graph([inner], "body", [], [helper.make_tensor_value_info("z", TensorProto.FLOAT, [4])])
    nodes = [
        make("SequenceConstruct", ["x", "x"], ["s"]),
        make("If", ["c"], ["y"], "choose", then_branch=body, else_branch=body),
    ]
    model = model_of(nodes, {"x": [4], "c": (TensorProto.BOOL, [])}, {"y": [4]}, {"at": np.int64(0)})
    with pytest.raises(ModelError, match=r"node 'choose' \(If\).*its body reads the sequence 's': read its elements"):
        prepare(model, Preparation(CPU))


def test_sizes_that_depend_on_data_are_refused_by_value_and_node():
    nodes = [make("NonZero", ["x"], ["where"], name="find"), make("Neg", ["where"], ["y"], name="neg")]
    with pytest.raises(ShapeError, match=r"value 'where', made by node 'find' \(NonZero\), cannot be inferred"):
        inferred(model_of(nodes, {"x": [4]}, {"y": (INT64, [1, "n"])}))


def test_value_info_helps_where_inference_does_not():
    node = make("Mystery", ["x"], ["h"], domain="custom", name="mystery")
    info = [helper.make_tensor_value_info("h", TensorProto.FLOAT, [4, 6])]
    for known in (True, False):
        model = model_of([node, make("Tanh", ["h"], ["y"])], {"x": [4]}, {"y": ["a", "b"]}, (), info if known else ())
        model.opset_import.append(helper.make_opsetid("custom", 1))
        if known:
            assert inferred(model)["y"].shape == (4, 6)
        else:
            with pytest.raises(ShapeError, match=r"'mystery' \(Mystery\), cannot be inferred"):
                inferred(model)


def test_contradictions_are_the_models_fault():
    model = mlp(layers=1, batch=8, width=4)
    model.graph.input[2].type.tensor_type.shape.dim[0].dim_value = 5
    with pytest.raises(ModelError, match="shape inference"):
        inferred(model)


def test_large_weights_are_typed_not_read():
    weight = numpy_helper.from_array(np.zeros((64, 64), np.float32), "w")
    weight.raw_data = b""
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="nowhere.bin")
    model = model_of([make("MatMul", ["x", "w"], ["y"])], {"x": [2, 64]}, {"y": [2, 64]})
    model.graph.initializer.append(weight)
    assert inferred(model)["w"].nbytes == 64 * 64 * 4


def test_declared_adds_what_follows_from_the_file_alone():
    model = mlp(layers=2, dims="batch")
    made = shapes.declared(model)
    known = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in made.graph.value_info}
    assert known["a0"] == ["batch", 64] and known["dw0"] == [64, 64]
    assert not model.graph.value_info
    onnx.checker.check_model(made, full_check=True)


def test_onnxruntime_infers_its_own_ops_from_sizes_that_only_arithmetic_knows() -> None:
    pytest.importorskip("onnxruntime")
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        g (float[batch, 4, 8] x, float[8, 5] w) => (z)
        <int64[3] ones = {1, 1, 1}> {
            dims = Shape (x)
            same = Div (dims, ones)
            y = Reshape (x, same)
            fused = com.microsoft.FusedMatMul (y, w)
            z = Relu (fused)
        }""")
    sizes = shapes.infer(graph.build(model), {"batch": 3}, askers=SHAPE_ASKERS)
    assert sizes["fused"].shape == (3, 4, 5)


@pytest.mark.parametrize(("opset", "dtype"), [(7, TensorProto.FLOAT), (9, TensorProto.FLOAT), (10, TensorProto.BOOL)])
def test_masks_of_old_dropouts(opset, dtype):
    """ONNX says of what type they are, but its inference does not; the runtime's own arrays do."""
    text = f"""<ir_version: 7, opset_import: ["" : {opset}]>
        g (float[8, 4] x) => (float[8, 4] y, {"float" if dtype == TensorProto.FLOAT else "bool"}[8, 4] mask) {{
            d, mask = Dropout <ratio = 0.5> (x)  y = Tanh(d)
        }}"""
    model = onnx.parser.parse_model(text)
    del model.graph.output[1]
    mask = inferred(model)["mask"]
    assert (mask.dtype, mask.shape) == (dtype, (8, 4))
    whole = runtime.outputs(onnx.parser.parse_model(text), {"x": np.ones((8, 4), np.float32)})
    assert onnx.helper.np_dtype_to_tensor_dtype(whole["mask"].dtype) == dtype
    made = rewrite_model(model, "100%", run_by="session", effort=0.2).model
    assert (runtime.outputs(made, {"x": np.ones((8, 4), np.float32)})["y"] == whole["y"]).all()
    with Session(model) as session:
        made_here = session.run({"x": np.ones((8, 4), np.float32)})["y"]
        np.testing.assert_allclose(made_here, whole["y"], rtol=1e-6)  # its Tanh is a kernel of ours


def test_advice_is_not_what_is_there_already():
    """Nobody is advised to install what is installed, or to bind what is not symbolic."""
    unknown = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20, "com.example" : 1]> g (float[2] x) => (y) { y = com.example.Op(x) }'
    )
    with pytest.raises(ShapeError) as caught:
        inferred(unknown)
    assert "install" not in str(caught.value) and "dims" not in str(caught.value)


def test_what_an_elementwise_op_reads_has_the_shape_that_is_stated_for_its_result():
    """Axes are fed, so that no inference forwards tells what is left; of a broadcast operand nothing is stated."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        g (float[3, 2, 5] x, int64[1] axes) => (float[3, 2, 1] y) <float one = {1}> {
            s = ReduceSum(x, axes)  l = Log(s)  a = Add(one, l)  y = CastLike(a, x)
        }""")
    assert [inferred(model)[name].shape for name in ("s", "l", "a")] == [(3, 2, 1)] * 3
    model.graph.node[2].input[0] = "x"
    with pytest.raises(ShapeError, match="'s'"):
        inferred(model)


def test_what_follows_from_shapes_that_onnxruntime_alone_knows():
    """It may mean by a scalar's shape that it has no idea: that is seen from the nodes in between."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        g (float[4, 8] x, float[8, 5] w) => (bool y) <float zero = {0}> {
            fused = com.microsoft.FusedMatMul (x, w)
            mean = ReduceMean <keepdims = 0> (fused)
            y = Greater (mean, zero)
        }""")
    assert shapes.infer(graph.build(model), askers=SHAPE_ASKERS)["mean"].shape == ()


_STATED = """<ir_version: 10, opset_import: ["" : 20]>
g (float[2, 6] x, bool yes) => (float[3, 4] y, float[2, 6] z)
<float[2, 6] a, float[2, 6] b, float[2, 6] c, float[2, 6] d, float[2, 6] e>
{
    a = Exp (x)  b = Neg (a)  c = Neg (b)  d = Neg (c)  e = Neg (d)
    sizes = Constant <value = int64[2] {3, 4}> ()
    r = Reshape (c, sizes)
    y = Neg (r)
    t = Transpose <perm = [1, 0]> (e)
    z = If (yes) <
        then_branch = yes () => (float[2, 6] in) { in = Neg (d) },
        else_branch = no () => (float[2, 6] out) { out = Neg (c) }>
}"""


def asked(monkeypatch):
    """Return a list that gets the op types of each model that is given to ONNX's inference."""
    models, infer_types = [], shapes.native.infer_types

    def noting(model, *more, **options):
        models.append([node.op_type for node in model.graph.node])
        return infer_types(model, *more, **options)

    monkeypatch.setattr(shapes.native, "infer_types", noting)
    return models


def test_of_a_made_graph_only_what_it_does_not_state_is_inferred(monkeypatch):
    models, ir = asked(monkeypatch), graph.build(onnx.parser.parse_model(_STATED))
    found = shapes.infer(ir, derived=True)
    assert {tuple(model) for model in models} == {("Constant", "Reshape", "Transpose")}
    assert found == shapes.infer(ir)
    assert (found["r"].shape, found["t"].symbolic) == ((3, 4), (6, 2))


@pytest.mark.parametrize("name", few(["chain", "attention_stack"], ["chain"]))
def test_rewritten_files_have_the_shapes_of_a_whole_inference(name):
    written = rewrite_model(f"sample_models/{name}.onnx", "60%", run_by="session", effort=0.1).model
    ir = graph.build(written)

    def facts(found):
        dims = {n: t.symbolic or (None,) for n, t in found.items()}
        return {n: (t.dtype, t.shape, t.nbytes) for n, t in found.items()}, dims

    assert facts(shapes.infer(ir, derived=True)) == facts(shapes.infer(ir))


def test_an_input_with_a_size_that_nobody_can_give_is_refused_with_what_to_do():
    """No `dims` can name it."""
    model = model_of([helper.make_node("Neg", ["x"], ["y"])], {"x": [None, 4]}, {"y": None})
    with pytest.raises(ShapeError, match="a size of input 'x' is open and has no name: give it one in the model"):
        shapes.infer(graph.build(model))


def test_a_graph_that_inference_sees_through_is_inferred_once(monkeypatch):
    models = asked(monkeypatch)
    compiled = prepare(mlp(), Preparation(CPU))
    assert compiled.tensors == shapes.infer(compiled.graph)
    del models[:]
    prepare(mlp(), Preparation(CPU))
    assert not models  # besides the check of what the file states


def test_sizes_that_no_runtime_follows_stay_unknown_to_it():
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 20]>
        g (float[2, 6] x) => (y) {
            s = Shape (x)  one = Constant <value = int64[1] {1}> ()  n = Gather (s, one)
            all = Constant <value = int64[1] {-1}> ()  to = Concat <axis = 0> (n, all)  y = Reshape (x, to)
        }""")
    tensor = prepare(model, Preparation(CPU)).tensors["y"]
    assert tensor.shape == (6, 2)
    assert not all(isinstance(size, int) for size in tensor.symbolic)


def test_sizes_that_the_file_does_not_name_have_no_name():
    """ONNX Runtime gives unknown sizes no name, so that it overwrites no value of such a shape."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        g (float[b, 300] x) => (float loss) <int64[2] to = {-1, 600}> {
            y = Reshape (x, to)  t = Tanh (y)  u = Tanh (t)  loss = ReduceSum <keepdims = 0> (u)
        }""")
    compiled = prepare(model, Preparation(CPU, {"b": 100}))
    assert compiled.tensors["t"].symbolic == compiled.tensors["u"].symbolic == (None, 600)
    assert shapes.all_dims(compiled.tensors, {"b": 100}) == {"b": 100}
    values = {value.name: value.type.tensor_type.shape.dim for value in shapes.declared(model).graph.value_info}
    assert [(dim.dim_param, dim.dim_value) for dim in values["t"]] == [("", 0), ("", 600)]
    assert simulate(compiled.problem, compiled.default_order()).peak >= 3 * 100 * 300 * 4  # x, and two of y, t and u
