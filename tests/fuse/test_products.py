"""Matrix products by OpenBLAS: right to rounding in every form, the same bits in every place, their memory known."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_remat import Session
from onnx_remat.fuse import blas, machine_code, products
from onnx_remat.fuse.products import LEAST_BLOCK, LEAST_WORK, MOST_ROWS, Product
from onnx_remat.ir.shapes import Tensor
from tests.support.graphs import run_model
from tests.support.slow import few

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.skipif(
    bool(machine_code.why_not() or blas.why_not()), reason="no product faster than ONNX Runtime's here"
)


def model_of(node, inputs, output):
    shapes = dict(zip(node.input, inputs, strict=True))
    graph = helper.make_graph(
        [node, helper.make_node("Neg", ["y"], ["z"])],
        "product",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, output) for name in ("y", "z")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def gemm(rows, columns, terms, left, right, bias):
    inputs = [[terms, rows] if left else [rows, terms], [columns, terms] if right else [terms, columns]]
    inputs += [[columns]] if bias else []
    node = helper.make_node("Gemm", ["a", "b", "c"][: len(inputs)], ["y"], transA=left, transB=right)
    return model_of(node, inputs, [rows, columns])


def feeds_of(model, seed=0):
    generator = np.random.default_rng(seed)
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    return {name: generator.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def assert_near(model, feeds, by_products=True):
    with Session(model) as session:
        assert session.kernel_count == by_products
        found = session.run(feeds)
    exact = run_model(model, feeds, "disable")
    terms = feeds["b"].size // exact[0].shape[-1]
    for value, expected in zip(found.values(), exact, strict=True):
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-6 * terms)


def tensor(*shape, dtype=TensorProto.FLOAT):
    return Tensor(dtype, shape, 4 * int(np.prod(shape)), False)


SIZES = [
    (1024, 512, 256), (MOST_ROWS + 1, 600, 257), (257, 4101, 129), (LEAST_BLOCK, 8192, 257), (16, 140_000, 64),
    (140_001, 16, 64), (64, 64, 32_771),
]  # fmt: skip


FORMS = list(itertools.product((0, 1), repeat=3))
A_FEW = [(size, FORMS[-1]) for size in SIZES[:4]] + [(SIZES[0], form) for form in FORMS[1:3]]


@pytest.mark.parametrize("case", few(itertools.product(SIZES, FORMS), A_FEW))
def test_every_form_and_odd_sizes(case):
    sizes, (left, right, bias) = case
    model = gemm(*sizes, left, right, bias)
    assert_near(model, feeds_of(model))


def test_a_product_with_several_outer_axes():
    model = model_of(helper.make_node("MatMul", ["a", "b"], ["y"]), [[4, 8, 64, 128], [128, 512]], [4, 8, 64, 512])
    assert_near(model, feeds_of(model))


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, np.float32(1e-42), np.float32(3e38)])
def test_special_values(special):
    model = gemm(1024, 512, 256, 0, 1, 1)
    feeds = feeds_of(model)
    feeds["a"][3, 5] = feeds["b"][7, 9] = feeds["c"][11] = special
    with Session(model) as session, np.errstate(all="ignore"):
        found = session.run(feeds)["y"]
        exact = feeds["a"].astype(np.float64) @ feeds["b"].T + feeds["c"]
    infinite = np.abs(exact) > np.finfo(np.float32).max
    assert np.array_equal(np.isnan(found), np.isnan(exact))
    assert np.array_equal(np.isinf(found), infinite)
    usual = np.isfinite(found)
    np.testing.assert_allclose(found[usual], exact[usual], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("Gemm", ["a", "b"], ["y"], alpha=0.5),
        helper.make_node("Gemm", ["a", "b", "c"], ["y"], beta=2.0),
        helper.make_node("Gemm", ["a", "b", "whole"], ["y"]),
        helper.make_node("MatMul", ["small", "b"], ["y"]),
        helper.make_node("MatMul", ["a", "stack"], ["y"]),
        helper.make_node("MatMul", ["double", "double"], ["y"]),
        helper.make_node("MatMul", ["of_many_axes", "b"], ["large"]),
        helper.make_node("Mul", ["a", "a"], ["y"]),
    ],
    ids=lambda node: f"{node.op_type}-{'-'.join(node.input)}",
)
def test_products_that_are_left_to_onnx_runtime(node):
    shapes = {"a": (1024, 512), "b": (512, 512), "c": (512,), "whole": (1024, 512), "small": (8, 512),
              "stack": (4, 512, 512), "y": (1024, 512)}  # fmt: skip
    tensors = {name: tensor(*shape) for name, shape in shapes.items()}
    tensors |= {name: tensor(*[1] * 15, *shapes["a"]) for name in ("of_many_axes", "large")}
    tensors["double"] = tensor(1024, 1024, dtype=TensorProto.DOUBLE)
    assert products.product_of(node, tensors) is None


def test_the_bits_do_not_depend_on_place_and_neighbours():
    """A recomputed product has the bits of the first one."""
    nodes = [
        helper.make_node("MatMul", ["a", "b"], ["p"]),
        helper.make_node("Mul", ["p", "p"], ["odd"]),
        helper.make_node("MatMul", ["a", "b"], ["q"]),
        helper.make_node("Sub", ["p", "q"], ["y"]),
    ]
    infos = {"a": [1027, 450], "b": [450, 301]}
    graph = helper.make_graph(
        nodes, "twice",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in infos.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1027, 301]) for name in ("y", "odd")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    with Session(model, level="basic") as session:
        assert not session.run(feeds_of(model))["y"].any()


def test_a_product_is_not_written_over_what_it_reads_as_a_view():
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 2, 0]),
        helper.make_node("Reshape", ["t", "shape"], ["a"]),
        helper.make_node("Gemm", ["a", "b"], ["y"]),
        helper.make_node("CumSum", ["y", "first"], ["z"]),
    ]
    formals = {"x": [384, 32, 32], "b": [384, 384]}
    graph = helper.make_graph(
        nodes, "view",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in formals.items()],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, [1024, 384])],
        [helper.make_tensor("shape", TensorProto.INT64, [2], [1024, 384]),
         helper.make_tensor("first", TensorProto.INT64, [], [0])],
    )  # fmt: skip
    assert_near(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), feeds_of_view())


def feeds_of_view():
    generator = np.random.default_rng(0)
    x, b = generator.standard_normal((384, 32, 32), np.float32), generator.standard_normal((384, 384), np.float32)
    return {"x": x, "b": b / 384}


def test_level_disable_and_unfused_have_onnx_runtimes_bits():
    model = gemm(1024, 512, 256, 0, 0, 0)
    feeds = feeds_of(model)
    for settings in ({"level": "disable"}, {"fuse": False}):
        with Session(model, **settings) as session:
            assert session.kernel_count == 0
            assert np.array_equal(session.run(feeds)["y"], run_model(model, feeds, settings.get("level", "all"))[0])


def test_small_products_stay_with_onnx_runtime():
    tensors = {name: tensor(512, 511) for name in "ay"} | {"b": tensor(511, 511)}
    assert LEAST_WORK > 512 * 511 * 511
    assert products.product_of(helper.make_node("MatMul", ["a", "b"], ["y"]), tensors) is None


SCRATCH = """
import ctypes, json, sys
import numpy as np
from onnx_remat import Session
from onnx_remat.fuse import blas
from onnx_remat.measure.probe import reset_peak, resident
import onnx
blas.address()
model = onnx.load(sys.argv[1])
session = Session(model)
shapes = {a.name: a.shape for a in session.inputs}
feeds = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
session._memory.slab[:] = 1
before = reset_peak() - resident("RssFile")
for _ in range(5):
    session.execute(feeds)
