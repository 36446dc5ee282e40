"""Defects found under attack, asked for by the command line and the documented Python alone.

They import nothing of the package, so that they run on any commit's code: each fails on the code that had the defect.
Every command gets two gigabytes and a minute.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from tests.support.graphs import FLOAT, feeds_for, mlp, model_of, run_model, same_bits

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MEMORY, SECONDS = 2 * 10**9, 60
make = helper.make_node
Done = subprocess.CompletedProcess


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Each test has a folder, below another in which nothing may change."""
    home = tmp_path / "above" / "home"
    home.mkdir(parents=True)
    monkeypatch.chdir(home)
    return home


def python(*arguments: str, **more: object) -> Done[str]:
    """A process of the package's own, killed after a minute."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more.pop("env", {})  # type: ignore[operator,arg-type]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))

    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=SECONDS, env=environment,
        preexec_fn=limited, **more,
    )  # fmt: skip


def command(*arguments: str, **more: object) -> Done[str]:
    done = python("-m", "onnx_remat", *arguments, **more)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def rewrite(model: onnx.ModelProto, *more: str, budget: str = "100%", **how: object) -> Done[str]:
    onnx.save(model, "in.onnx")
    return command("in.onnx", "out.onnx", "--budget", budget, *more, **how)


def refused(done: Done[str], code: int, words: str = "") -> None:
    """In one line, which names what is wrong."""
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == 1 and words in done.stderr, done.stderr


def accepted(done: Done[str]) -> onnx.ModelProto:
    assert done.returncode == 0, done.stderr
    return onnx.load("out.onnx")


def parsed(text: str, opset: int = 20) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]> g {text}')


def there_and_back(
    layers: int,
    shape: list[int],
    layer: Callable[[str, int], list[onnx.NodeProto]],
    weights: dict[str, np.ndarray],
    opset: int = 20,
) -> onnx.ModelProto:
    """Layers whose results are all read again, in reverse: what a backward pass does to memory."""
    nodes, names = [], ["x"]
    for i in range(layers):
        nodes += layer(names[-1], i)
        names.append(nodes[-1].output[0])
    nodes.append(make("ReduceMean", [names[-1]], ["loss"], name="loss", keepdims=0))
    nodes.append(make("Sub", [names[-1], "loss"], ["g"], name="g"))
    for i, name in enumerate(reversed(names)):
        nodes.append(make("Mul", [nodes[-1].output[0], name], [f"g{i}"], name=f"g{i}"))
    nodes[-1].output[0] = "grad.x"
    return model_of(nodes, {"x": shape}, {"loss": [], "grad.x": shape}, weights, opset=opset)


def unchanged(model: onnx.ModelProto, written: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> bool:
    return all(
        same_bits(run_model(model, feeds, level), run_model(written, feeds, level)) for level in ("disable", "all")
    )


# --- wrong results ---------------------------------------------------------------------------------------------------


def test_a_batch_normalization_is_recomputed():
    rng = np.random.default_rng(0)
    weights = {"k": rng.normal(size=(8, 8, 3, 3)).astype("f"), "one": np.ones(8, "f"), "nil": np.zeros(8, "f")}
    weights |= {f"old_{name}{i}": rng.uniform(1, 2, 8).astype("f") for name in ("mean", "var") for i in range(6)}

    def layer(name: str, i: int) -> list[onnx.NodeProto]:
        statistics = [f"b{i}", f"mean{i}", f"var{i}"]
        return [
            make("Conv", [name, "k"], [f"c{i}"], name=f"c{i}", pads=[1, 1, 1, 1]),
            make(
                "BatchNormalization",
                [f"c{i}", "one", "nil", f"old_mean{i}", f"old_var{i}"],
                statistics,
                name=f"b{i}",
                training_mode=1,
            ),
            make("Relu", [f"b{i}"], [f"r{i}"], name=f"r{i}"),
        ]

    model = there_and_back(6, [4, 8, 224, 224], layer, weights, opset=17)
    written = accepted(rewrite(model, "--time-limit", "10s", budget="75%"))
    assert any("__remat" in node.name and node.op_type == "BatchNormalization" for node in written.graph.node)
    assert unchanged(model, written, feeds_for(model))


def test_a_max_pool_is_recomputed_by_the_same_kernel():
    """Without Indices ONNX Runtime takes another, for which NaN and zeros of both signs are something else."""
    layers, shape = 16, [2, 8, 128, 128]

    def layer(name: str, i: int) -> list[onnx.NodeProto]:
        pool = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
        return [make("MaxPool", [name], [f"p{i}", f"i{i}"], name=f"p{i}", **pool)]

    model = there_and_back(layers, shape, layer, {"last": np.array([3])})
    for i in reversed(range(layers)):
        model.graph.node.insert(i + 1, make("ReduceMax", [f"i{i}"], [f"most{i}"], name=f"most{i}", keepdims=0))
        model.graph.node.append(make("ReduceSum", [f"p{i}", "last"], [f"rows{i}"], name=f"rows{i}"))
        model.graph.output.append(helper.make_tensor_value_info(f"most{i}", TensorProto.INT64, []))
        model.graph.output.append(helper.make_tensor_value_info(f"rows{i}", FLOAT, [*shape[:3], 1]))
    written = accepted(rewrite(model, "--time-limit", "10s", budget="75%"))
    assert any("__remat" in node.name and node.op_type == "MaxPool" for node in written.graph.node)
    values, often = np.float32([np.nan, 0.0, -0.0, -1.0]), (0.01, 0.1, 0.1, 0.79)
    assert unchanged(model, written, {"x": np.random.default_rng(0).choice(values, shape, p=often)})


BY_VECTOR = "{ t = Transpose (w)  y = MatMul (t, v)  z = Mul (y, y)  loss = ReduceSum <keepdims = 0> (z) }"


def test_a_gradient_is_right_by_default():
    forward = parsed(f"(float[4] v) => (float loss) <float[4, 3] w = {{{', '.join(map(str, range(12)))}}}> {BY_VECTOR}")
    onnx.save(forward, "forward.onnx")
    done = python("-m", "onnx_remat.converters.autodiff", "forward.onnx", "step.onnx", "--wrt", "w", "--no-check")
    assert done.returncode == 0, done.stderr
    w, v = np.arange(12, dtype="f").reshape(4, 3), np.float32([1, 2, 3, 4])
    step = onnx.load("step.onnx")
    made = dict(zip([o.name for o in step.graph.output], run_model(step, {"w": w, "v": v}, "all"), strict=True))
    np.testing.assert_allclose(made["grad.w"], 2 * np.outer(v, w.T @ v), rtol=1e-5)


def test_a_wrong_fusion_is_warned_of_by_node_name():
    model = there_and_back(4, [64, 64], lambda name, i: [make("Tanh", [name], [f"r{i}"], name=f"r{i}")], {})
    model.graph.node.append(make("Transpose", ["x"], ["xt"], name="turn", perm=[1, 0]))
    model.graph.node.append(make("MatMul", ["xt", "v"], ["y"], name="by_vector"))
    model.graph.input.append(helper.make_tensor_value_info("v", FLOAT, [64]))
    model.graph.output.append(helper.make_tensor_value_info("y", FLOAT, [64]))
    done = rewrite(model)
    accepted(done)
    assert "'by_vector'" in done.stdout + done.stderr


def test_a_rounding_that_is_lost_is_kept_lost_or_named():
    def layer(name: str, i: int) -> list[onnx.NodeProto]:
        return [
            make("Cast", [name], [f"h{i}"], name=f"h{i}", to=TensorProto.FLOAT16),
            make("Tanh", [f"h{i}"], [f"t{i}"], name=f"t{i}"),
            make("Cast", [f"t{i}"], [f"f{i}"], name=f"f{i}", to=FLOAT),
        ]

    model = there_and_back(8, [1024, 1024], layer, {})
    done = rewrite(model, "--effort", "0.3", budget="75%")
    written = accepted(done)
    assert any("__remat" in node.name for node in written.graph.node)
    assert unchanged(model, written, feeds_for(model)) or "rounding" in done.stdout


def test_feeds_of_verify_run_show_what_plain_ones_hide():
    """A Clip at 3e4 is no Identity."""
    code = """
