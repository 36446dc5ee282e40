"""Every way to hold it wrong: each gets its own one-line error and exit code, no traceback, and nothing is written."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_remat.app.cli import main
from onnx_remat.ort import runtime
from tests.support.graphs import mlp

pytest.importorskip("onnxruntime")
node = helper.make_node
USAGE, INFEASIBLE, MODEL = 2, 3, 4


@dataclass(frozen=True)
class Bad:
    """A command line after IN and OUT are laid out by `home`, the exit code and a part of the message it deserves."""

    name: str
    arguments: Sequence[str]
    code: int
    message: str


def ask(*more: str, source: str = "in.onnx", target: str = "out.onnx") -> list[str]:
    return [source, target, "--for", "session", "--budget", "95%", "--effort", "1s", *more]


def budget(text: str) -> list[str]:
    return ["in.onnx", "out.onnx", "--for", "session", "--budget", text, "--effort", "300ms"]


ARGUMENTS = [
    Bad("no OUT", ["in.onnx", "--budget", "50%"], USAGE, "required: OUT (none with --dry-run)"),
    Bad("no budget", ["in.onnx", "out.onnx"], USAGE, "--budget"),
    Bad("budget zero", budget("0GB"), USAGE, "greater than zero"),
    Bad("budget zero percent", budget("0%"), USAGE, "greater than zero"),
    Bad("budget rounds to zero", budget("1e-30GB"), USAGE, "greater than zero"),
    Bad("budget negative", budget("-4GB"), USAGE, "budget"),
    Bad("budget NaN", budget("NaN"), USAGE, "not a size"),
    Bad("budget without unit", budget("4"), USAGE, "not a size"),
    Bad("budget empty", budget(""), USAGE, "not a size"),
    Bad("budget in words", budget("four GB"), USAGE, "not a size"),
    Bad("budget infinite", budget("1e400GB"), USAGE, "finite"),
    Bad("budget absurd", budget("99999999999TB"), USAGE, "larger"),
    Bad("budget unreachable", budget("5%"), INFEASIBLE, "there is no plan"),
    Bad("budget not found", [*budget("70%"), "--selector", "collection"], INFEASIBLE, "--selector auto"),
    Bad(
        "budget not found, checkpoints",
        [*budget("70%"), "--selector", "collection", "--checkpoint", "a1"],
        INFEASIBLE,
        "--selector auto without --checkpoint",
    ),
    Bad("budget of a byte", budget("1B"), INFEASIBLE, "there is no plan"),
    Bad("selector unknown", ask("--selector", "serch"), USAGE, "did you mean 'search'"),
    Bad("dim unknown", ask("--dim", "b=3"), USAGE, "no symbolic dimension 'b'"),
    Bad("dim misspelt", ask("--dim", "bath=3", source="symbolic.onnx"), USAGE, "did you mean 'batch'"),
    Bad("dim without value", ask("--dim", "b"), USAGE, "NAME=VALUE"),
    Bad("dim negative", ask("--dim", "batch=-3", source="symbolic.onnx"), USAGE, "NAME=VALUE"),
    Bad("dim bound twice", ask("--dim", "batch=3", "--dim", "batch=4", source="symbolic.onnx"), USAGE, "bound twice"),
    Bad("dim that overflows", ask("--dim", f"batch={10**17}", source="symbolic.onnx"), MODEL, "exceeds"),
    Bad("dim unbound", ask(source="symbolic.onnx"), MODEL, "--dim batch=SIZE"),
    Bad("loss misspelt", ask("--loss", "los"), USAGE, "did you mean 'loss'"),
    Bad("loss is an input", ask("--loss", "x"), USAGE, "'x' is an input"),
    Bad("keep misspelt", ask("--keep", "aa11"), USAGE, "did you mean"),
    Bad("keep unknown", ask("--keep", "zz1"), USAGE, "--keep"),
    Bad("checkpoint unknown", ask("--selector", "collection", "--checkpoint", "zz1"), USAGE, "no node makes a value"),
    Bad("checkpoint misspelt", [*budget("100%"), "--selector", "collection", "--checkpoint", "aa11"], USAGE, "did you"),
    Bad("checkpoint of an input", ask("--selector", "collection", "--checkpoint", "x"), USAGE, "no node makes a value"),
    Bad("checkpoint for no one", ask("--checkpoint", "a1"), USAGE, "--selector collection"),
    Bad("allow-recompute without domain", ask("--allow-recompute", "Foo"), USAGE, "DOMAIN::OP"),
    Bad("allow-recompute not there", ask("--allow-recompute", "my::Foo"), USAGE, "my::Foo"),
    Bad("costs unknown", ask("--costs", "a1000"), USAGE, "neither a preset"),
    Bad("costs not a profile", ask("--costs", "in.onnx"), USAGE, "in.onnx"),
    Bad("costs of another model", ask("--costs", "profile.json"), USAGE, "no op of this model"),
    Bad("costs a list of nonsense", ask("--costs", "list.json"), USAGE, "not a JSON profile"),
    Bad("time limit in words", ask("--time-limit", "soon"), USAGE, "not a time"),
    Bad("time limit zero", ask("--time-limit", "0s"), USAGE, "greater than zero"),
    Bad("time limit negative", ask("--time-limit=-3s"), USAGE, "not a time"),
    Bad("verify unknown", ask("--verify", "maybe"), USAGE, "maybe"),
    Bad("flag unknown", ask("--bugdet", "3"), USAGE, "--bugdet"),
    Bad("quiet and verbose", ask("-q", "-v"), USAGE, "not allowed with"),
    Bad("OUT is IN", ask("--force", target="in.onnx"), USAGE, "is the input"),
    Bad("OUT is IN by another name", ask("--force", target="./sub/../in.onnx"), USAGE, "is the input"),
    Bad("OUT is a link to IN", ask("--force", target="link.onnx"), USAGE, "is the input"),
    Bad("OUT is a hard link to IN", ask("--force", target="hard.onnx"), USAGE, "is the input"),
    Bad("OUT exists", ask(target="old.onnx"), USAGE, "--force"),
    Bad("OUT is a directory", ask(target="."), USAGE, "directory"),
    Bad("OUT in a folder that is not there", ask(target="no/where.onnx"), USAGE, "does not exist"),
    Bad("OUT below a file", ask(target="in.onnx/out.onnx"), USAGE, "does not exist"),
    Bad("OUT is a device", ask("--force", target="/dev/null"), USAGE, "not a regular file"),
    Bad("OUT is a pipe", ask("--force", target="pipe"), USAGE, "not a regular file"),
    Bad("OUT where nothing can be written", ask(target="/proc/out.onnx"), USAGE, "cannot write"),
    Bad("OUT with a name too long", ask(target="o" * 300), USAGE, "too long"),
    Bad("OUT with a zero byte", ask(target="o\0ut"), USAGE, "zero byte"),
    Bad("OUT empty", ask(target=""), USAGE, "directory"),
    Bad("OUT is the data of IN", ask("--force", target="ext.bin", source="ext.onnx"), USAGE, "data of the model"),
    Bad("JSON is IN", ask("--json", "in.onnx"), USAGE, "is the input"),
    Bad("JSON is OUT", ask("--json", "out.onnx"), USAGE, "it is OUT"),
    Bad("JSON is OUT by another name", ask("--json", "./out.onnx"), USAGE, "it is OUT"),
    Bad("JSON is OUT by a detour", ask("--json", "sub/../out.onnx"), USAGE, "it is OUT"),
    Bad("JSON is OUT by a link", ask("--json", "toout.onnx"), USAGE, "it is OUT"),
    Bad("JSON is OUT of a dry run", ask("--json", "out.onnx", "--dry-run"), USAGE, "it is OUT"),
    Bad("JSON is the data of IN", ask("--json", "ext.bin", source="ext.onnx"), USAGE, "data of the model"),
    Bad(
        "JSON is where data of IN goes",
        ask("--json", "sub/ext.bin", source="ext.onnx", target="sub/o.onnx"),
        USAGE,
        "data of the model",
    ),
    Bad("JSON is the costs", ask("--json", "profile.json", "--costs", "profile.json"), USAGE, "read by --costs"),
    Bad("page is OUT", ask("--plot", "out.html", target="sub/../out.html"), USAGE, "it is OUT"),
    Bad("page is IN", ask("--plot", "page.html", source="page.html"), USAGE, "is the input"),
    Bad("JSON is the page", ask("--json", "r.html", "--plot", "./r.html"), USAGE, "it is --json"),
    Bad("page drawn twice", ask("--plot", "r.html", "--plot", "r.html"), USAGE, "it is --plot"),
    Bad("sweep over IN", ["sweep", "in.onnx", "--json", "./in.onnx"], USAGE, "is the input"),
    Bad("sweep over the data of IN", ["sweep", "ext.onnx", "--json", "ext.bin"], USAGE, "data of the model"),
    Bad("sweep of no end", ["sweep", "in.onnx", "--points", "99999999999"], USAGE, "points"),
    Bad(
        "profile with fewer threads than none",
        ["profile", "in.onnx", "p.json", "--threads", "-1"],
        USAGE,
        "--threads -1 is not a number of threads: use 1 or more, or leave --threads out",
    ),
    Bad("profile over IN", ["profile", "in.onnx", "in.onnx", "--force"], USAGE, "is the input"),
    Bad("profile over the data of IN", ["profile", "ext.onnx", "ext.bin", "--force"], USAGE, "data of the model"),
    Bad(
        "profile by no Python",
        ["profile", "in.onnx", "p.json", "--runtime", "/bin/true"],
        USAGE,
        "not a Python interpreter",
    ),
    Bad(
        "profile by what prints for ever",
        ["profile", "in.onnx", "p.json", "--runtime", "/usr/bin/yes"],
        USAGE,
        "not a Python interpreter",
    ),
    Bad("profile of an open dimension", ["profile", "symbolic.onnx", "p.json"], MODEL, "--dim batch=SIZE"),
    Bad("check of what was not rewritten", ["check", "in.onnx"], MODEL, "does not say what was planned"),
    Bad("costs without end", ask("--costs", "/dev/zero"), USAGE, "nor a regular file"),
    Bad("costs nested too deeply", ask("--costs", "deep.json"), USAGE, "not a JSON profile"),
    Bad("budget of many digits", budget("1e" + "9" * 5000 + "GB"), USAGE, "finite"),
    Bad("dim of another script", ask("--dim", "batch=\u00b2", source="symbolic.onnx"), USAGE, "NAME=VALUE"),
    Bad("time limit of a century", ask("--time-limit", "999999h"), USAGE, "30 days"),
    Bad("JSON in a folder that is not there", ask("--json", "no/r.json"), USAGE, "does not exist"),
    Bad("IN missing", ask(source="ghost.onnx"), MODEL, "ghost.onnx"),
    Bad("IN is a directory", ask(source="."), MODEL, "directory"),
    Bad("IN is a device", ask(source="/dev/zero"), MODEL, "not a regular file"),
    Bad("IN is a pipe", ask(source="pipe"), MODEL, "not a regular file"),
    Bad("IN is a link to itself", ask(source="loop"), MODEL, "symbolic links"),
    Bad("IN with a zero byte", ask(source="i\0n"), MODEL, "zero byte"),
    Bad("IN empty", ask(source="empty.onnx"), MODEL, "empty"),
    Bad("IN is text", ask(source="text.onnx"), MODEL, "not an ONNX model"),
    Bad("IN truncated", ask(source="cut.onnx"), MODEL, "truncated"),
    Bad("IN truncated in the weights", ask(source="cut_data.onnx"), MODEL, "too short"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder of files to hold wrong. Nothing may change it, so one serves all."""
    folder = tmp_path_factory.mktemp("home")
    before = Path.cwd()
    os.chdir(folder)
    model = mlp(layers=4, batch=256, width=16)
    onnx.save(model, "in.onnx")
    onnx.save(mlp(layers=4, batch=256, width=16, dims="batch"), "symbolic.onnx")
    Path("sub").mkdir()
    Path("link.onnx").symlink_to("in.onnx")
    Path("loop").symlink_to("loop")
    os.link("in.onnx", "hard.onnx")
    os.mkfifo("pipe")
    Path("toout.onnx").symlink_to("out.onnx")
    onnx.save(model, "page.html")
    Path("deep.json").write_text("[" * 100_000)
    Path("old.onnx").write_bytes(b"old")
    Path("empty.onnx").write_bytes(b"")
    Path("text.onnx").write_text("hello, this is no model\n" * 20)
    Path("cut.onnx").write_bytes(Path("in.onnx").read_bytes()[:-300])
    Path("list.json").write_text("[1, 2]")
    event = {"cat": "Node", "name": "n_kernel_time", "dur": 3, "args": {"op_name": "Foo", "input_type_shape": []}}
    Path("profile.json").write_text(str([event]).replace("'", '"'))
    for name, data in (("ext.onnx", "ext.bin"), ("cut_data.onnx", "cut.bin")):
        stored = with_weight(np.ones((16, 16), np.float32))
        onnx.save(stored, name, save_as_external_data=True, location=data, size_threshold=0)
    Path("cut.bin").write_bytes(b"\0" * 100)
    yield folder
    os.chdir(before)


