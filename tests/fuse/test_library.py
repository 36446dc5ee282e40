"""The custom-op library: no file names a kernel, and nothing is computed past the end of an array."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnx_remat.errors import ModelError
from onnx_remat.fuse import build, shim
from tests.support.fusing import fused, offered, options, run, session, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "none")

ROOT = Path(__file__).resolve().parents[2]


def chain(size: int = 64) -> onnx.ModelProto:
    nodes = [helper.make_node("Neg", ["x"], ["a"]), helper.make_node("Add", ["a", "b"], ["y"])]
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [size]) for name in "xby"}
    graph = helper.make_graph(nodes, "g", [values["x"], values["b"]], [values["y"]])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def load(model: onnx.ModelProto) -> ort.InferenceSession:
    chosen = options()
    shim.register(chosen)
    return ort.InferenceSession(model.SerializeToString(), chosen, ["CPUExecutionProvider"])


def attribute(model: onnx.ModelProto, name: str) -> onnx.AttributeProto:
    (found,) = (each for each in model.graph.node[0].attribute if each.name == name)
    return found


def feeds(size: int = 64) -> dict[str, np.ndarray]:
    return {"x": np.arange(size, dtype=np.float32), "b": np.ones(size, np.float32)}


@pytest.mark.parametrize("change", ["secret", "handle", "negative", "huge", "no secret", "closed", "zero"])
def test_a_file_cannot_name_a_kernel(change):
    secret = shim.new_secret()
    model, made = fused(chain(), secret)
    if change in ("secret", "zero"):
        attribute(model, "secret").i = 0 if change == "zero" else secret + 1
    elif change == "no secret":
        model.graph.node[0].attribute.remove(attribute(model, "secret"))
    elif change != "closed":
        attribute(model, "handle").i = {"handle": 1, "negative": -1, "huge": 2**62}[change]
    if change == "closed":
        with offered(secret, made):
            pass
        with pytest.raises(Exception, match="Fused"):
            load(model)
        return
    with offered(secret, made), pytest.raises(Exception, match=r"Fused|secret"):
        load(model)


def test_a_session_keeps_its_kernels_when_the_table_is_closed():
    opened, made = session(chain())
    again = session(chain(100))[0]
    np.testing.assert_array_equal(run(opened, feeds())["y"], 1 - feeds()["x"])
    del opened
    np.testing.assert_array_equal(run(again, feeds(100))["y"], 1 - feeds(100)["x"])
    assert made.kernels


def test_memory_is_given_back_with_the_last_session():
    secret = shim.new_secret()
    model, made = fused(chain(), secret)
    with offered(secret, made):
        assert shim._loaded().fused_is_open(secret)
        opened = load(model)
    assert not shim._loaded().fused_is_open(secret)
    np.testing.assert_array_equal(run(opened, feeds())["y"], 1 - feeds()["x"])


@pytest.mark.parametrize("change", ["elements", "shape", "type", "input", "output"])
def test_arrays_of_other_sizes_and_types_are_refused_before_the_call(change):
    """The description says one thing and the graph another: no kernel may read or write past an array's end."""
    secret = shim.new_secret()
    model, made = fused(chain(), secret)
    if change == "elements":
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_param = "n"
        given = {name: array[:32] for name, array in feeds().items()}
    elif change == "shape":
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = 8
            value.type.tensor_type.shape.dim.add(dim_value=8)
        given = {name: array.reshape(8, 8) for name, array in feeds().items()}
    elif change == "type":
        for value in model.graph.input:
            value.type.tensor_type.elem_type = TensorProto.INT32
        given = {name: array.astype(np.int32) for name, array in feeds().items()}
    elif change == "input":
        model.graph.node[0].input.append("x")
        given = feeds()
    else:
        model.graph.node[0].output.append("z")
        given = feeds()
    with offered(secret, made):
        try:
            opened = load(model)
        except Exception:
            return
    with pytest.raises(Exception, match=r"Fused|shape|type"):
        run(opened, given)


def described(**change: int) -> list[int]:
    """Numbers of a kernel of 64 floats -> 64 floats; by name what is changed in them."""
    names = ("offset", "size", "grain", "inputs", "outputs", "type", "read_rank", "read_dim", "made", "rank", "dim")
    numbers = dict(zip(names, (0, 64, 64, 1, 1, 1, 1, 64, 1, 1, 64), strict=True))
    return list((numbers | change).values())


@pytest.mark.parametrize(
    "change",
    [{"offset": -1}, {"offset": 1 << 40}, {"size": 0}, {"size": -5}, {"grain": 0}, {"inputs": -1}, {"inputs": 65},
     {"outputs": 0}, {"outputs": 65}, {"rank": 17}, {"rank": -1}, {"dim": 63}, {"rank": 3}, {"inputs": 3},
     {"read_rank": 17}, {"read_rank": -1}, {"read_rank": 4}],
)  # fmt: skip
def test_descriptions_that_do_not_add_up_are_refused(change):
    code = bytes([0xC3]) + bytes(63)
    with shim.offered(shim.new_secret(), code, [described()]):
        pass
    with (
        pytest.raises(ModelError, match="rejects the description"),
        shim.offered(shim.new_secret(), code, [described(**change)]),
    ):
        pass
    with (
        pytest.raises(ModelError, match="rejects the description"),
        shim.offered(shim.new_secret(), code, [[0, 64]]),
    ):
        pass


