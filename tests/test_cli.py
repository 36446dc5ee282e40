"""The command line as users meet it: exit codes, messages of one line, nothing written on refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from onnx_remat.cli import main
from tests.conftest import mlp, model_of

pytest.importorskip("onnxruntime")
node = helper.make_node


def cli(capsys, *arguments):
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp(layers=8, batch=1024, width=32), "in.onnx")
    return tmp_path


def test_a_good_run_prints_verdict_and_table(home, capsys):
    code, out, err = cli(
        capsys, "in.onnx", "out.onnx", "--budget", "60%", "--time-limit", "2s", "--json", "r.json", "-v"
    )
    assert code == 0 and err == ""
    assert out.startswith("peak ") and "budget" in out.splitlines()[0] and "extra compute" in out
    report = json.loads((home / "r.json").read_text())
    assert report["schema"] == "onnx-remat/report/1"
    assert report["after"]["total"] <= report["budget"]
    for peak in (report["before"], report["after"]):
        parts = ("inputs", "weights", "activations", "outputs", "workspace")
        assert sum(peak[part] for part in parts) == peak["total"]
    onnx.checker.check_model("out.onnx", full_check=True)


def test_json_to_standard_output_is_only_json(home, capsys):
    code, out, _ = cli(
        capsys, "in.onnx", "out.onnx", "--budget", "70%", "--time-limit", "1s", "--json", "-", "--dry-run"
    )
    assert code == 0 and json.loads(out)["budget"] > 0
    assert not (home / "out.onnx").exists()


def test_quiet_is_quiet(home, capsys):
    assert cli(capsys, "in.onnx", "out.onnx", "--budget", "70%", "--time-limit", "1s", "-q") == (0, "", "")


def _save(name, model):
    Path(name).write_bytes(model.SerializeToString())  # unchecked: these are meant to be wrong


def _bad_models():
    base = mlp(layers=2, batch=8, width=4)
    models = {}

    def variant(name, change):
        model = onnx.ModelProto()
        model.CopyFrom(base)
        change(model)
        models[name] = model

    variant("undefined", lambda m: m.graph.node[0].input.__setitem__(0, "ghost"))
    variant("twice", lambda m: m.graph.node.append(m.graph.node[0]))
    variant("unsorted", lambda m: m.graph.node.insert(0, m.graph.node.pop()))
    variant("dangling", lambda m: m.graph.output.append(helper.make_tensor_value_info("ghost", 1, [1])))
    variant("no_opset", lambda m: m.ClearField("opset_import"))
    variant("unknown_op", lambda m: m.graph.node[1].__setattr__("op_type", "Tahn"))
    variant("no_loss", lambda m: m.graph.output.pop(0))
    variant("contradiction", lambda m: m.graph.input[0].type.tensor_type.shape.dim[1].__setattr__("dim_value", 5))
    external = onnx.ModelProto()
    external.CopyFrom(base)
    weight = helper.make_tensor("w0", 1, [4, 4], np.zeros(16, np.float32).tobytes(), raw=True)
    del external.graph.input[2]
    weight.data_location = onnx.TensorProto.EXTERNAL
    weight.ClearField("raw_data")
    weight.external_data.add(key="location", value="../secret.bin")
    external.graph.initializer.append(weight)
    models["traversal"] = external
    missing = onnx.ModelProto()
    missing.CopyFrom(external)
    missing.graph.initializer[-1].external_data[0].value = "missing.bin"
    models["missing_data"] = missing
    return models


BAD_MODELS = _bad_models()
MESSAGES = {
    "undefined": "ghost", "twice": "defined twice", "unsorted": "topological", "dangling": "ghost",
    "no_opset": "operator set", "unknown_op": "Tahn", "no_loss": "--loss", "contradiction": "shape inference",
    "traversal": "outside the model's folder", "missing_data": "missing.bin",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(BAD_MODELS))
def test_bad_models_are_refused_by_name(name, home, capsys):
    _save("bad.onnx", BAD_MODELS[name])
    before = sorted(path.name for path in home.iterdir())
    code, out, err = cli(capsys, "bad.onnx", "out.onnx", "--budget", "50%", "--time-limit", "1s")
    assert code == 4, err
    assert MESSAGES[name] in err and len(err.splitlines()) == 1 and out == ""
    assert sorted(path.name for path in home.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["in.onnx", "out.onnx"], 2, "--budget"),
        (["in.onnx", "out.onnx", "--budget", "0GB"], 2, "greater than zero"),
        (["in.onnx", "out.onnx", "--budget", "-4GB"], 2, "budget"),
        (["in.onnx", "out.onnx", "--budget", "NaN"], 2, "not a size"),
        (["in.onnx", "out.onnx", "--budget", "4"], 2, "not a size"),
        (["in.onnx", "out.onnx", "--budget", "1e400GB"], 2, "finite"),
        (["in.onnx", "out.onnx", "--budget", "99999999999TB"], 2, "larger"),
        (["in.onnx", "out.onnx", "--budget", "50%", "--selector", "serch"], 2, "did you mean 'search'"),
        (["in.onnx", "out.onnx", "--budget", "50%", "--dim", "b=3"], 2, "no symbolic dimension 'b'"),
        (["in.onnx", "out.onnx", "--budget", "50%", "--dim", "b"], 2, "NAME=VALUE"),
        (["in.onnx", "out.onnx", "--budget", "50%", "--loss", "los"], 2, "did you mean 'loss'"),
        (["in.onnx", "out.onnx", "--budget", "50%", "--keep", "zz1"], 2, "--keep"),
        (["in.onnx", "out.onnx", "--budget", "50%", "--checkpoint", "zz1"], 2, "--checkpoint"),
        (["in.onnx", "out.onnx", "--budget", "50%", "--costs", "a1000"], 2, "neither a preset"),
        (["in.onnx", "out.onnx", "--budget", "50%", "--costs", "in.onnx"], 2, "in.onnx"),
        (["in.onnx", "out.onnx", "--budget", "50%", "--time-limit", "soon"], 2, "not a time"),
        (["in.onnx", "in.onnx", "--budget", "50%", "--force"], 2, "is the input"),
        (["in.onnx", "old.onnx", "--budget", "50%"], 2, "--force"),
        (["in.onnx", ".", "--budget", "50%"], 2, "directory"),
        (["in.onnx", "no/where.onnx", "--budget", "50%"], 2, "does not exist"),
        (["ghost.onnx", "out.onnx", "--budget", "50%"], 4, "ghost.onnx"),
        ([".", "out.onnx", "--budget", "50%"], 4, "directory"),
        (["empty.onnx", "out.onnx", "--budget", "50%"], 4, "empty"),
        (["text.onnx", "out.onnx", "--budget", "50%"], 4, "not an ONNX model"),
        (["cut.onnx", "out.onnx", "--budget", "50%"], 4, "truncated"),
        (["in.onnx", "out.onnx", "--budget", "5%"], 3, "no schedule"),
    ],
)
def test_bad_arguments_are_refused(arguments, code, message, home, capsys):
    (home / "old.onnx").write_bytes(b"old")
    (home / "empty.onnx").write_bytes(b"")
    (home / "text.onnx").write_text("hello, this is no model\n" * 20)
    (home / "cut.onnx").write_bytes((home / "in.onnx").read_bytes()[:-300])
    before = {name: (home / name).read_bytes() for name in sorted(path.name for path in home.iterdir())}
    got, out, err = cli(capsys, *arguments)
    assert (got, out) == (code, ""), err
    assert message in err and len(err.splitlines()) == 1
    assert {name: (home / name).read_bytes() for name in sorted(path.name for path in home.iterdir())} == before


def test_collection_keeps_the_users_list(home, capsys):
    keep = [argument for i in (1, 3, 5) for argument in ("--checkpoint", f"a{i}")]
    code, _, err = cli(capsys, "in.onnx", "out.onnx", "--budget", "90%", "--selector", "collection", *keep)
    assert code == 0, err
    again = {
        p.value for n in onnx.load("out.onnx").graph.node for p in n.metadata_props if p.key.endswith("recompute_of")
    }
    assert {"act0", "act2", "act4"} <= again and not again & {"act1", "act3", "act5"}


def test_help_examples_and_module_entry():
    done = subprocess.run([sys.executable, "-m", "onnx_remat", "--help"], capture_output=True, text=True, check=True)
    assert "examples:" in done.stdout and "--budget SIZE" in done.stdout


def test_importing_the_package_is_light():
    heavy = ["onnx", "onnxruntime", "torch", "numba", "networkx"]
    code = f"import onnx_remat, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_hash_seed_does_not_matter(home):
    outputs = []
    for seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-m", "onnx_remat", "in.onnx", f"{seed}.onnx", "--budget", "60%", "--time-limit", "2s"],
            env=os.environ | {"PYTHONHASHSEED": seed}, check=True,
        )  # fmt: skip
        outputs.append((home / f"{seed}.onnx").read_bytes())
    assert outputs[0] == outputs[1]


def test_external_data_is_carried_along(home, capsys):
    model = mlp(layers=8, batch=1024, width=32)
    weight = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    inputs = [v for v in model.graph.input if v.name != "w3"]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w3"))
    onnx.save(model, "ext.onnx", save_as_external_data=True, location="ext.bin", size_threshold=100)
    (home / "sub").mkdir()
    code, _, err = cli(capsys, "ext.onnx", "sub/out.onnx", "--budget", "70%", "--time-limit", "1s", "--verify", "run")
    assert code == 0, err
    saved = onnx.load("sub/out.onnx")
    tensor = next(t for t in saved.graph.initializer if t.name == "w3")
    assert np.array_equal(onnx.numpy_helper.to_array(tensor), weight)
    assert (home / "sub" / "ext.bin").read_bytes() == (home / "ext.bin").read_bytes()


def test_metadata_functions_and_docs_survive(home, capsys):
    model = mlp(layers=8, batch=1024, width=32)
    model.metadata_props.add(key="author", value="me")
    model.doc_string = "a model"
    model.graph.node[1].doc_string = "an activation"
    model.graph.node[1].metadata_props.add(key="phase", value="forward")
    square = helper.make_function(
        "my", "Square", ["a"], ["b"], [node("Mul", ["a", "a"], ["b"])], [helper.make_opsetid("", 20)]
    )
    model.functions.append(square)
    model.opset_import.append(helper.make_opsetid("my", 1))
    for n in model.graph.node:
        if n.name == "sq":
            n.CopyFrom(node("Square", ["e"], ["ee"], domain="my", name="sq"))
    onnx.save(model, "rich.onnx")
    code, _, err = cli(
        capsys,
        "rich.onnx",
        "out.onnx",
        "--budget",
        "60%",
        "--time-limit",
        "1s",
        "--loss",
        "loss",
        "--verify",
        "run",
    )
    assert code == 0, err
    saved = onnx.load("out.onnx")
    kept = {p.key: p.value for p in saved.metadata_props}
    assert kept["author"] == "me" and kept["onnx_remat.budget_bytes"] and kept["onnx_remat.version"]
    assert saved.doc_string == "a model" and saved.functions[0].name == "Square"
    assert (saved.ir_version, saved.opset_import[0].version) == (model.ir_version, 20)
    assert next(n for n in saved.graph.node if n.name == "act0").doc_string == "an activation"
    clones = [n for n in saved.graph.node if any(p.key == "onnx_remat.recompute_of" for p in n.metadata_props)]
    assert clones and len({n.name for n in saved.graph.node if n.name}) == len([n for n in saved.graph.node if n.name])


def test_unsupported_opset_is_refused(home, capsys):
    x = [64, 64]
    nodes = [
        node("Tanh", ["x"], ["a"]),
        node("Tanh", ["a"], ["b"]),
        node("Mul", ["a", "b"], ["c"]),
        node("ReduceSum", ["c"], ["loss"], keepdims=0),
    ]
    _save("old.onnx", model_of(nodes, {"x": x}, {"loss": []}, opset=6, ir_version=3))
    code, _, err = cli(capsys, "old.onnx", "out.onnx", "--budget", "99%", "--time-limit", "1s")
    assert code in (3, 4) and len(err.splitlines()) == 1
