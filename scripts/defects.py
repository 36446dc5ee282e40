"""Do the tests of defects found under attack fail on the code that had them, and pass now?

    python -m scripts.defects --save          # about 20 minutes: what hung or took all memory then does so until killed
    python -m scripts.defects --save --only a_profile_of_an_open_dimension_asks_for_it      # the others as saved before

Each commit is unpacked into a folder of its own with today's tests/app/test_defects.py alone, which asks by the command
line and the documented Python and imports nothing of the package.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import onnx

from scripts.results import ROOT, Table, load, save
from tests.support.graphs import mlp

BEFORE = "f8a0527"
"""The last commit before work on these defects began."""

FILES = ("tests/app/test_defects.py", "tests/support/graphs.py")

DEFECTS = {
    "a_batch_normalization_is_recomputed": ("1", "a recomputed BatchNormalization lacked outputs: no file"),
    "a_max_pool_is_recomputed_by_the_same_kernel": ("1", "a recomputed MaxPool was another kernel"),
    "a_gradient_is_right_by_default": ("2", "converted steps hit a wrong fusion of ONNX Runtime"),
    "a_wrong_fusion_is_warned_of_by_node_name": ("2", "wrong fusions in files from elsewhere went unseen"),
    "a_rounding_that_is_lost_is_kept_lost_or_named": ("3", "a node between casts brought a lost rounding back"),
    "feeds_of_verify_run_show_what_plain_ones_hide": ("3", "`--verify run` fed numbers that hide differences"),
    "an_input_with_a_default_is_counted_twice": ("4", "an input with a default was counted once"),
    "a_plan_that_is_kept_is_measured_at_most_at_its_budget": ("4b", "whole pages were measured above the budget"),
    "a_step_that_is_right_is_converted": ("4c", "a step that is right was called wrong"),
    "a_command_names_its_own_options": ("4c", "a message advised an option the command line lacks"),
    "reports_never_go_where_something_lies": ("5", "reports overwrote the result or the weights"),
    "data_outside_the_folder_is_refused": ("6", "external data reached outside the model's folder"),
    "a_flat_vector_of_parameters_costs_nothing": ("7", "a flat vector of parameters took gigabytes"),
    "what_hangs_or_crashes_the_libraries_is_refused": ("8", "native inference hung, crashed or took all memory"),
    "costs_without_end_are_refused": ("8", "`--costs /dev/zero` was read without end"),
    "a_node_of_many_inputs_is_read_in_time": ("8", "time grew with the square of the number of a node's inputs"),
    "bad_models_are_refused_in_a_line": ("9", "broken models ended in tracebacks, or were believed"),
    "bad_arguments_are_refused_in_a_line": ("9", "arguments ended in tracebacks, or took all memory"),
    "a_long_name_is_written_to": ("9", "a long name of OUT was refused after planning"),
    "what_was_planned_is_checked_though_it_was_tampered_with": ("9", "`check` of tampered metadata: a traceback"),
    "letters_that_a_stream_lacks_change_no_exit_code": ("9", "letters that a stream lacks: a traceback"),
    "streams_that_fail_change_no_exit_code": ("9", "a full or closed stream: a wrong exit code"),
    "a_converter_without_its_framework_names_the_extra": ("9", "a missing framework: ModuleNotFoundError"),
    "arguments_are_taken_sensibly_or_refused": ("10", "Python took nonsense, or read a name as letters"),
    "models_and_sizes_are_taken_as_they_come": ("10", "bytearrays and file objects: a TypeError"),
    "a_loop_checks_its_state_first": ("10", "`Loop` failed in the middle of its first step"),
    "a_profile_of_an_open_dimension_asks_for_it": ("10", "`profile` measured a batch of one, unasked"),
    "a_terminated_command_leaves_nothing": ("11", "SIGTERM left scratch folders behind"),
}
"""Test, the number of the defect's group, and what was wrong."""


def unpack(commit: str, folder: Path) -> None:
    """A commit's files, with today's test alone; its kernels are compiled, so that no test waits for them."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
    folder.mkdir()
    subprocess.run(["tar", "x"], cwd=folder, input=packed, check=True)
    shutil.rmtree(folder / "tests")
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    if not (folder / "onnx_remat" / "converters").exists():  # there an install puts them
        (folder / "onnx_remat" / "converters").symlink_to("../converters")
    onnx.save(mlp(layers=12, batch=4096, width=32), folder / "warm.onnx")
    arguments = ["warm.onnx", "warm.out.onnx", "--budget", "70%", "--verify", "run", "-q"]
    python(folder, "onnx_remat", *arguments)


def python(folder: Path, *arguments: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", *arguments], cwd=folder, env=environment, check=False)


def outcomes(folder: Path, names: list[str]) -> dict[str, Counter[str]]:
    """By name of a test, how many of its cases passed and failed."""
    tests = [f"{FILES[0]}::test_{name}" for name in names]
    python(folder, "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "-q", "--junitxml=found.xml", *tests)
    found: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(folder / "found.xml").iter("testcase"):
        bad = {child.tag for child in case} & {"failure", "error", "skipped"}
        name = case.attrib["name"].removeprefix("test_").partition("[")[0]
        found.setdefault(name, Counter())["fails" if bad else "passes"] += 1
    return found


def said(counted: Counter[str]) -> str:
    """
    >>> said(Counter(fails=1)), said(Counter(passes=2, fails=1)), said(Counter(passes=3))
    ('fails', 'fails 1 of 3', 'passes')
    """
    total = counted.total()
    return "passes" if not counted["fails"] else "fails" if total == 1 else f"fails {counted['fails']} of {total}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", action="store_true", help="put the table among the results")
    parser.add_argument("--only", nargs="+", choices=DEFECTS, metavar="NAME", help="these tests alone")
    given = parser.parse_args()
    names = given.only or list(DEFECTS)
    with tempfile.TemporaryDirectory() as scratch:
        found = []
        for commit in (BEFORE, "HEAD"):
            unpack(commit, Path(scratch) / commit)
            found.append(outcomes(Path(scratch) / commit, names))
    known = {row[2]: row for row in load("defects").rows} if given.only else {}
    for name in names:
        number, words = DEFECTS[name]
        known[f"`test_{name}`"] = (number, words, f"`test_{name}`", *(said(by_name[name]) for by_name in found))
    rows = tuple(known[f"`test_{name}`"] for name in DEFECTS if f"`test_{name}`" in known)
    table = Table("python -m scripts.defects --save", ("", "defect", "test", BEFORE, "now"), rows)
    print(table.to_markdown())
    if given.save:
        save("defects", table)
    return int(any(row[-1] != "passes" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