import onnx, sys
from onnx_remat.errors import VerificationError
from onnx_remat.measure import verify
try:
    verify.bitwise("a.onnx", "b.onnx")
except VerificationError:
    sys.exit(5)
"""
    loss = "loss = ReduceMean <keepdims = 0> (x)"
    onnx.save(parsed(f"(float[64, 64] x) => (float loss, float[64, 64] y) {{ {loss} y = Identity (x) }}"), "a.onnx")
    text = "(float[64, 64] x) => (float loss, float[64, 64] y) <float low = {-30000.0}, float high = {30000.0}>"
    text += f"{{ {loss} y = Clip (x, low, high) }}"
    onnx.save(parsed(text), "b.onnx")
    done = python("-c", code)
    assert done.returncode == 5, done.stderr


def test_an_input_with_a_default_is_counted_twice():
    model = there_and_back(4, [128, 128], lambda name, i: [make("Mul", [name, "w"], [f"r{i}"], name=f"r{i}")], {})
    model.graph.input.append(helper.make_tensor_value_info("w", FLOAT, [128, 128]))
    peaks = []
    for default in (False, True):
        if default:
            model.graph.initializer.append(numpy_helper.from_array(np.ones((128, 128), "f"), "w"))
        assert (
            rewrite(model, "--dry-run", "--json", f"{default}.json", "--selector", "keep_all", budget="100%").returncode
            == 0
        )
        report = json.loads(Path(f"{default}.json").read_text())
        peaks.append(report["before"]["total"])
    assert peaks[1] - peaks[0] >= 128 * 128 * 4


def test_a_plan_that_is_kept_is_measured_at_most_at_its_budget():
    """Of values of four pages and 16 bytes: each takes a page more than it has."""
    model = there_and_back(150, [16 * 1024 + 4], lambda name, i: [make("Tanh", [name], [f"r{i}"], name=f"r{i}")], {})
    done = rewrite(model, "--verify", "run", "--time-limit", "20s", "--json", "report.json", budget="93%")
    accepted(done)
    report = json.loads(Path("report.json").read_text())
    assert report["measured"]["after"] <= report["budget"]


def test_a_step_that_is_right_is_converted():
    """A gradient that is shared by the elements that equal a maximum."""
    code = """