def with_weight(weight: np.ndarray) -> onnx.ModelProto:
    """The MLP with w3 stored in the model."""
    model = mlp(layers=4, batch=256, width=16)
    inputs = [v for v in model.graph.input if v.name != "w3"]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w3"))
    return model


Change = Callable[[onnx.ModelProto], object]
MODELS: dict[str, tuple[Change, str]] = {}


def bad_model(message: str) -> Callable[[Change], Change]:
    """Register a change of the MLP and a part of the message it deserves."""

    def register(change: Change) -> Change:
        MODELS[change.__name__.strip("_")] = (change, message)
        return change

    return register


def find(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if n.name == name)


def typed(name: str, shape: list[int | str] | None, dtype: int = 1) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def outside(model: onnx.ModelProto, **entries: str) -> None:
    """Make w3 an initializer with external data as given."""
    index = next(i for i, v in enumerate(model.graph.input) if v.name == "w3")
    del model.graph.input[index]
    weight = model.graph.initializer.add(name="w3", data_type=1, dims=[16, 16])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        weight.external_data.add(key=key, value=value)


@bad_model("'ghost', which nothing defines")
def undefined_input(m):
    m.graph.node[0].input[0] = "ghost"


@bad_model("defined twice")
def value_made_twice(m):
    m.graph.node.append(m.graph.node[0])


