"""Scripts that run once on a rented GPU: what fails is one row, and what was measured is kept."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from onnx_remat.errors import ModelError, UsageError
from onnx_remat.session.plan_session import SessionRequest
from scripts import child, gpu_budgeted, gpu_day, gpu_numbers, gpu_profile, gpu_steps, gpu_truth
from scripts.journal import Journal
from tests.support.graphs import model_of

pytest.importorskip("onnxruntime")


def sleeping(seconds: float) -> dict[str, float]:
    time.sleep(seconds)
    return {"slept": seconds}


def test_a_process_tells_what_it_found_or_why_it_did_not():
    assert child.answered(sleeping, 0, seconds=20) == {"slept": 0}
    assert child.answered(sleeping, 60, seconds=0.5) == {"error": "took more than 0.5 s"}


def test_functions_of_a_script_are_called_by_its_own_name(monkeypatch):
    """As long as it runs by ``python -m``, its module is called __main__, which is another one in the process."""
    script = ModuleSpec("scripts.a_script", None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", script, raising=False)
    monkeypatch.setattr(sleeping, "__module__", "__main__")
    assert child._job(sleeping, (1,)) == {"function": "scripts.a_script:sleeping", "arguments": (1,)}


def test_a_row_that_is_kept_is_not_measured_again(tmp_path):
    path, asked = tmp_path / "new" / "lines.jsonl", []

    def measure(name, **found):
        asked.append(name)
        return found

    def both(again=False):
        journal = Journal(path, again)
        journal.measured({"step": "a"}, lambda: measure("a", ms=1.5))
        return journal.measured({"step": "b"}, lambda: measure("b", error="died"))

    both()
    with path.open("a") as file:
        file.write('{"step": "c", "ms"')  # the machine was taken away
    assert both() == {"step": "b", "error": "died"} and asked == ["a", "b"]
    both(again=True)
    assert asked == ["a", "b", "b"] and [row["step"] for row in Journal(path).rows()] == ["a", "b", "b"]


@pytest.mark.parametrize("lacks", [{"error": "died"}, {"failed": True}, {"no_graph": "full"}, {"no_least": "full"}])
def test_whatever_a_row_lacks_is_measured_again_if_asked_for(tmp_path, lacks):
    journal = Journal(tmp_path / "lines")
    journal.add({"step": "whole", "failed": False, "ms": 1})
    journal.add({"step": "part", "ms": 1} | lacks)
    assert journal.row({"step": "part"})
    again = Journal(journal.path, again=True)
    assert again.row({"step": "whole"}) and not again.row({"step": "part"})


def test_measurements_of_all_kinds_and_sizes_share_a_file(tmp_path, monkeypatch):
    """None is taken for another, and the race's table shows the race alone."""
    asked = []

    def answered(function, job, seconds):
        asked.append((function.__name__, job["dims"]["batch"], job.get("limits")))
        return {"ms": 1.0, "kernels": [], "taken": 1, "seconds": 1.0}

    for script in (gpu_truth, gpu_profile):
        monkeypatch.setattr(script, "answered", answered)
    journal = Journal(tmp_path / "lines")
    for batch, limits in [(2, True), (2, False), (4, False)] * 2:
        plans = [gpu_truth.Plan("s", "as it is", "s.onnx", {"batch": batch}, 1, 0.0)]
        (tmp_path / gpu_truth.PLANS).write_text(json.dumps([vars_of(each) for each in plans]))
        list(gpu_truth.race(tmp_path, plans, ["eager"], limits, journal, 9))
        list(gpu_profile.rows(tmp_path, [], False, None, journal, 9))
        journal.measured(gpu_numbers._key(gpu_truth.job_of(tmp_path, plans[0])), lambda: {"equal": len(asked)})
    taken = [("taken", 2, None), ("taken", 2, True), ("taken", 2, False), ("taken", 4, None), ("taken", 4, False)]
    assert sorted(asked, key=repr) == sorted([*taken, ("profiled", 2, None), ("profiled", 4, None)], key=repr)
    assert len(journal.rows()) == len(asked) + 2
    assert {runner for _, runner, *_ in gpu_truth.rows(journal.rows())} == {"eager", "Session, as it is"}