import torch
from onnx_remat.converters.pytorch import export_training_step
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        h = self.linear(x.cumsum(1))
        return (h + h.amax(1, keepdim=True)).sum()
torch.manual_seed(0)
export_training_step(Net(), torch.randn(3, 4))
"""
    pytest.importorskip("onnxscript")
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_command_names_its_own_options():
    """Every gradient is zero, and what it advises must be an option."""
    text = "(float[2] x) => (float loss) <float[2] w = {1.0, 1.0}, float[2] nil = {0.0, 0.0}>"
    text += "{ y = Mul (w, nil)  z = Mul (y, x)  loss = ReduceSum <keepdims = 0> (z) }"
    onnx.save(parsed(text), "forward.onnx")
    done = python("-m", "onnx_remat.converters.autodiff", "forward.onnx", "step.onnx", "--wrt", "w")
    known = python("-m", "onnx_remat.converters.autodiff", "--help").stdout
    advised = re.findall(r"--[\w-]+|\w+=", done.stderr)
    assert done.returncode and advised and all(option in known for option in advised), done.stderr


# --- data lost, files where they must not be -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("--json", "./out.onnx"), ("--json", "sub/../out.onnx"), ("--json", "link"), ("--json", "w.bin"),
        ("--json", "r.html", "--plot", "./r.html"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_reports_never_go_where_something_lies(arguments):
    Path("sub").mkdir()
    Path("link").symlink_to("out.onnx")
    model = mlp(layers=2, batch=8, width=8)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((8, 8), "f"), "w1"))
    onnx.save(model, "in.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    before = Path("w.bin").read_bytes()
    refused(command("in.onnx", "out.onnx", "--budget", "100%", *arguments), 2)
    assert Path("w.bin").read_bytes() == before and not Path("out.onnx").exists()


def stored(location: str) -> TensorProto:
    tensor = TensorProto(name="held", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


@pytest.mark.parametrize("holder", ["folder's own name", "link", "function"])
def test_data_outside_the_folder_is_refused(holder, here):
    """`sub` is a link to a folder two levels down, so that ``sub/..`` is not this folder."""
    (here.parent / "far" / "below").mkdir(parents=True)
    (here.parent / "far" / "w.bin").write_bytes(b"s" * 64)
    (here / "w.bin").write_bytes(b"w" * 64)
    Path("sub").symlink_to(here.parent / "far" / "below")
    Path("to").mkdir()
    model = mlp(layers=2, batch=8, width=8)
    if holder != "function":
        model.graph.initializer.append(stored("sub/../w.bin" if holder == "link" else "../home/w.bin"))
    else:
        body = [make("Constant", [], ["held"], value=stored("/etc/passwd")), make("Add", ["a", "held"], ["b"])]
        model.functions.append(helper.make_function("my", "F", ["a"], ["b"], body, [helper.make_opsetid("", 20)]))
        model.opset_import.append(helper.make_opsetid("my", 1))
        model.graph.node.append(make("F", ["x"], ["called"], domain="my"))
    Path("in.onnx").write_bytes(model.SerializeToString())
    before = sorted(map(str, here.parent.rglob("*")))
    refused(command("in.onnx", "to/out.onnx", "--budget", "100%", "--verify", "none"), 4, "outside the model's folder")
    assert sorted(map(str, here.parent.rglob("*"))) == before


# --- time and memory out of proportion -------------------------------------------------------------------------------


def test_a_flat_vector_of_parameters_costs_nothing():
    model, size = mlp(layers=2, batch=8, width=8), 10_000_000
    for name in ("flat", "flat.gradient"):
        model.graph.input.append(helper.make_tensor_value_info(name, FLOAT, [size]))
    model.graph.output.append(helper.make_tensor_value_info("new.flat", FLOAT, [size]))
    model.graph.node.append(make("Sub", ["flat", "flat.gradient"], ["new.flat"], name="renew"))
    start = os.times()
    assert rewrite(model, "--dry-run", "--selector", "keep_all", budget="100%").returncode == 0
    assert os.times().children_user - start.children_user < 30


def doubling(model: onnx.ModelProto) -> None:
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("my", 1)]
    for i in range(31):
        kind, domain = ("Tanh", "") if i == 30 else (f"F{i + 1}", "my")
        body = [make(kind, ["a"], ["t"], domain=domain), make(kind, ["t"], ["b"], domain=domain)]
        model.functions.append(helper.make_function("my", f"F{i}", ["a"], ["b"], body, imports))
    model.opset_import.append(helper.make_opsetid("my", 1))
    model.graph.node.append(make("F0", ["loss"], ["called"], domain="my"))
    model.graph.output.append(helper.make_tensor_value_info("called", FLOAT, []))


def too_many_parts(model: onnx.ModelProto) -> None:
    model.graph.node.append(make("Split", ["x"], ["p", "q", "r"], name="parts", num_outputs=2))
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in "pqr")


def endless_einsum(model: onnx.ModelProto) -> None:
    model.graph.node.append(make("Einsum", ["x", "x"], ["many"], name="sum", equation="......->..."))
    model.graph.output.append(onnx.ValueInfoProto(name="many"))


def huge_behind_an_unknown_size(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array([10**9]), "n"))
    model.graph.initializer.append(numpy_helper.from_array(np.array([0]), "zero"))
    for kind, inputs, output in (
        ("NonZero", ["x"], "unknown"),
        ("Tile", ["zero", "n"], "huge"),
        ("Gather", ["huge", "zero"], "few"),
        ("Reshape", ["unknown", "few"], "shaped"),
    ):
        model.graph.node.append(make(kind, inputs, [output], name=output))
    model.graph.output.append(onnx.ValueInfoProto(name="shaped"))


@pytest.mark.parametrize("change", [doubling, too_many_parts, endless_einsum, huge_behind_an_unknown_size])
def test_what_hangs_or_crashes_the_libraries_is_refused(change):
    model = mlp(layers=2, batch=8, width=8)
    change(model)
    Path("in.onnx").write_bytes(model.SerializeToString())
    refused(command("in.onnx", "out.onnx", "--budget", "100%"), 4)


def test_costs_without_end_are_refused():
    refused(rewrite(mlp(layers=2, batch=8, width=8), "--costs", "/dev/zero"), 2, "/dev/zero")


def test_a_node_of_many_inputs_is_read_in_time():
    """A sum of 200,000: the time it took grew with the square of their number."""
    model = mlp(layers=2, batch=8, width=8)
    model.graph.node.append(make("Sum", ["x"] * 200_000, ["many"], name="many"))
    model.graph.output.append(helper.make_tensor_value_info("many", FLOAT, [8, 8]))
    assert rewrite(model, "--dry-run", "--selector", "keep_all").returncode in (0, 3, 4)


# --- exit codes and messages -----------------------------------------------------------------------------------------


def no_groups(model: onnx.ModelProto) -> None:
    model.graph.input.append(helper.make_tensor_value_info("i", FLOAT, [1, 4, 8, 8]))
    model.graph.input.append(helper.make_tensor_value_info("k", FLOAT, [4, 4, 3, 3]))
    model.graph.node.append(make("Conv", ["i", "k"], ["c"], name="c", group=0))
    model.graph.output.append(onnx.ValueInfoProto(name="c"))


def calls_itself(model: onnx.ModelProto) -> None:
    doubling(model)
    model.functions[1].node[0].op_type = "F0"


def damaged(value: str) -> Callable[[onnx.ModelProto], None]:
    return lambda model: model.metadata_props.add(key="onnx_remat.shapes", value=value) and None


@pytest.mark.parametrize(
    "change",
    [no_groups, calls_itself, damaged("[" * 99_999), damaged('{"z0": null}'), damaged(json.dumps({"z0": [8, 3, 3]}))],
    ids=["no groups", "calls itself", "deep shapes", "null shapes", "false shapes"],
)
def test_bad_models_are_refused_in_a_line(change):
    model = mlp(layers=2, batch=8, width=8)
    change(model)
    Path("in.onnx").write_bytes(model.SerializeToString())
    refused(command("in.onnx", "out.onnx", "--budget", "100%"), 4)


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "in.onnx", "--points", "99999999999"), ("profile", "in.onnx", "p.json", "--runtime", "/bin/true"),
        ("in.onnx", "out.onnx", "--budget", "100%", "--costs", "deep.json"),
    ],
    ids=["points", "runtime", "costs"],
)  # fmt: skip
def test_bad_arguments_are_refused_in_a_line(arguments):
    onnx.save(mlp(layers=2, batch=8, width=8), "in.onnx")
    Path("deep.json").write_text("[" * 100_000)
    refused(command(*arguments), 2)


def test_a_long_name_is_written_to():
    onnx.save(mlp(layers=2, batch=8, width=8), "in.onnx")
    done = command("in.onnx", "é" * 127, "--budget", "100%")
    assert done.returncode == 0 and Path("é" * 127).exists(), done.stderr


def test_what_was_planned_is_checked_though_it_was_tampered_with():
    accepted(rewrite(mlp(layers=6, batch=2048, width=32), "--time-limit", "5s", budget="95%"))
    model = onnx.load("out.onnx")
    for entry in model.metadata_props:
        for value in ("null", "{"):
            tampered = onnx.ModelProto()
            tampered.CopyFrom(model)
            next(e for e in tampered.metadata_props if e.key == entry.key).value = value
            onnx.save(tampered, "bad.onnx")
            done = command("check", "bad.onnx", "--no-run")
            assert done.returncode in (0, 4, 5), (entry.key, value, done.stderr)


def test_letters_that_a_stream_lacks_change_no_exit_code():
    model = mlp(layers=2, batch=8, width=8)
    for node in model.graph.node:
        node.name = f"é中{node.name}"
    done = rewrite(model, "-v", budget="100%", env={"PYTHONIOENCODING": "ascii:strict", "PYTHONUTF8": "0"})
    accepted(done)


@pytest.mark.parametrize(("redirect", "code", "written"), [("> /dev/full", 4, False), ("2>&-", 0, True)])
def test_streams_that_fail_change_no_exit_code(redirect, code, written):
    onnx.save(mlp(layers=2, batch=8, width=8), "in.onnx")
    line = f"{sys.executable} -m onnx_remat in.onnx out.onnx --budget 100% {redirect}"
    done = subprocess.run(
        ["bash", "-c", line],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
        timeout=SECONDS,
    )
    assert (done.returncode, Path("out.onnx").exists()) == (code, written), done.stderr


def test_a_converter_without_its_framework_names_the_extra():
    code = """