@bad_model("defined twice")
def input_listed_twice(m):
    m.graph.input.append(m.graph.input[0])


@bad_model("defined twice")
def initializer_listed_twice(m):
    m.graph.initializer.append(m.graph.initializer[0])


@bad_model("output 'loss' is listed twice")
def output_listed_twice(m):
    m.graph.output.append(m.graph.output[0])


@bad_model("topological")
def nodes_unsorted(m):
    m.graph.node.insert(0, m.graph.node.pop())


@bad_model("cycle")
def cycle(m):
    find(m, "mm0").input[0] = "a1"


@bad_model("cycle")
def node_that_reads_itself(m):
    find(m, "act0").input[0] = "a0"


@bad_model("made by no node")
def output_nobody_makes(m):
    m.graph.output.append(typed("ghost", [1]))


@bad_model("has no name")
def output_without_a_name(m):
    m.graph.output.append(typed("", [1]))


@bad_model("has no name")
def input_without_a_name(m):
    m.graph.input.append(typed("", [1]))


@bad_model("states float[] for value 'x', but by shape inference it is float[256, 16]")
def input_returned_under_another_type(m):
    m.graph.output.append(typed("x", []))


@bad_model("makes nothing")
def node_without_outputs(m):
    m.graph.node.append(node("Tanh", ["x"], [], name="mute"))


