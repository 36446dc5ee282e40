"""What a change of structure must keep: written files, reports without seconds, and the texts of refusals.

    python -m scripts.goldens before.json                      # some four minutes, the same on any machine
    python -m scripts.goldens after.json --against before.json # what differs, and 1 where anything does

Files: every sample model, for a loop and for a session, for the CPU and for CUDA, to two budgets at a fixed effort.
Refusals: the command line, called with what it must not accept.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_remat
from onnx_remat.app import cli
from onnx_remat.errors import OnnxRematError

SAMPLES = Path(__file__).resolve().parents[1] / "sample_models"
BUDGETS = ("80%", "55%")
EFFORT = 0.5
TIMED = ("seconds",)
"""Fields of a report that differ from run to run."""

STEP = str(SAMPLES / "chain.onnx")
REFUSED = [
    *([], ["no.onnx", "OUT", "--budget", "60%"], [STEP], [STEP, "OUT"], ["bench", STEP], ["sweeep", STEP]),
    [STEP, STEP, "--budget", "1GB"],
    *([STEP, "OUT", "--budget", size] for size in ("", "x", "4", "-1GB", "0", "0%", "101%", "1 GB 2", "nan%", "1XB")),
    *([STEP, "OUT", "--budget", size] for size in ("9EB", "1kB", "20%", "30kB")),
    *([STEP, "OUT", "--budget", "60%", *flags] for flags in (
        *(["--selector", name] for name in ("serch", "exact", "collection")), ["--checkpoint", "no"], ["--keep", "no"],
        *(["--dim", size] for size in ("batch", "batch=0", "batch=x", "batch=4")), ["--loss", "no"],
        ["--provider", "cup"], ["--allow-recompute", "Relu"], ["--allow-recompute", "a::B"], ["--time-limit", "0"],
        ["--time-limit", "soon"], ["--effort", "-1"], ["--effort", "x"], ["--costs", "no.json"], ["--costs", STEP],
        ["--cudnn-workspace", "1GB"], ["--offload"], ["--host-bandwidth", "x"], ["--for", "browser"],
        ["--for", "loop", "--provider", "cuda"], ["--arena", "--for", "loop"], ["--verify", "all"], ["--plot", "x.doc"],
        ["--json", "/no/such/folder/x.json"], ["--buget", "1GB"], ["-v", "-q"], ["--no-pattern"], ["--plot"],
    )),
    *(["estimate"], ["estimate", "no.onnx"], ["estimate", STEP, "--max-batch", "x"], ["explain", STEP]),
    *(["explain", "no.onnx"], ["sweep"], ["sweep", STEP, "--budgets", "x"], ["check", STEP], ["check", "no.onnx"]),
    *(["split", STEP, "--into", "x"], ["split", "no.onnx"], ["profile", STEP]),
]  # fmt: skip
"""Command lines; OUT is a file that does not exist."""


def main() -> int:
    """Write the goldens, compare; 1 where they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--against", type=Path, metavar="BEFORE", help="goldens to compare with")
    parser.add_argument("--only", default="", metavar="PART", help="names that contain this")
    asked = parser.parse_args()
    found = dict(entry for entry in itertools.chain(texts(), files(asked.only)) if asked.only in entry[0])
    asked.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(f"{len(found)} goldens in {asked.out}")
    if asked.against is None:
        return 0
    before: dict[str, Any] = json.loads(asked.against.read_text())
    names = [name for name in sorted(before.keys() | found.keys()) if asked.only in name]
    different = [name for name in names if before.get(name) != found.get(name)]
    for name in different:
        print(f"{name}:\n  before: {_short(before.get(name))}\n  after:  {_short(found.get(name))}")
    print(f"{len(names) - len(different)} of {len(names)} as before")
    return 1 if different else 0


def files(only: str = "") -> Iterator[tuple[str, Any]]:
    """Every sample to every budget: the hash of the file and its report, or the text of a refusal."""
    samples = sorted(SAMPLES.rglob("*.onnx"))
    for path, run_by, provider, budget in itertools.product(samples, ("loop", "session"), ("cpu", "cuda"), BUDGETS):
        name = f"{path.stem} for a {run_by} on {provider} at {budget}"
        if only not in name:
            continue
        try:
            result = onnx_remat.rewrite_model(
                path, budget, run_by=run_by, provider=provider, effort=EFFORT, time_limit=600.0
            )
        except OnnxRematError as refusal:
            yield name, {"refused": _plain(str(refusal))}
            continue
        report = json.loads(result.report.to_json())
        written = hashlib.sha256(result.model.SerializeToString(deterministic=True)).hexdigest()
        yield name, {"file": written, "report": {key: report[key] for key in report if key not in TIMED}}


def texts() -> Iterator[tuple[str, Any]]:
    """Every refusal of the command line: exit code and text."""
    for words in REFUSED:
        said = io.StringIO()
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(said),
        ):
            given = [f"{folder}/out.onnx" if word == "OUT" else word for word in words]
            try:
                code: object = cli.main(given)
            except SystemExit as end:
                code = end.code
        yield (
            f"$ onnx-remat {' '.join(_plain(word) for word in words)}",
            {"code": code, "said": _plain(said.getvalue().replace(folder, ""))},
        )


def _plain(said: str) -> str:
    """A text without folders and measured seconds."""
    return re.sub(r"\d[\d.]* s\b", "N s", said.replace(str(SAMPLES.parent) + os.sep, ""))


def _short(entry: Any) -> str:
    said = json.dumps(entry, sort_keys=True)
    return said if len(said) < 400 else said[:400] + " ..."


if __name__ == "__main__":
    sys.exit(main())
