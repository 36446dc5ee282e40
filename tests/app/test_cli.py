"""The command line as users meet it: exit codes, messages of one line, nothing written on refusal."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

import onnx_remat
from onnx_remat import errors, files, plan_model, rewrite_model
from onnx_remat.app.cli import COMMANDS, main
from onnx_remat.errors import BudgetInfeasibleError
from onnx_remat.plan import selectors
from tests.support.graphs import mlp
from tests.support.slow import few

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
        capsys, "in.onnx", "out.onnx", "--for", "session", "--budget", "60%", "--effort", "1s", "--json", "r.json", "-v"
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
        capsys,
        "in.onnx",
        "out.onnx",
        "--for",
        "session",
        "--budget",
        "70%",
        "--effort",
        "1s",
        "--json",
        "-",
        "--dry-run",
    )
    assert code == 0 and json.loads(out)["budget"] > 0
    assert not (home / "out.onnx").exists()


def test_the_command_alone_prints_its_help(home, capsys):
    code, out, _ = cli(capsys)
    assert code == 0 and "three examples" in out


def test_a_dry_run_needs_no_out(home, capsys):
    before = sorted(home.iterdir())
    code, out, _ = cli(capsys, "in.onnx", "--budget", "100%", "--dry-run", "--effort", "0.1")
    assert code == 0 and out.endswith("wrote nothing\n")
    assert sorted(home.iterdir()) == before


def test_a_report_prints_as_its_text(home):
    report = rewrite_model("in.onnx", "100%", effort=0.1).report
    assert str(report) == report.to_text()


def test_the_package_lists_its_public_names():
    assert dir(onnx_remat) == sorted(onnx_remat.__all__)


def test_every_error_is_a_public_name():
    classes = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}
    assert "RankLostError" in classes and classes <= set(dir(onnx_remat))
    assert all(getattr(onnx_remat, name) is getattr(errors, name) for name in classes)


def test_a_refusal_names_flags_on_the_command_line_and_arguments_in_python(home, capsys):
    for flags, advice in (
        (("--budget", "600kB"), r"600\.0 kB is impossible: below .+ proved; try --budget \d+B \(\d"),
        (("--budget", "710kB", "--effort", "1"), r"with --effort 1.+ try --budget \d+B \(.+ --effort 2 to go lower"),
        (("--budget", "710kB", "--selector", "sqrt_n"), r"try --budget \d+B .+ or --selector auto to go lower"),
    ):  # fmt: skip
        code, _, err = cli(capsys, "in.onnx", "out.onnx", "--for", "session", *flags)
        assert code == 3 and re.search(advice, err), err
        assert "budget=" not in err
    with pytest.raises(BudgetInfeasibleError, match=r"try budget=\d+ \(.+ or effort=2 to go lower") as caught:
        plan_model("in.onnx", "710kB", run_by="session", effort=1)
    assert "--" not in str(caught.value)


def test_a_mistyped_command_is_reported(home, capsys):
    code, _, err = cli(capsys, "chekc", "in.onnx")
    assert (code, err) == (2, "onnx-remat: error: no command and no file 'chekc'; did you mean 'check'?\n")
    for word, hint in (
        ("frobnicate", ": onnx-remat -h lists the commands"),
        ("bench", "; did you mean 'onnx-remat-bench'?"),
    ):
        code, _, err = cli(capsys, word, "in.onnx", "--budget", "60%")
        assert (code, err) == (2, f"onnx-remat: error: no command and no file {word!r}{hint}\n")
    code, _, err = cli(capsys, "rewrite", "frobnicate", "out.onnx", "--budget", "60%")
    assert (code, err) == (4, "onnx-remat: error: cannot read frobnicate: No such file or directory\n")
    (home / "swep").write_bytes((home / "in.onnx").read_bytes())
    assert cli(capsys, "swep", "out.onnx", "--for", "session", "--budget", "70%", "--effort", "1s", "-q") == (0, "", "")


def test_a_flag_of_another_command_is_not_taken_for_an_unlike_one(home, capsys):
    code, _, err = cli(capsys, "estimate", "in.onnx", "--effort", "1")
    assert (code, err) == (2, "onnx-remat estimate: error: unrecognized arguments: --effort 1\n")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (
            ("--budget", "60%", "--selectr", "auto"),
            "arguments: --selectr auto; did you mean '--selector'?",
        ),
        (("--budgt", "60%"), "required: --budget; did you mean '--budget'?"),
        (("--budgt=60%",), "required: --budget; did you mean '--budget'?"),
        (("--budget", "4", "GB"), "unrecognized arguments: GB; write 4GB, without the space"),
        (("--budget", "60%", "stray"), "unrecognized arguments: stray\n"),
        (("--budget", "60%", "--zzz"), "unrecognized arguments: --zzz\n"),
        (("--budget", "60%", "--verify", "all"), "(choose from"),
    ],
)
def test_what_was_meant_by_unknown_words_is_stated(home, capsys, words, meant):
    code, _, err = cli(capsys, "in.onnx", "out.onnx", *words)
    assert code == 2 and meant in err and len(err.splitlines()) == 1
    assert ("did you mean" in err, "write" in err) == ("did you mean" in meant, "write" in meant)


def test_quiet_is_quiet(home, capsys):
    assert cli(capsys, "in.onnx", "out.onnx", "--for", "session", "--budget", "70%", "--effort", "1s", "-q") == (
        0,
        "",
        "",
    )


def test_collection_keeps_the_users_list(home, capsys):
    keep = [argument for i in (1, 3, 5) for argument in ("--checkpoint", f"a{i}")]
    code, _, err = cli(
        capsys, "in.onnx", "out.onnx", "--for", "session", "--budget", "90%", "--selector", "collection", *keep
    )
    assert code == 0, err
    again = {
        p.value for n in onnx.load("out.onnx").graph.node for p in n.metadata_props if p.key.endswith("recompute_of")
    }
    assert {"act0", "act2", "act4"} <= again and not again & {"act1", "act3", "act5"}


def test_what_was_written_is_named(home, capsys):
    reports = ["--json", "r.json", "--plot", "p.html", "--plot", "p.pickle"]
    code, out, _ = cli(capsys, "in.onnx", "out.onnx", "--for", "session", "--budget", "100%", *reports)
    assert code == 0 and out.splitlines()[-1] == "wrote out.onnx, r.json, p.html, p.pickle"
    assert all((home / name).exists() for name in ("out.onnx", "r.json", "p.html", "p.pickle"))
    assert "(unchanged)" in out
    code, out, _ = cli(capsys, "in.onnx", "other.onnx", "--for", "session", "--budget", "100%", "--dry-run")
    assert code == 0 and out.splitlines()[-1] == "wrote nothing" and not (home / "other.onnx").exists()


@pytest.mark.parametrize(
    ("budget", "meant"), [("0.6", "60%"), ("60", "60%"), ("60", "60MB"), ("4G", "4GB"), ("4g", "4GiB"), ("x", "4GB")]
)
def test_a_budget_without_its_unit_is_answered_with_what_was_meant(home, capsys, budget, meant):
    code, _, err = cli(capsys, "in.onnx", "out.onnx", "--for", "session", "--budget", budget)
    assert code == 2 and meant in err.partition("write ")[2]


def test_help_names_every_command_and_selector(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert all(f"onnx-remat {name} " in out for name in COMMANDS)
    assert all(f"\n  {name} " in out for name in selectors.names())
    assert "onnx-remat -h describes" not in " ".join(out.split())
    table = (Path(__file__).parents[2] / "docs/reference/exit-codes.md").read_text()
    codes = re.findall(r"(?m)^\| (\d+) \|", table)
    assert all(re.search(rf"[ \n]{code} [a-z]", out.partition("exit codes:")[2]) for code in codes) and "130" in codes


def test_help_examples_and_module_entry():
    done = subprocess.run([sys.executable, "-m", "onnx_remat", "--help"], capture_output=True, text=True, check=True)
    assert "three examples" in done.stdout and "--budget SIZE" in done.stdout


def test_importing_the_package_is_light():
    heavy = ["onnx", "onnxruntime", "torch", "numba", "networkx"]
    code = f"import onnx_remat, sys; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_hash_seed_does_not_matter(home):
    outputs = []
    for seed in ("1", "2"):
        flags = ["--for", "session", "--budget", "60%", "--effort", "2s"]
        subprocess.run(
            [sys.executable, "-m", "onnx_remat", "in.onnx", f"{seed}.onnx", *flags],
            env=os.environ | {"PYTHONHASHSEED": seed}, check=True,
        )  # fmt: skip
        outputs.append((home / f"{seed}.onnx").read_bytes())
    assert outputs[0] == outputs[1]


@pytest.mark.slow
def test_external_data_is_carried_along(home, capsys):
    model = mlp(layers=8, batch=1024, width=32)
    weight = np.random.default_rng(0).standard_normal((32, 32)).astype(np.float32)
    inputs = [v for v in model.graph.input if v.name != "w3"]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w3"))
    onnx.save(model, "ext.onnx", save_as_external_data=True, location="ext.bin", size_threshold=100)
    (home / "sub").mkdir()
    code, _, err = cli(
        capsys, "ext.onnx", "sub/out.onnx", "--for", "session", "--budget", "70%", "--effort", "0.3", "--verify", "run"
    )
    assert code == 0, err
    saved = onnx.load("sub/out.onnx")
    tensor = next(t for t in saved.graph.initializer if t.name == "w3")
    assert np.array_equal(onnx.numpy_helper.to_array(tensor), weight)
    assert (home / "sub" / "ext.bin").read_bytes() == (home / "ext.bin").read_bytes()


@pytest.mark.slow
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
        "--for",
        "session",
        "--budget",
        "60%",
        "--effort",
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


def test_a_model_older_than_the_runtime_knows_is_refused_with_its_node(home, capsys):
    onnx.save(mlp(layers=8, batch=512, width=32, opset=6), "old.onnx")
    code, _, err = cli(capsys, "old.onnx", "out.onnx", "--for", "session", "--budget", "70%", "--effort", "1s")
    assert code == 4 and len(err.splitlines()) == 1 and "Sub(6) node with name 'err'" in err
    assert not Path("out.onnx").exists()


@pytest.mark.slow
def test_a_command_leaves_nothing_that_nobody_asked_for(tmp_path):
    """ONNX Runtime writes files of its telemetry into the home folder and the one for temporary files."""
    for name in ("home", "here", "scratch"):
        (tmp_path / name).mkdir()
    onnx.save(mlp(layers=2, batch=4), tmp_path / "a.onnx")
    command = [sys.executable, "-m", "onnx_remat", str(tmp_path / "a.onnx"), "b.onnx", "--budget", "100%", "-q"]
    homes = {"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "scratch"), "XDG_CACHE_HOME": ""}
    known = {k: v for k, v in os.environ.items() if k != "ORT_DISABLE_TELEMETRY"}
    subprocess.run([*command, "--effort", "0.1"], cwd=tmp_path / "here", env=known | homes, check=True)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"a.onnx", "here/b.onnx"}


@pytest.mark.parametrize("force", few([False, True], [True]))
@pytest.mark.parametrize(
    "command", [["in.onnx", "OUT", "--budget", "100%", "--effort", "0.1"], ["profile", "in.onnx", "OUT", "--runs", "1"]]
)
def test_who_wrote_out_meanwhile_keeps_it_unless_forced(command, force, home, capsys, monkeypatch):
    """OUT is not there when a command begins: another process puts its file there before the end."""
    onnx.save(mlp(layers=2, batch=4), "in.onnx")
    together = files.together

    @contextlib.contextmanager
    def overtaken():
        with together():
            yield
            Path("OUT").write_text("theirs")

    monkeypatch.setattr(files, "together", overtaken)
    code, _, err = cli(capsys, *command, *["--force"] * force)
    assert (Path("OUT").read_bytes() == b"theirs") is not force
    assert code == (0 if force else 2) and ("exists: pass --force" in err) is not force