@bad_model("operator set")
def no_opset(m):
    m.ClearField("opset_import")


@bad_model("opset 9999")
def opset_of_the_future(m):
    m.opset_import[0].version = 9999


@bad_model("opset 0")
def opset_zero(m):
    m.opset_import[0].version = 0


@bad_model("imports two versions")
def opset_contradictory(m):
    m.opset_import.append(helper.make_opsetid("ai.onnx", 11))


@bad_model("IR version")
def ir_of_the_future(m):
    m.ir_version = 9999


@bad_model("did you mean 'Tan'")
def unknown_op(m):
    find(m, "act1").op_type = "Tahn"


@bad_model("'no.where'")
def unknown_domain(m):
    find(m, "act1").domain = "no.where"


@bad_model("did you mean the op 'Gelu'")
def unknown_op_of_a_known_domain(m):
    find(m, "act1").domain, find(m, "act1").op_type = "com.microsoft", "Geluu"
    m.opset_import.append(helper.make_opsetid("com.microsoft", 1))


@bad_model("act1")
def op_without_a_type(m):
    find(m, "act1").op_type = ""


@bad_model("several scalar outputs")
def several_losses(m):
    m.graph.output.pop(0)
    for i in (1, 2):
        m.graph.node.append(node("ReduceMean", ["ee"], [f"l{i}"], keepdims=0))
        m.graph.output.append(typed(f"l{i}", []))