def joined(**change: int) -> list[int]:
    """Numbers of a kernel of a device that joins two, of 64 and of 3 floats; by name what is changed in them."""
    names = ("threads", "blocks", "segments", "inputs", "outputs", "type0", "in0", "of0", "type1", "in1", "of1",
             "made0", "rank0", "dim0", "made1", "rank1", "dim1", "start0", "start1", "size0", "size1")  # fmt: skip
    numbers = dict(zip(names, (-256, 2, -2, 2, 2, 1, 1, 64, 1, 1, 3, 1, 1, 64, 1, 1, 3, 0, 1, 64, 3), strict=True))
    return list((numbers | change).values())


@pytest.mark.parametrize(
    ("change", "length"),
    [
        ({"size1": 2}, 21), ({"size0": 3}, 21), ({"size1": 0}, 21), ({"size0": -64}, 21), ({"dim1": 4}, 21),
        ({"segments": -3}, 21), ({"segments": 0}, 21), ({"segments": -(1 << 40)}, 21), ({"threads": 0}, 21),
        ({"threads": -1}, 21), ({}, 20), ({}, 17), ({"outputs": 1}, 21), ({"inputs": 1}, 21),
    ],
)  # fmt: skip
def test_descriptions_of_joined_kernels_that_do_not_add_up_are_refused(change, length):
    code = bytes([0xC3]) + bytes(63)
    with shim.offered(shim.new_secret(), code, [joined()]):
        pass
    with (
        pytest.raises(ModelError, match="rejects the description"),
        shim.offered(shim.new_secret(), code, [joined(**change)[:length]]),
    ):
        pass


@pytest.mark.parametrize("size", [1, 2, 7, 15, 16, 17, 31, 33, 63, 65, 255, 257])
def test_nothing_is_written_past_the_end(size):
    guarded = np.full(size + 64, 7, np.float32)
    model = chain(size)
    opened, _ = session(model)
    binding = opened.io_binding()
    arrays = feeds(size)
    for name, array in arrays.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("y", "cpu", 0, np.float32, [size], guarded.ctypes.data + 128)
    opened.run_with_iobinding(binding)
    np.testing.assert_array_equal(guarded[32 : 32 + size], 1 - arrays["x"])
    assert (guarded[:32] == 7).all() and (guarded[32 + size :] == 7).all()


@pytest.mark.parametrize("over", ["x", "b"])
def test_an_output_may_lie_where_an_input_does(over):
    size = 200_003
    opened, _ = session(chain(size), threads=2)
    arrays = feeds(size)
    wanted = arrays["b"] - arrays["x"]
    binding = opened.io_binding()
    for name, array in arrays.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("y", "cpu", 0, np.float32, [size], arrays[over].ctypes.data)
    opened.run_with_iobinding(binding)
    np.testing.assert_array_equal(arrays[over], wanted)


# ---- how it comes to be ----


def in_a_new_process(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_without_a_compiler_one_line_says_so(tmp_path):
    code = "from onnx_remat.fuse import shim\nshim.cache_folder = lambda: "
    code += f"__import__('pathlib').Path({str(tmp_path)!r})\nprint(shim.why_not())"
    assert in_a_new_process(code, PATH="", CC="") == "there is no C compiler (cc, gcc or clang)"


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "FLAGS", ("--no-such-flag",))
    assert "cannot compile shim.c" in build.build(tmp_path) and not list(tmp_path.iterdir())


def test_the_wheels_build_hook_adds_the_library(tmp_path):
    """And says why it adds no kernels, here of a package that has none."""
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)

    class Fake(hook.Compiled):
        def __init__(self, root, target):
            self._given, self._warnings = (str(root), target), []

        app = property(lambda self: SimpleNamespace(display_warning=self._warnings.append))

        root = property(lambda self: self._given[0])
        target_name = property(lambda self: self._given[1])

    package = tmp_path / "onnx_remat" / "fuse"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    for name in ("build.py", "shim.c", "convolution.c"):
        (package / name).write_bytes((ROOT / "onnx_remat" / "fuse" / name).read_bytes())
    data = {"force_include": {}}
    fake = Fake(tmp_path, "wheel")
    fake.initialize("standard", data)
    assert ["onnx_remat.rewrite" in each for each in fake._warnings] == [True]
    ((source, target),) = data["force_include"].items()
    assert Path(source).is_file() and target == f"onnx_remat/fuse/{build.library_name()}"
    assert data["pure_python"] is False and data["tag"].startswith("py3-none-linux")
    for version, kind in [("editable", "wheel"), ("standard", "sdist")]:
        data = {"force_include": {}}
        Fake(tmp_path, kind).initialize(version, data)
        assert data == {"force_include": {}}


def test_the_library_is_built_beside_others_and_readable_to_all(tmp_path):
    for _ in range(2):
        assert not build.build(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.name == build.library_name() and path.stat().st_mode & 0o777 == 0o755