@pytest.fixture
def in_bfloat(tmp_path) -> Path:
    """A step w - 0.5 w, in bfloat16 alone outside, which the CPU runs."""
    nodes = [
        helper.make_node("Cast", ["w"], ["x"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["x", "half"], ["y"]),
        helper.make_node("Cast", ["y"], ["new.w"], to=TensorProto.BFLOAT16),
    ]
    bits = (TensorProto.BFLOAT16, ["batch", 3])
    model = model_of(nodes, {"w": bits}, {"new.w": bits}, {"half": np.float32(0.5)})
    onnx.save(model, tmp_path / "step.onnx")
    return tmp_path / "step.onnx"


def test_values_of_bfloat16_are_fed_by_their_bits_and_compared_as_numbers(in_bfloat):
    (array,), outputs = gpu_steps.arrays_of(in_bfloat, {"batch": 2})
    assert array.shape == (2, 3) and array.is_bfloat
    fed = (np.float32([[1, 2, 3], [4, 5, 6]]).view(np.uint32) >> 16).astype(np.uint16)
    made = gpu_numbers.stock(in_bfloat, [(array, fed)], outputs, gpu_numbers.HOST, "ORT_DISABLE_ALL")
    assert made["new.w"].tolist() == [[0.5, 1, 1.5], [2, 2.5, 3]]
    assert gpu_numbers.apart(made, {"new.w": 1.01 * made["new.w"]}) == pytest.approx(0.0099, rel=0.01)
    assert gpu_numbers.same(made, made) == 1
    with pytest.raises(ValueError, match="a size 'batch', which has no number"):
        gpu_steps.arrays_of(in_bfloat, {})


def jobs_of(path: Path) -> list[dict]:
    names = ("as it is", "as it is, fused", "60%")
    return [
        {
            "step": "s",
            "file": name,
            "path": f"{path}{'-60' * (name == '60%')}",
            "dims": {"batch": 2},
            "fuse": "," in name,
        }
        for name in names
    ]


def test_a_way_that_fails_leaves_the_others_and_runs_no_file_twice(in_bfloat, monkeypatch):
    ran = []

    def computed(job, way, *_):
        ran.append((job["file"], way))
        if way == "CUDA graph":
            raise UsageError("cuda_graph: node 'd' would draw")
        if (job["file"], way) == ("as it is", "disable"):
            raise RuntimeError("CUDA failure 700\nmore")
        return {"new.w": np.ones(3)}

    monkeypatch.setattr(gpu_numbers, "computed", computed)
    monkeypatch.setattr(gpu_numbers, "stock", lambda *_: {"new.w": np.ones(3)})
    first, fused, last = gpu_numbers._compared(jobs_of(in_bfloat)[0], {}, jobs_of(in_bfloat))
    assert ran.count(("as it is, fused", "disable")) == ran.count(("as it is, fused", "all")) == 0
    assert first["failed"] and fused["failed"] and not last["failed"]
    assert first["apart"]["disable"] == "RuntimeError: CUDA failure 700" and first["apart"]["all"] == 0.0
    shown = gpu_numbers.cells({"step": "s", "file": "as it is"} | first)
    assert shown[3:5] == ("0.0e+00", "0.0e+00") and shown[-1] == "1 of 1" and "would draw" in shown[5]


def test_a_process_that_dies_loses_one_file_and_no_process_goes_on_after_an_error(tmp_path, monkeypatch):
    """The second goes on without the original, with which the first one died."""
    begun = []

    class Stepper:
        def __init__(self, name, function, original, row, todo, seconds):
            begun.append(("error" in row, [job["file"] for job in todo]))
            self.left = [job["file"] for job in todo]

        def step(self):
            if (name := self.left.pop(0)) == "as it is":
                raise child.Failed("s: took more than 9 s")
            return {"apart": dict.fromkeys(gpu_numbers.WAYS, 0.0), "equal": None, "outputs": 1, "failed": "," in name}

        def close(self):
            pass

    monkeypatch.setattr(gpu_numbers, "Stepper", Stepper)
    journal = Journal(tmp_path / "lines")
    found = list(gpu_numbers.rows(jobs_of(tmp_path), journal, 9))
    assert [row["file"] for row in found] == ["as it is", "as it is, fused", "60%"] and "error" in found[0]
    assert begun == [
        (False, ["as it is", "as it is, fused", "60%"]),
        (True, ["as it is, fused", "60%"]),
        (True, ["60%"]),
    ]
    assert list(gpu_numbers.rows(jobs_of(tmp_path), journal, 9)) == found and len(begun) == 3


def test_plans_are_kept_for_a_file_as_it_is(tmp_path, monkeypatch):
    """A step that is planned again into the same folder is opened again."""
    path, target, planned = tmp_path / "a-60.onnx", tmp_path / "lean.onnx", []

    def plan(path, target, request):
        planned.append(path.read_text())
        target.write_text(f"lean {path.read_text()}")
        return planned[-1]

    monkeypatch.setattr(gpu_steps.plan_session, "plan_in_child", plan)
    for text in ("old", "new", "old"):
        path.write_text(text)
        for _ in range(2):
            assert gpu_steps.kept(path, target, SessionRequest("cuda", {}, True)) == text
            assert target.read_text() == f"lean {text}"
    gpu_steps.kept(path, target, SessionRequest("cuda", {}, True, secret=5))
    assert planned == ["old", "new", "old"] and not list(tmp_path.glob("*.tmp"))


def test_a_file_that_cannot_be_opened_is_named_and_the_others_are_opened(tmp_path, monkeypatch, capsys):
    opened = []

    def kept(path, target, request):
        if path.name == "a.onnx":
            raise ModelError("no such kernel")
        opened.append(path.name)

    monkeypatch.setattr(gpu_truth, "kept", kept)
    plans = [vars_of(gpu_truth.Plan(name, "60%", f"{name}.onnx", {}, 1, 0.1)) for name in "abc"]
    (tmp_path / gpu_truth.PLANS).write_text(json.dumps(plans))
    gpu_truth.open_all(tmp_path)
    assert sorted(opened) == ["b.onnx", "c.onnx"] and "a 60%: ModelError: no such kernel" in capsys.readouterr().out


def vars_of(plan: gpu_truth.Plan) -> dict:
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


def test_a_step_that_cannot_be_captured_keeps_its_other_figures(monkeypatch):
    class Session(nullcontext):
        def close(self):
            pass

    def our_step(job, graph, limit=0):
        if graph:
            raise UsageError("cuda_graph: refused")
        if limit and limit < 150 << 20:
            raise ModelError("the device is full")
        return Session(), lambda: float("nan")

    for name, stand_in in {"used": lambda: 7, "warm_up": id, "books": lambda _: {}, "our_step": our_step}.items():
        monkeypatch.setattr(gpu_steps, name, stand_in)
    monkeypatch.setattr(gpu_steps, "keep_plans", lambda: None)
    job = {"how": "Session", "predicted": 100 << 20, "limits": True}
    found = gpu_steps.taken(job)
    assert found["taken"] == 0 and len(found["losses"]) == gpu_steps.WARM + gpu_steps.STEPS
    assert found["no_graph"] == "UsageError: cuda_graph: refused"
    assert found["least"] == (100 << 20) + 2 * gpu_steps.LIMIT
    assert gpu_steps.taken(job | {"limits": False})["least"] == 0


def test_the_race_shows_the_last_of_a_row_that_was_measured_again():
    ours = {"measure": "race", "step": "s", "runner": "Session, 60%"}
    failed = ours | {"error": "died"}
    eager = ours | {"runner": "eager", "taken": 4e6, "seconds": 0.25}
    good = ours | {"taken": 2e6, "seconds": 0.5, "compute": 0.1, "no_graph": "refused"}
    first, second = gpu_truth.rows([failed, eager, good])
    assert first[1:8] == ("Session, 60%", "", "", "2", "0.50", "500.0", "2.00") and first[8:11] == ("", "", "")
    assert second[1] == "eager"


def test_figures_are_compared_with_pytorchs_own_step_alone():
    row = {"step": "t5", "how": "budgeted", "budget": "60%", "taken": 2e6, "seconds": 0.5, "losses": [1.0, 0.0],
           "made": 3.2, "limit": 3e6, "predicted": None}  # fmt: skip
    eager = row | {"how": "eager", "taken": 4e6, "losses": [2.0, 0.0]}
    assert gpu_budgeted.cells(row, eager) == (
        "t5",
        "budgeted, 60%",
        "3",
        "",
        "2",
        "0.50",
        "500.0",
        "1.00",
        "5.0e-01",
        "3",
    )
    assert gpu_budgeted.cells(row, {"error": "died"})[4:] == ("2", "", "500.0", "", "", "3")
    assert gpu_budgeted.apart([np.nan, 1.0], [np.nan, 1.0]) == 0 and np.isnan(gpu_budgeted.apart([np.nan], [1.0]))


@pytest.mark.slow
def test_a_part_of_the_day_may_fail_or_be_cut_off_and_the_others_run(monkeypatch, tmp_path):
    for name, does in {
        "quick": "open('ran', 'a').write('quick')",
        "broken": "raise SystemExit(3)",
        "slow": "import subprocess, sys; subprocess.run([sys.executable, '-m', 'asleep'])",
        "asleep": "import os, time; open('asleep.pid', 'w').write(str(os.getpid())); time.sleep(60)",
    }.items():
        (tmp_path / f"{name}.py").write_text(does)
    monkeypatch.chdir(tmp_path)
    ends = gpu_day.run([("a", ["broken"]), ("b", ["slow"]), ("c", ["quick"])], 12.0)
    assert ends == ["a: failed with exit code 3", "b: cut off: run the command again to go on", "c: done"]
    assert (tmp_path / "ran").read_text() == "quick"
    status = Path(f"/proc/{(tmp_path / 'asleep.pid').read_text()}/stat")
    assert not status.exists() or status.read_text().split()[2] == "Z"  # it would have had the device


def test_all_parts_of_the_day_are_commands_that_exist(tmp_path):
    for _, (module, *arguments) in gpu_day.parts(tmp_path, tmp_path, again=True):
        help_text = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True).stdout
        assert all(each in help_text for each in arguments if each.startswith("--"))