@bad_model("no node")
def no_nodes(m):
    del m.graph.node[:], m.graph.output[:]
    m.graph.output.append(m.graph.input[0])


@bad_model("no outputs")
def no_outputs(m):
    del m.graph.output[:]


@bad_model("shape inference")
def shapes_contradict(m):
    m.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 5


@bad_model("shape inference")
def value_info_of_another_rank(m):
    m.graph.value_info.append(typed("z0", [256, 16, 3]))


@bad_model("shape inference")
def value_info_of_another_size(m):
    m.graph.value_info.append(typed("z0", [255, 16]))


@bad_model("shape inference")
def value_info_of_another_type(m):
    m.graph.value_info.append(typed("z0", [256, 16], TensorProto.INT64))


@bad_model("shape inference")
def output_of_another_shape(m):
    m.graph.output[1].type.tensor_type.shape.dim[0].dim_value = 3


@bad_model("two nodes with same node name")
def nodes_of_one_name(m):
    m.graph.node[1].name = m.graph.node[0].name


@bad_model("negative dimension")
def negative_dimension(m):
    m.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1


@bad_model("exceeds")
def dimensions_that_overflow(m):
    m.graph.input.append(typed("big", [2**40, 2**40]))


@bad_model("input 'x' has no shape")
def input_without_a_shape(m):
    m.graph.input[0].type.tensor_type.ClearField("shape")


@bad_model("input 'x' has no type")
def input_without_a_type(m):
    m.graph.input[0].ClearField("type")


@bad_model("data type 999")
def input_of_no_known_type(m):
    m.graph.input[0].type.tensor_type.elem_type = 999


@bad_model("'act1' (Tanh) lacks its input")
def required_input_absent(m):
    find(m, "act1").input[0] = ""


@bad_model("Transpose")
def attribute_that_does_not_fit(m):
    find(m, "t1").attribute[0].ints.append(2)


@bad_model("'sum' (Einsum) lacks its attribute 'equation'")
def equation_missing(m):
    m.graph.node.append(node("Einsum", ["loss"], ["sum"], name="sum"))


@bad_model("lacks its attribute 'to'")
def attribute_missing(m):
    m.graph.node.append(node("Cast", ["loss"], ["cast"]))
    m.graph.output.append(typed("cast", []))


@bad_model("attribute 'perm' must be of type INTS")
def attribute_of_another_type(m):
    find(m, "t1").attribute[0].CopyFrom(helper.make_attribute("perm", "10"))


@bad_model("Einsum")
def einsum_that_does_not_fit(m):
    m.graph.node.append(node("Einsum", ["x", "t"], ["es"], name="es", equation="ijk,jk->i"))
    m.graph.output.append(typed("es", [256]))


@bad_model("w3")
def initializer_shorter_than_its_shape(m):
    m.graph.initializer.add(name="w3", data_type=1, dims=[16, 16], raw_data=b"\0" * 100)


@bad_model("'w3' needs 256 entries, it has 0")
def initializer_without_data(m):
    m.graph.initializer.add(name="w3", data_type=1, dims=[16, 16])


@bad_model("negative dimension")
def initializer_with_a_negative_dimension(m):
    m.graph.initializer.add(name="w3", data_type=1, dims=[-16, 16], raw_data=b"")


@bad_model("data type 0")
def initializer_without_a_type(m):
    m.graph.initializer.add(name="w3", dims=[16, 16], raw_data=b"\0" * 1024)


@bad_model("outside the model's folder")
def data_that_climbs_out(m):
    outside(m, location="../secret.bin")


@bad_model("outside the model's folder")
def data_at_an_absolute_path(m):
    outside(m, location="/etc/passwd")


@bad_model("outside the model's folder")
def data_without_a_place(m):
    outside(m)


