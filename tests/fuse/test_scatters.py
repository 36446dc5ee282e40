"""Sums of rows into a matrix: found in the form that the converters write, with ScatterElements' bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from onnx_remat.fuse import scatters
from tests.fuse.test_groups import build, node
from tests.support.fusing import assert_same_bits, ordered_step, run, session, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")

L = TensorProto.INT64


def step(rows: int, columns: int, added: int, **attributes):
    attributes = {"axis": 0, "reduction": "add"} | attributes
    nodes = [node("Reshape", ["index", "tall"], "i"), node("Expand", ["i", "shape"], "wide"),
             node("ScatterElements", ["x", "wide", "more"], "y", **attributes)]  # fmt: skip
    weights = {"tall": np.array([added, 1]), "shape": np.array([added, columns])}
    inputs = {"x": (rows, columns), "index": (L, (added,)), "more": (added, columns)}
    model = build(nodes, inputs, ["y"], weights)
    model.opset_import[0].version = 18
    return model


def feeds(rows: int, columns: int, added: int):
    rng = np.random.default_rng(rows)
    x, more = (rng.standard_normal((size, columns)).astype(np.float32) for size in (rows, added))
    more[0, 0], more[1, 1], more[2, 2] = np.inf, np.nan, -0.0
    return {"x": x, "index": rng.integers(-rows, rows, added), "more": more}


@pytest.mark.parametrize("shape", [(5, 64, 200), (1000, 33, 128), (1, 8, 512), (7, 300, 100), (50, 4096, 8)], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_sums_have_the_same_bits(shape, threads):
    made = assert_same_bits(step(*shape), feeds(*shape), threads=threads)
    assert len(made.kernels) == len(made.order) == 1


@pytest.mark.parametrize("index", [5, -6, 2**62, -(2**62)])
def test_an_index_beyond_the_matrix_fails(index):
    """As in ONNX Runtime, and nothing is written there."""
    given = feeds(5, 64, 200)
    given["index"][77] = index
    for opened in (session(step(5, 64, 200))[0], onnxruntime.InferenceSession(step(5, 64, 200).SerializeToString())):
        with pytest.raises(Exception, match=r"out of (data )?bounds"):
            run(opened, given)


def test_the_matrix_may_be_overwritten():
    given = feeds(50, 64, 200)
    opened, _ = session(step(50, 64, 200))
    wanted = run(opened, given)["y"]
    binding, array = opened.io_binding(), onnxruntime.OrtValue.ortvalue_from_numpy(given["x"].copy())
    for name in ("index", "more"):
        binding.bind_cpu_input(name, given[name])
    binding.bind_ortvalue_input("x", array)
    binding.bind_ortvalue_output("y", array)
    opened.run_with_iobinding(binding)
    np.testing.assert_array_equal(array.numpy(), wanted)
    given["index"][-1] = 50
    binding.bind_cpu_input("index", given["index"])
    with pytest.raises(Exception, match="out of bounds"):
        opened.run_with_iobinding(binding)
    np.testing.assert_array_equal(array.numpy(), wanted, "nothing is written where an index is beyond the matrix")


def test_what_is_left_alone():
    assert scatters.find(ordered_step(step(5, 64, 200)))
    for attributes in ({"reduction": "mul"}, {"reduction": "none"}):
        assert not scatters.find(ordered_step(step(5, 64, 200, **attributes)))
    assert not scatters.find(ordered_step(step(200, 64, 200, axis=1)))
    assert not scatters.find(ordered_step(step(5, 4, 2000)))
    read_twice = step(5, 64, 200)
    read_twice.graph.node.append(helper.make_node("Cast", ["wide"], ["z"], to=1))
    read_twice.graph.output.append(helper.make_tensor_value_info("z", 1, (200, 64)))
    assert not scatters.find(ordered_step(read_twice))


def test_rows_that_are_views_of_the_matrix_are_no_second_value():
    """Else their matrix would be overwritten while they are read."""
    nodes = [node("Reshape", ["index", "tall"], "i"), node("Expand", ["i", "shape"], "wide"),
             node("Reshape", ["x", "shape"], "more"),
             node("ScatterElements", ["x", "wide", "more"], "y", axis=0, reduction="add")]  # fmt: skip
    weights = {"tall": np.array([200, 1]), "shape": np.array([200, 32])}
    model = build(nodes, {"x": (200, 32), "index": (L, (200,))}, ["y"], weights)
    model.opset_import[0].version = 18
    (found,) = scatters.find(ordered_step(model))
    assert found.reads == ("x", "index", "x")
    given = feeds(200, 32, 200)
    assert_same_bits(model, {name: given[name] for name in ("x", "index")})


def test_indices_that_are_renewed_are_left_alone():
    """Their new values may lie over the old ones before the rows are added."""
    ordered = ordered_step(step(5, 64, 200))
    assert scatters.find(ordered) and not scatters.find(replace(ordered, renewed={"next": "index"}))
    assert not scatters.find(replace(ordered, root={**ordered.root, "alias": "x"}))
