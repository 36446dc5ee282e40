"""Messages name arguments in Python and flags on the command line."""

import ast
import copy
import json
import pickle
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnx_remat
from onnx_remat.app import bench, cli
from onnx_remat.app.flags import flag_names, in_flags
from onnx_remat.errors import OnnxRematError, UsageError
from onnx_remat.findings.estimate import estimate
from onnx_remat.findings.sweep import sweep
from onnx_remat.messages import Message, Setting, Word
from onnx_remat.options import Options
from onnx_remat.split import split_step
from scripts import options
from tests.support.graphs import mlp

ROOT = Path(onnx_remat.__file__).parent
COMMANDS = {"cli.py", "commands.py", "flags.py", "completion.py"}
OF_COMMANDS = ("_option", "add_argument", "Parser", "check_files")


def test_every_option_has_a_flag_that_the_command_line_takes(capsys):
    assert {field.name for field in fields(Options)} - {"progress"} <= set(flag_names())
    taken = set()
    for command, help_of in ((cli, []), (cli, ["sweep"]), (cli, ["check"]), (bench, [])):
        with pytest.raises(SystemExit):
            command.main([*help_of, "--help"])
        taken |= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert set(flag_names().values()) <= taken


@pytest.mark.parametrize(
    "words", [["IN", "--budget", "60%", "OUT"], ["--budget", "60%", "IN", "OUT"], ["IN", "OUT", "--budget", "60%"]]
)
def test_flags_stand_anywhere(words):
    given = cli.build_parser().parse_args(words)
    assert (given.input, given.output, given.budget) == ("IN", "OUT", "60%")


def test_the_guide_lists_every_option():
    page = options.PAGE.read_text(encoding="utf-8")
    assert options.rendered(page) == page and "| `--costs" in page, "python -m scripts.options"


def test_the_docstring_of_rewrite_model_names_every_option():
    described = onnx_remat.rewrite_model.__doc__
    assert [field.name for field in fields(Options) if f"`{field.name}`" not in described] == []


@pytest.mark.parametrize("command", ["", *cli.COMMANDS, "onnx-remat-bench"])
def test_the_guide_names_every_flag_of_every_command(command, capsys):
    """A command with a section or a row of its own; flags of planning are in the table of options."""
    guide = options.PAGE.read_text(encoding="utf-8")
    words = [command] if command in cli.COMMANDS else []
    with pytest.raises(SystemExit):
        (bench if command == "onnx-remat-bench" else cli).main([*words, "--help"])
    flags = set(re.findall(r"(?m)^  (?:-\w, )?(--[a-z-]+|-\w)", capsys.readouterr().out)) - {"--help", "--version"}
    short = {"--verbose": "-v", "--quiet": "-q"}
    assert flags and [flag for flag in flags if f"`{short.get(flag, flag)}" not in guide] == []
    assert re.search(rf"(?m)^\|.*`{command}`.*\|", guide) if command else "onnx-remat rewrite" in guide


def messages(file: Path) -> list[tuple[int, str]]:
    """Texts in a file that someone may read: no docstrings, and no help of flags."""
    tree = ast.parse(file.read_text())
    aside = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):  # a docstring
            aside.add(node.value)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in OF_COMMANDS:
            aside.update(ast.walk(node))
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in aside
    ]


def test_what_python_calls_names_no_flag():
    flags = re.compile(r"(?<!split )(?<![\w-])--[a-z]")  # "onnx-remat split --accumulate" is a command
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for file in sorted(ROOT.rglob("*.py"))
        if file.name not in COMMANDS
        for line, text in messages(file)
        if flags.search(text)
    ]
    assert not found, found


def test_what_is_said_names_settings_as_data():
    """A setting in a text of its own would stay in Python's words on the command line."""
    named = re.compile(rf"(?<![\w.'/-])({'|'.join([*flag_names(), 'example_inputs', 'check', 'wrt'])})=(?!=)")
    autodiff = ROOT.parent / "converters" / "autodiff"
    found = [
        f"{file}:{line}: {text}"
        for file in sorted([*ROOT.rglob("*.py"), *autodiff.rglob("*.py")])
        for line, text in messages(file)
        if named.search(text)
    ]
    assert not found, found