@bad_model("missing.bin")
def data_missing(m):
    outside(m, location="missing.bin")


@bad_model("not a regular file")
def data_is_a_folder(m):
    outside(m, location="sub")


@bad_model("not a regular file")
def data_is_a_pipe(m):
    outside(m, location="pipe")


@bad_model("zero byte")
def data_with_a_zero_byte(m):
    outside(m, location="a\0b")


@bad_model("too short")
def data_short(m):
    outside(m, location="old.onnx")


@bad_model("not a number")
def data_offset_in_words(m):
    outside(m, location="ext.bin", offset="far")


@bad_model("too short")
def data_offset_negative(m):
    outside(m, location="ext.bin", offset="-8")


@bad_model("needs 1024 bytes")
def data_length_wrong(m):
    outside(m, location="ext.bin", length="7")


@bad_model("then_branch")
def if_without_a_branch(m):
    m.graph.input.append(typed("c", [], TensorProto.BOOL))
    body = helper.make_graph([node("Neg", ["loss"], ["r"])], "b", [], [typed("r", [])])
    m.graph.node.append(node("If", ["c"], ["y"], name="choose", else_branch=body))
    m.graph.output.append(typed("y", []))


@bad_model("'ghost', which nothing defines")
def body_that_reads_what_is_not_there(m):
    m.graph.input.append(typed("c", [], TensorProto.BOOL))
    body = helper.make_graph([node("Neg", ["ghost"], ["r"])], "b", [], [typed("r", [])])
    m.graph.node.append(node("If", ["c"], ["y"], name="choose", then_branch=body, else_branch=body))
    m.graph.output.append(typed("y", []))


@bad_model("Cycle detected")
def function_that_calls_itself(m):
    body = [node("Loopy", ["a"], ["b"], domain="my")]
    m.functions.append(helper.make_function("my", "Loopy", ["a"], ["b"], body, [helper.make_opsetid("my", 1)]))
    m.opset_import.append(helper.make_opsetid("my", 1))
    find(m, "act1").domain, find(m, "act1").op_type = "my", "Loopy"


@bad_model("'where', made by node 'nz' (NonZero)")
def size_known_only_at_run_time(m):
    m.graph.node.append(node("NonZero", ["x"], ["where"], name="nz"))
    m.graph.output.append(typed("where", [2, None], TensorProto.INT64))


def state(folder: Path) -> dict[str, bytes | str]:
    """Every file and its contents."""
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        found[str(path)] = path.read_bytes() if path.is_file() else str(path.lstat().st_mode)
    return found


def refused(home: Path, capsys, arguments: Sequence[str], code: int, message: str) -> None:
    os.chdir(home)
    before = state(home)
    got = main(list(arguments))
    out, err = capsys.readouterr()
    assert (got, out) == (code, ""), err
    assert err.startswith("onnx-remat") and ": error: " in err and len(err.splitlines()) == 1 and "Traceback" not in err
    assert message in err
    assert len(err) < 400 or "9" * 5000 in err
    assert state(home) == before


@pytest.mark.parametrize("case", ARGUMENTS, ids=lambda case: case.name)
def test_bad_arguments_are_refused(case, home, capsys):
    refused(home, capsys, case.arguments, case.code, case.message)


@pytest.mark.parametrize("name", list(MODELS))
def test_bad_models_are_refused(name, home, capsys):
    change, message = MODELS[name]
    model = mlp(layers=4, batch=256, width=16)
    change(model)
    bad = home / "bad.onnx"
    bad.write_bytes(model.SerializeToString())  # unchecked: these are meant to be wrong
    try:
        refused(home, capsys, ask(source="bad.onnx"), MODEL, message)
    finally:
        bad.unlink()


@pytest.mark.parametrize("source", ["in.onnx", "ext.onnx"])
def test_a_full_disk_leaves_nothing_behind(source, home, capsys, monkeypatch):
    """Files may grow to 1.5 kB only: less than the model, more than its data."""
    monkeypatch.setattr(runtime, "available", lambda: False)  # its scratch files would be the first to fail
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, hard))
    try:
        arguments = [source, "sub/out.onnx", "--for", "session", "--budget", "100%", "--verify", "none"]
        refused(home, capsys, arguments, MODEL, "cannot write sub/out.onnx: File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