import sys
sys.modules.update(dict.fromkeys(["torch", "jax", "onnx_ir", "onnxscript"]))
from onnx_remat.errors import OnnxRematError
for name in ("pytorch", "jax", "autodiff"):
    try:
        __import__("onnx_remat.converters." + name)
    except OnnxRematError as error:
        assert "pip install" in str(error)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


# --- the Python face -------------------------------------------------------------------------------------------------

NONSENSE = """
import sys, numpy as np, onnx, onnx_remat
try:
    onnx_remat.rewrite_model("in.onnx", "100%", {}, verify="none")
except onnx_remat.OnnxRematError:
    sys.exit(9)
"""


@pytest.mark.parametrize(
    ("argument", "code"),
    [("time_limit=float('inf')", 9), ("time_limit=float('nan')", 9), ("time_limit='5s'", (0, 9)), ("dims=None", 0),
     ("keep=None", 0), ("keep='a1'", 0)],
)  # fmt: skip
def test_arguments_are_taken_sensibly_or_refused(argument, code):
    onnx.save(mlp(layers=2, batch=8, width=8), "in.onnx")
    done = python("-c", NONSENSE.replace("{}", argument))
    assert done.returncode in np.atleast_1d(code), done.stderr


@pytest.mark.parametrize(
    ("model", "budget"),
    [("bytearray(data)", "'100%'"), ("open('in.onnx', 'rb')", "'100%'"), ("data", "np.int64(10**9)")],
)
def test_models_and_sizes_are_taken_as_they_come(model, budget):
    onnx.save(mlp(layers=2, batch=8, width=8), "in.onnx")
    code = f"""
import onnx_remat, numpy as np
data = open("in.onnx", "rb").read()
try:
    onnx_remat.rewrite_model({model}, {budget}, verify="none")
except onnx_remat.OnnxRematError as error:
    print(error)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("change", ["del state['w0']", "state['w0'] = np.zeros(3, 'f')", "loss = 'los'"])
def test_a_loop_checks_its_state_first(change):
    onnx.save(mlp(layers=2, batch=8, width=8), "in.onnx")
    code = f"""
