"""Command lines in README, pages and help: the ones to paste run, every other one is parsed by the command it names."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onnx_remat.app import bench, cli
from onnx_remat.app.flags import Parser
from tests.docs.test_pages import PAGES, ROOT

_INLINE = r"`((?:onnx-remat|onnx-remat-bench|python3? (?:-m )?[^\s`]*[./][^\s`]*)(?:\s[^`]+)?)`"


def commands(page: Path) -> list[str]:
    """Indented lines and inline code that begin with a command, comments left out."""
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))
    lines = [line.strip() for line in text.splitlines() if line.startswith("    ") and "`" not in line]
    lines += [" ".join(code.split()) for code in re.findall(_INLINE, text)]
    return [part.strip() for line in lines for part in line.split("&&") if is_command(part)]


def is_command(text: str) -> bool:
    first = text.split()[:1]
    return bool(first) and Path(first[0]).name in ("onnx-remat", "onnx-remat-bench", "python", "python3")


class Parsed(Exception):
    """The arguments are good; nothing runs."""


ALL = list(dict.fromkeys(command for page in PAGES for command in commands(page)))
OURS = [command for command in ALL if "onnx-remat" in Path(command.split()[0]).name and len(command.split()) > 1]
MODULES = [command for command in ALL if command not in OURS and not command.startswith("onnx-remat")]


@pytest.mark.parametrize("command", OURS)
def test_our_commands_are_parsed(command, monkeypatch):
    """By their own parsers: unknown flags, missing arguments and unknown commands are errors."""
    parse = Parser.parse_args

    def only_parse(self, *arguments, **more):
        parse(self, *arguments, **more)
        raise Parsed

    monkeypatch.setattr(Parser, "parse_args", only_parse)
    name, *arguments = shlex.split(command, comments=True)
    main = bench.main if Path(name).name == "onnx-remat-bench" else cli.main
    if len(arguments) == 1 and arguments[0] in cli.COMMANDS:
        return  # a command's name in running text
    if arguments in (["--help"], ["-h"]):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        return
    with pytest.raises(Parsed):
        main(arguments)


@pytest.mark.parametrize("command", MODULES)
def test_python_commands_name_files_that_are_there_and_flags_that_they_have(command):
    _, *arguments = shlex.split(command, comments=True)
    if arguments[:2] in (["-m", "venv"], ["-m", "http.server"]):
        return
    if arguments[0] == "-m":
        where = arguments[1].replace("onnx_remat.converters", "converters").replace(".", "/")
        files = [path for path in (ROOT / f"{where}.py", ROOT / where / "__main__.py") if path.exists()]
        if not files and "/" not in where:
            assert where == "pytest"
            return
    else:
        files = [ROOT / arguments[0]]
    assert files and files[0].exists(), command
    source = files[0].read_text(encoding="utf-8") + '"--help"'
    if arguments[1:2] == ["scripts.bench"] and arguments[2] not in ("--list", "TABLE"):
        # a table's keywords are its options
        table = ROOT / "scripts" / "tables" / f"{arguments[2].replace('-', '_')}.py"
        keywords = re.findall(r"[(,]\s*(\w+): \w+ = ", table.read_text(encoding="utf-8"))
        source += "".join(f'"--{word.replace("_", "-")}"' for word in keywords)
    for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", command):
        assert f'"{flag}"' in source, flag


def test_commands_are_found():
    """The two above look at something: README's table of commands, at least."""
    assert any(command.startswith("onnx-remat sweep") for command in OURS)
    assert any("scripts.bench samples" in command for command in MODULES)


def test_a_flag_that_does_not_exist_is_found():
    with pytest.raises(AssertionError, match="--no-such-flag"):
        test_python_commands_name_files_that_are_there_and_flags_that_they_have(
            "python -m scripts.bench samples --no-such-flag"
        )


@pytest.mark.slow
def test_the_examples_of_the_help_run_as_pasted(tmp_path, capsys):
    shutil.copytree(ROOT / "sample_models", tmp_path / "sample_models")
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out.partition("three examples")[2].partition("\n\n")[0]
    examples = [line.split() for line in text.splitlines()[1:]]
    assert [len(examples), {line[0] for line in examples}] == [3, {"onnx-remat"}]
    for _, *arguments in examples:
        done = subprocess.run(
            [sys.executable, "-m", "onnx_remat", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, ""), arguments
        assert done.stdout


@pytest.mark.parametrize("table", ["anytime", "layers"])
def test_tables_of_the_search_know_its_selectors_by_themselves(table):
    """They were registered by other imports, until those were gone."""
    code = f"from scripts.tables import {table}; print({table}.get('auto').__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "auto"), done.stderr