print(json.dumps([resident("VmHWM") - resident("RssFile") - before, session.workspace_bytes]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are measured on Linux")
@pytest.mark.parametrize("sizes", few([(4096, 1024, 1024), (256, 4096, 2048), (8192, 256, 256)], [(256, 4096, 2048)]))
def test_scratch_memory_is_what_was_predicted(sizes, tmp_path):
    onnx.save(gemm(*sizes, 0, 1, 0), tmp_path / "product.onnx")
    done = subprocess.run(
        [sys.executable, "-c", SCRATCH, str(tmp_path / "product.onnx")], capture_output=True, text=True, check=True,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    taken, predicted = json.loads(done.stdout)
    assert taken <= predicted + 300_000  # stacks of threads


def test_blocks_cover_the_result_once():
    for rows, columns in itertools.product((16, 63, 64, 129, 1024, 5000), repeat=2):
        kernel = products.kernel_of(Product(rows, columns, 64, False, False, False, (rows, columns)))
        *_, step, grain = kernel.sizes
        blocks = -(-kernel.size // kernel.grain)
        assert kernel.grain == grain
        assert blocks == -(-(rows if rows >= columns else columns) // step)
        assert blocks >= min(os.cpu_count() or 1, max(rows, columns) // LEAST_BLOCK)


def test_numpys_own_threads_are_left_alone():
    source = """
import ctypes, json, numpy as np
from pathlib import Path
name = next((Path(np.__file__).parents[1] / "numpy.libs").glob("libscipy_openblas64_*.so"))
own = ctypes.CDLL(str(name)).scipy_openblas_get_num_threads64_
before = own()
from onnx_remat.fuse import blas
blas.address()
print(json.dumps([before, own()]))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    before, after = json.loads(done.stdout)
    assert before == after


def test_more_threads_than_the_library_serves_leave_products_to_onnx_runtime(monkeypatch):
    blas.why_not.cache_clear()
    monkeypatch.setattr(os, "cpu_count", lambda: blas.MOST_THREADS + 1)
    assert "at most 64 threads" in blas.why_not()
    blas.why_not.cache_clear()


def test_a_missing_library_leaves_products_to_onnx_runtime(monkeypatch):
    blas.why_not.cache_clear()
    monkeypatch.setattr(blas, "_installed", lambda: None)
    try:
        assert "numpy's OpenBLAS" in blas.why_not()
    finally:
        monkeypatch.undo()
        blas.why_not.cache_clear()
    assert not blas.why_not()