def two_losses() -> onnx.ModelProto:
    return onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["" : 20]> g (float[2] x) => (float one, float two, float[2] y)'
        "{ one = ReduceSum<keepdims = 0>(x) two = ReduceMax<keepdims = 0>(x) y = Add(one, x) }"
    )


CASES = {
    "no value to keep": ({"keep": ["nothing"]}, "--keep nothing", "keep=: no node", "--keep: no node"),
    "no such loss": ({"loss": "los"}, "--loss los", "loss=: there is no value", "--loss: there is no value"),
    "checkpoints": ({"checkpoints": ["h"]}, "--checkpoint h", "checkpoints= is for selector='collection'",
                    "--checkpoint is for --selector collection"),
    "no such checkpoint": ({"checkpoints": ["no"], "selector": "collection"}, "--checkpoint no --selector collection",
                           "checkpoints=: no node", "--checkpoint: no node"),
    "arena": ({"arena": True, "run_by": "loop"}, "--arena --for loop", "arena=True is for run_by='session'",
              "--arena is for --for session"),
    "offload": ({"offload": True}, "--offload", "use it with provider='cuda', run_by='loop'",
                "use it with --provider cuda, --for loop"),
    "bandwidth": ({"host_bandwidth": "9GB"}, "--host-bandwidth 9GB",
                  "host_bandwidth= is for offload=True and offload_state=True",
                  "--host-bandwidth is for --offload and --offload-state"),
    "workspace": ({"cudnn_workspace": "5", "provider": "cuda"}, "--cudnn-workspace 5 --provider cuda",
                  "cudnn_workspace='5' is not a size in bytes", "--cudnn-workspace 5 is not a size in bytes"),
    "bandwidth without a unit": (
        {"host_bandwidth": "9", "offload": True, "provider": "cuda", "run_by": "loop"},
        "--host-bandwidth 9 --offload --provider cuda --for loop",
        "host_bandwidth='9' is not a bandwidth; use e.g. 25GB",
        "--host-bandwidth 9 is not a bandwidth; use e.g. 25GB",
    ),
    "costs": ({"costs": "no.json"}, "--costs no.json", "costs='no.json' is neither", "--costs no.json is neither"),
    "no slot for the op": ({"allow_recompute": ["Op"]}, "--allow-recompute Op", "allow_recompute=: 'Op'",
                           "--allow-recompute: 'Op'"),
    "verify": ({"verify": "run", "provider": "cuda"}, "--verify run --provider cuda",
               "verify='run' measures the CPU's memory: not with provider='cuda'",
               "--verify run measures the CPU's memory: not with --provider cuda"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_message_in_both_fronts(case, tmp_path, capsys):
    options, flags, in_python, typed = CASES[case]
    with pytest.raises(OnnxRematError) as caught:
        onnx_remat.rewrite_model(mlp(), "90%", **options)
    assert in_python in str(caught.value) and "--" not in str(caught.value)
    onnx.save(mlp(), tmp_path / "in.onnx")
    code = cli.main([str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx"), "--budget", "90%", *flags.split()])
    shown = capsys.readouterr().err
    assert code == caught.value.exit_code and typed in shown
    assert not [name for name in flag_names() if f"{name}=" in shown]


def test_which_loss_is_asked_for_in_both_fronts(tmp_path, capsys):
    with pytest.raises(OnnxRematError, match=r"name it with loss=$"):
        onnx_remat.rewrite_model(two_losses(), "90%")
    with pytest.raises(OnnxRematError, match=r"name it with loss=$"):
        split_step(two_losses())
    onnx.save(two_losses(), tmp_path / "in.onnx")
    for command in (["rewrite", "{}/in.onnx", "{}/o.onnx", "--budget", "90%"], ["split", "{}/in.onnx"]):
        assert cli.main([word.format(tmp_path) for word in command]) == 4
        assert capsys.readouterr().err.endswith("name it with --loss\n")


def test_patterns_in_both_fronts(tmp_path, capsys):
    old = onnx.parser.parse_model(
        '<ir_version: 7, opset_import: ["" : 9]> g (float[2] x) => (float[2] y) { y = Neg(x) }'
    )
    with pytest.raises(OnnxRematError, match=r"^patterns=False needs opset"):
        onnx_remat.rewrite_model(old, "90%", patterns=False)
    onnx.save(old, tmp_path / "in.onnx")
    assert cli.main([str(tmp_path / "in.onnx"), str(tmp_path / "o.onnx"), "--budget", "90%", "--no-patterns"]) == 4
    assert "error: --no-patterns needs opset" in capsys.readouterr().err


def test_what_other_commands_refuse_in_both_fronts(tmp_path, capsys):
    with pytest.raises(OnnxRematError, match=r"^jobs= must be at least 1"):
        sweep(mlp(), jobs=0)
    with pytest.raises(OnnxRematError, match=r"leave run_by= out"):
        bench.benchmark(tmp_path / "in.onnx", "90%", run_by="loop")
    onnx.save(mlp(), tmp_path / "in.onnx")
    assert cli.main(["sweep", str(tmp_path / "in.onnx"), "--jobs", "0"]) == 2
    assert "error: --jobs must be at least 1, not 0" in capsys.readouterr().err
    assert bench.main([str(tmp_path / "in.onnx"), "--budget", "90%", "--for", "loop"]) == 2
    assert "leave --for out" in capsys.readouterr().err
    (tmp_path / "out.onnx").touch()
    assert cli.main([str(tmp_path / "in.onnx"), str(tmp_path / "out.onnx"), "--budget", "90%"]) == 2
    assert "out.onnx exists: pass --force to replace it" in capsys.readouterr().err


def test_reports_in_both_fronts(tmp_path, capsys):
    found = estimate(mlp())
    assert f"budget='{found.first_look}B'" in found.to_text()
    onnx.save(mlp(), tmp_path / "in.onnx")
    assert cli.main(["estimate", str(tmp_path / "in.onnx")]) == 0
    assert capsys.readouterr().out.strip() == in_flags(found.to_text())


def test_what_is_an_argument_and_what_is_not():
    assert in_flags("/data/loss=3.onnx exists") == "/data/loss=3.onnx exists"
    assert in_flags(Message("{} is {}", "budget=5 {}", Setting("costs", "/a b/c"))) == "budget=5 {} is --costs '/a b/c'"
    assert in_flags(Message("give {}, {} or {}", *map(Setting, ("keep", "loss", "memory_limit")))) == (
        "give --keep, --loss or memory_limit="
    )
    late = Message("{} is too short: it takes about {:.0f} s", Setting("time_limit", 1.0), 2.5)
    assert in_flags(late) == "--time-limit 1s is too short: it takes about 2 s"


@pytest.mark.parametrize(
    ("setting", "python", "typed"),
    [
        (Setting("time_limit", 2.5), "time_limit=2.5", "--time-limit 2.5s"),
        (Setting("budget", np.int64(5)), "budget=5", "--budget 5B"),
        (Setting("budget", "5B"), "budget='5B'", "--budget 5B"),
        (Setting("effort", Word("N")), "effort=N", "--effort N"),
        (Setting("dims"), "dims=", "--dim"),
        (Setting("dims", {"n": 3, "m": Word("N")}), "dims={'n': 3, 'm': N}", "--dim n=3 --dim m=N"),
    ],
)
def test_a_setting_in_both_fronts(setting, python, typed):
    assert (str(setting), in_flags(Message("{}", setting))) == (python, typed)


def test_messages_survive_what_texts_do():
    """Reports are copied on their way to JSON, errors are sent between processes."""
    error = UsageError("{} {{}}; {}", Setting("effort", 3), Message("{} or {}", Setting("keep"), Setting("effort", 60)))
    for again in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert str(again) == "effort=3 {}; keep= or effort=60" and again.settings == {"effort": 60}
        assert in_flags(again.message) == "--effort 3 {}; --keep or --effort 60"
    assert json.dumps(error.message) == '"effort=3 {}; keep= or effort=60"'
    assert UsageError("a {brace}").settings == {} and str(UsageError("a {brace}")) == "a {brace}"