import sys, numpy as np, onnx_remat, onnxruntime
from onnx_remat.training import Loop
state = {{name: np.ones((8, 8), "f") for name in ("x", "t", "w0", "w1")}}
loss = "loss"
{change}
try:
    Loop(onnxruntime.InferenceSession("in.onnx"), state, loss)
except onnx_remat.OnnxRematError as error:
    sys.exit(9 if "\\n" not in str(error) else 1)
"""
    done = python("-c", code)
    assert done.returncode == 9, done.stderr


def test_a_profile_of_an_open_dimension_asks_for_it():
    onnx.save(mlp(layers=2, width=8, dims="batch"), "in.onnx")
    refused(command("profile", "in.onnx", "p.json"), 4, "--dim batch=SIZE")


# --- what signals leave ----------------------------------------------------------------------------------------------


def test_a_terminated_command_leaves_nothing(here):
    """It is ended as soon as it has made a scratch folder, and a little later."""
    onnx.save(mlp(layers=12, batch=4096, width=64), "in.onnx")
    scratch = here / "scratch"
    scratch.mkdir()

    def folders() -> list[Path]:
        return [path for path in scratch.iterdir() if path.is_dir() and not path.name.startswith(".")]

    for later in (0.0, 0.5, 2.0):
        process = subprocess.Popen(
            [sys.executable, "-m", "onnx_remat", "in.onnx", "out.onnx", "--budget", "90%", "--verify", "run", "-q"],
            env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(scratch)}, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        start = time.monotonic()
        while not folders():
            assert process.poll() is None and time.monotonic() - start < SECONDS
            time.sleep(0.01)
        time.sleep(later)
        process.send_signal(signal.SIGTERM)
        process.wait(SECONDS)
        assert folders() == []
