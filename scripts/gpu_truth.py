"""Training steps on a real GPU: are they right, what do they take of the device, and how fast are they?

    python -m scripts.gpu_truth plan FOLDER STEP.onnx... [--budget 60%] [--dims batch=32]
    python -m scripts.gpu_truth numbers FOLDER
    python -m scripts.gpu_truth open FOLDER
    python -m scripts.gpu_truth race FOLDER [--with eager] [--with compile] [--out LINES]
    python -m scripts.gpu_truth table LINES [--save]

``plan`` needs no GPU: it copies each step to FOLDER and rewrites it there to every budget, for CUDA and a `Loop`, and
to the same bytes once more for fused kernels. The others run what lies there, the original also fused.

*Numbers*: one step of the original on the CPU is what outputs are compared with, as ‖a - b‖ / ‖b‖ of the worst
output: of the original and the rewritten file, in onnxruntime's own session at two levels, in a `Session` with new
state over the old, and in the same captured in a CUDA graph. TF32 is off for that (NVIDIA_TF32_OVERRIDE=0).

``open`` plans where values lie, for several files at once, so that the race need not.

*Race*: every runner is a fresh process, alone on the device. *Taken* is what the driver says is used on the device
after the steps, less what it says of a process that has done a product and a convolution: none gives anything back
before it ends, so that is the most it took. *Least limit* is the smallest `memory_limit` that training runs under, in
steps of 32 MiB from the one predicted (``--no-limits``: tries that one alone). *Time* is the median of steps, each
with its loss read. PyTorch's models are those of `sample_models.networks.torch_models`, with a batch of the same size;
both may use TF32.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from onnx_remat.errors import OnnxRematError
from onnx_remat.fuse import shim
from onnx_remat.session import fusing, plan_session
from onnx_remat.session import session as session_module
from onnx_remat.session.interface import DTYPES
from onnx_remat.session.plan_session import SessionRequest
from onnx_remat.session.session import Session

PLANS = "plans.json"
WARM, STEPS = 3, 12
ORIGINAL, FUSED = "as it is", ", fused"
NUMBERS_HEADS = ("step", "file", "disable", "all", "Session", "CUDA graph", "outputs with the original's bits")
RACE_HEADS = (
    "step", "runner", "predicted, MB", "least limit, MB", "taken, MB", "of eager", "ms a step", "of eager",
    "in a CUDA graph, MB", "ms", "of eager", "compute, plan", "time",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """A file to run: the step's name, the budget it was rewritten to, or `ORIGINAL`.

    `predicted` is what training by `Loop` takes of the device, in bytes; `fuse` says whether its kernels are fused.
    """

    step: str
    budget: str
    path: str
    dims: Mapping[str, int]
    predicted: int
    compute: float
    fuse: bool = False


def plan(folder: Path, steps: list[Path], budgets: list[str], dims: Mapping[str, int], effort: float) -> None:
    """Add steps to a folder."""
    from onnx_remat.rewrite.pipeline import rewrite_model

    folder.mkdir(parents=True, exist_ok=True)
    plans = {(each.step, each.budget): each for each in known(folder)}
    for path in steps:
        shutil.copyfile(path, folder / path.name)
        for fuse in (False, True):
            name = ORIGINAL + FUSED * fuse
            plans[path.stem, name] = Plan(path.stem, name, path.name, dict(dims), 0, 0.0, fuse)
        asked: dict[str, int] = {}
        for budget, fuse in itertools.product(budgets, (False, True)):
            name, original = budget + FUSED * fuse, (path.stem, ORIGINAL + FUSED * fuse)
            try:
                result = rewrite_model(
                    path, asked.get(budget, budget), provider="cuda", run_by="loop", dims=dims, effort=effort,
                    time_limit=600, fuse=fuse,
                )  # fmt: skip
            except OnnxRematError as error:
                print(f"{path.stem} {name}: {error}", flush=True)
                plans.pop((path.stem, name), None)
                continue
            asked.setdefault(budget, result.report.budget)
            result.save(target := folder / f"{path.stem}-{budget.strip('%')}{'-fused' * fuse}.onnx", force=True)
            before, after, compute = result.report.loop_before, result.report.loop_after, result.report.extra_compute
            assert before is not None and after is not None
            plans[original] = replace(plans[original], predicted=before.total)
            plans[path.stem, name] = Plan(path.stem, name, target.name, dict(dims), after.total, compute, fuse)
            print(plans[path.stem, name], flush=True)
        (folder / PLANS).write_text(json.dumps([asdict(each) for each in plans.values()], indent=1))


def known(folder: Path) -> list[Plan]:
    """What `plan` made."""
    if not (folder / PLANS).exists():
        return []
    return [Plan(**each) for each in json.loads((folder / PLANS).read_text())]


def by_step(folder: Path) -> dict[str, list[Plan]]:
    """The files of each step, the original first."""
    found: dict[str, list[Plan]] = {}
    for each in known(folder):
        found.setdefault(each.step, []).insert(0 if each.budget == ORIGINAL else len(found[each.step]), each)
    return found


def numbers(folder: Path, plans: list[Plan]) -> Iterator[tuple[str, ...]]:
    """The rows of one step; see the module."""
    import onnxruntime

    from onnx_remat.measure.training_memory import state_for
    from onnx_remat.ort.libraries import load_cuda

    load_cuda()

    def stock(path: Path, providers: list[str], level: str) -> dict[str, Any]:
        options = onnxruntime.SessionOptions()
        options.enable_mem_pattern = False
        options.log_severity_level = 3
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        assert session.get_providers()[0] == providers[0], "onnxruntime made no session on CUDA"
        return dict(zip((o.name for o in session.get_outputs()), session.run(None, feeds), strict=True))

    def ours(each: Plan, graph: bool) -> dict[str, Any]:
        path = folder / each.path
        with Session(path, "cuda", donate=True, cuda_graph=graph, dims=each.dims, fuse=each.fuse) as session:
            made = session.run({name: array.copy() for name, array in feeds.items()})
            return {name: np.array(array) for name, array in made.items()}

    original = folder / plans[0].path
    with Session(original, dims=plans[0].dims) as session:
        feeds = state_for(session.inputs)
    try:
        truth = stock(original, ["CPUExecutionProvider"], "ORT_DISABLE_ALL")
    except Exception as error:  # half precision, which the CPU has no kernels for
        truth = {}
        print(f"{plans[0].step}: the CPU cannot run it: {str(error).splitlines()[0][:150]}", file=sys.stderr)
    first: dict[str, dict[str, Any]] = {}
    cuda = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    ways: dict[str, Callable[[Plan], dict[str, Any]]] = {
        "disable": lambda each: stock(folder / each.path, cuda, "ORT_DISABLE_ALL"),
        "all": lambda each: stock(folder / each.path, cuda, "ORT_ENABLE_ALL"),
        "Session": lambda each: ours(each, False),
        "CUDA graph": lambda each: ours(each, True),
    }
    for each in plans:
        cells, equal = [], []
        for way, run in ways.items():
            try:
                made = run(each)
            except Exception as error:
                cells.append(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
                continue
            first.setdefault(way, made)
            truth = truth or made
            equal.append(sum(np.array_equal(array, first[way][name], equal_nan=True) for name, array in made.items()))
            cells.append(f"{_apart(made, truth):.1e}")
        yield each.step, each.budget, *cells, f"{min(equal, default=0)} of {len(first['disable'])}"


def _apart(made: Mapping[str, Any], truth: Mapping[str, Any]) -> float:
    """Of the worst output, what is not a number where the truth is one being worst of all."""
    worst = 0.0
    for name, array in made.items():
        right = np.asarray(truth[name], np.float64)
        scale = float(np.linalg.norm(right)) or 1.0
        apart = float(np.linalg.norm(np.asarray(array, np.float64) - right)) / scale
        worst = max(worst, apart if np.isfinite(apart) else float("inf"))
    return worst


def used() -> int:
    """Bytes in use on the device, as the driver counts them."""
    import pynvml  # type: ignore[import-not-found, unused-ignore]

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def stock_step(path: Path, dims: Mapping[str, int]) -> Callable[[], float]:
    """A step of a file by onnxruntime's own session as it comes."""
    import onnxruntime

    from onnx_remat.measure.training_memory import state_for
    from onnx_remat.session.plan_session import Array
    from onnx_remat.session.training import Loop

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    for name, size in dims.items():
        options.add_free_dimension_override_by_name(name, size)
    session = onnxruntime.InferenceSession(str(path), options, providers=["CUDAExecutionProvider"])
    arrays = []
    for value in session.get_inputs():
        kind = onnx.helper.np_dtype_to_tensor_dtype(np.dtype(DTYPES.get(value.type[7:-1], value.type[7:-1])))
        arrays.append(Array(value.name, kind, tuple(dims.get(size, size) for size in value.shape)))
    return Loop(session, state_for(tuple(arrays)), device="cuda").step


def our_step(job: Mapping[str, Any], graph: bool, limit: int = 0) -> tuple[Session, Callable[[], float]]:
    """A step of a file by a `Session`."""
    from onnx_remat.measure.training_memory import state_for
    from onnx_remat.session.training import Loop

    session = Session(
        job["path"], "cuda", donate=True, dims=job["dims"], cuda_graph=graph, memory_limit=limit, fuse=job["fuse"]
    )
    return session, Loop(session, state_for(session.inputs), device="cuda").step


def kept(path: Path, target: Path, request: Any) -> Any:
    """`plan_session.plan_in_child`, whose result is kept next to the file: it takes longer than all the steps here."""
    how = ".fused" if request.secret else ""
    model, opened, kernels = (path.with_suffix(f"{how}.{kind}") for kind in ("private", "opened", "kernels"))
    if not opened.exists():
        found = plan_session.plan_in_child(path, target, request)
        shutil.copyfile(target, model)
        if fusing.kernel_file(target).exists():
            shutil.copyfile(fusing.kernel_file(target), kernels)
        opened.write_bytes(pickle.dumps(found))
    shutil.copyfile(model, target)
    if kernels.exists():
        shutil.copyfile(kernels, fusing.kernel_file(target))
    return pickle.loads(opened.read_bytes())


def open_all(folder: Path) -> None:
    """Open every file, several at once, for `kept`."""

    def one(each: Plan) -> None:
        with tempfile.TemporaryDirectory() as home:
            kept(
                (folder / each.path).resolve(),
                Path(home) / "lean.onnx",
                SessionRequest("cuda", dict(each.dims), True, secret=shim.new_secret() if each.fuse else 0),
            )

    with ThreadPoolExecutor((os.cpu_count() or 2) // 2) as pool:
        list(pool.map(one, known(folder)))


def on_device(name: str, batch: int) -> tuple[Any, Any]:
    """A case whose model is on the device, and its batch there, of this size."""
    import torch
    from torch.utils import _pytree as pytree

    from sample_models.networks import torch_models

    torch.manual_seed(0)
    case = torch_models.MODELS[name]()
    case.model.cuda()

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat(-(-batch // len(tensor)), *[1] * (tensor.dim() - 1))[:batch].cuda()

    return case, pytree.tree_map(wide, case.batch)


def torch_step(name: str, batch: int, compiled: bool) -> Callable[[], float]:
    """A step of PyTorch's on the device."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    case, given = on_device(name, batch)
    model = case.model
    optimizer = case.optimizer(model.parameters())
    positional, named, target = case.arguments(given)
    of_loss, called = case.loss, torch.compile(model) if compiled else model
    assert of_loss is not None

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = of_loss(called(*positional, **named), target)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def warm_up(kind: str) -> None:
    """A product and a convolution, so that the libraries hold what they hold whatever the step."""
    if kind == "torch":
        import torch

        x = torch.ones(1, 1, 8, 8, device="cuda", requires_grad=True)
        torch.nn.functional.conv2d(x, torch.ones(1, 1, 3, 3, device="cuda")).flatten(1).matmul(
            torch.ones(36, 2, device="cuda")
        ).sum().backward()
        torch.cuda.synchronize()
        return
    from onnx import TensorProto, helper, numpy_helper

    from onnx_remat.session import on_device

    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Flatten", ["c"], ["f"]),
             helper.make_node("MatMul", ["f", "m"], ["y"])]  # fmt: skip
    weights = [
        numpy_helper.from_array(np.ones(shape, np.float32), name)
        for name, shape in (("w", (1, 1, 3, 3)), ("m", (36, 2)))
    ]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [1, 1, 8, 8]), ("y", [1, 2])))
    model = helper.make_model(
        helper.make_graph(nodes, "warm", [x], [y], weights), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    import onnxruntime

    names = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=on_device.providers(names, 0))
    assert session.get_providers()[0] == names[0], "onnxruntime made no session on CUDA"
    session.run(None, {"x": np.ones((1, 1, 8, 8), np.float32)})


def timed(step: Callable[[], float]) -> tuple[float, list[float]]:
    """Median of seconds, and losses, of `STEPS` steps after `WARM`."""
    losses, seconds = [], []
    for _ in range(WARM + STEPS):
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM:]), losses


def child(job: Mapping[str, Any]) -> None:
    """Take steps and print what they took."""
    kind = "torch" if job["how"] in ("eager", "compile") else "ours"
    empty = used()
    warm_up(kind)
    idle = used()
    answer: dict[str, Any] = {"idle": idle - empty}
    start = time.perf_counter()
    if kind == "torch":
        step = torch_step(job["step"], job["batch"], job["how"] == "compile")
    elif job["how"] == "onnxruntime":
        step = stock_step(Path(job["path"]), job["dims"])
    else:
        session_module.plan_in_child = kept  # type: ignore[attr-defined]
        session, step = our_step(job, graph=False)
        answer |= {"opened": time.perf_counter() - start, "open": used() - idle}
        answer["seconds"], answer["losses"] = timed(step)
        answer |= {"taken": used() - idle, "books": books(session)}
        session.close()
        del step
        session, step = our_step(job, graph=True)
        answer["graph"], losses = timed(step)
        answer["graph_taken"] = used() - idle
        assert np.allclose(losses, answer["losses"], rtol=1e-3), "a CUDA graph gives other losses"
        session.close()
        del step
        answer["least"] = smallest(job, 10 if job["limits"] else 1)
        print(json.dumps(answer))
        return
    answer["seconds"], answer["losses"] = timed(step)
    answer["taken"] = used() - idle
    if kind == "torch":
        import torch

        answer |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    print(json.dumps(answer))


def books(session: Session) -> dict[str, int]:
    """Of what the bytes of a session are, as planned."""
    inputs = sum(array.nbytes for array in session.inputs)
    return {"slab": session.slab_bytes, "inputs": inputs, "workspace": session.workspace_bytes,
            "weights": session.weight_bytes, "nodes": session.node_count}  # fmt: skip


def smallest(job: Mapping[str, Any], tries: int) -> int:
    """The least limit, in steps of 32 MiB from the predicted one, under which three steps are taken; 0 if none is."""
    for more in range(tries):
        limit = job["predicted"] + more * (1 << 25)
        try:
            session, step = our_step(job, graph=False, limit=limit)
            for _ in range(3):
                step()
            session.close()
            return limit
        except OnnxRematError:
            continue
    return 0


def ask(job: Mapping[str, Any], seconds: float = 240) -> dict[str, Any]:
    """What a child says, or why it says nothing."""
    command = [sys.executable, "-m", "scripts.gpu_truth", "child", json.dumps(job)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {seconds:.0f} s"}
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        errors = [
            line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)
        ]  # C++ may tell its frames after it
        return {"error": (errors or lines or [f"exit status {done.returncode}"])[-1][-300:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def race(folder: Path, plans: list[Plan], others: list[str], limits: bool) -> Iterator[dict[str, Any]]:
    """What each runner of one step took."""
    step, dims = plans[0].step, plans[0].dims
    original = str((folder / plans[0].path).resolve())
    for how in others:
        job: dict[str, Any] = {"how": how, "step": step, "batch": dims.get("batch", 1), "path": original, "dims": dims}
        yield {"step": step, "runner": how} | ask(job)
    for each in plans:
        path = str((folder / each.path).resolve())
        job = {"how": "Session", "path": path, "dims": each.dims, "predicted": each.predicted, "fuse": each.fuse,
               "limits": limits}  # fmt: skip
        row = {"step": step, "runner": f"Session, {each.budget}", "compute": each.compute, "predicted": each.predicted}
        yield row | ask(job)


def rows(found: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """The lines of the race's table."""
    eager = {each["step"]: each for each in found if each["runner"] == "eager" and "error" not in each}
    ours = {(each["step"], each["runner"]): each for each in found if "error" not in each}
    for each in found:
        if "error" in each:
            yield each["step"], each["runner"], each["error"], *[""] * (len(RACE_HEADS) - 3)
            continue
        original = f"Session, {ORIGINAL}{FUSED * each['runner'].endswith(FUSED)}"
        base, plain = eager.get(each["step"]), ours.get((each["step"], original))
        longer = each["seconds"] / plain["seconds"] - 1 if plain and each.get("compute") else None
        yield (
            each["step"], each["runner"], f"{each['predicted'] / 1e6:,.0f}" if each.get("predicted") else "",
            f"{each['least'] / 1e6:,.0f}" if each.get("least") else "", f"{each['taken'] / 1e6:,.0f}",
            f"{each['taken'] / base['taken']:.2f}" if base else "", f"{each['seconds'] * 1e3:.1f}",
            f"{each['seconds'] / base['seconds']:.2f}" if base else "",
            f"{each['graph_taken'] / 1e6:,.0f}" if each.get("graph_taken") else "",
            f"{each['graph'] * 1e3:.1f}" if each.get("graph") else "",
            f"{each['graph'] / base['seconds']:.2f}" if each.get("graph") and base else "",
            f"{each['compute']:+.1%}" if each.get("compute") else "", "" if longer is None else f"{longer:+.1%}",
        )  # fmt: skip


def main() -> None:
    """Do what the first argument says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("plan", "numbers", "open", "race", "table", "child"))
    parser.add_argument("folder")
    parser.add_argument("steps", nargs="*", type=Path)
    parser.add_argument("--budget", action="append", help="of plan, default 60%%")
    parser.add_argument("--dims", action="append", default=[], metavar="NAME=N", help="of plan")
    parser.add_argument("--effort", type=float, default=3.0, help="of plan")
    parser.add_argument("--only", action="append", help="these steps")
    parser.add_argument(
        "--with", dest="others", action="append", choices=("eager", "compile", "onnxruntime"), help="of race"
    )
    parser.add_argument("--no-limits", action="store_true", help="of race, try the predicted limits alone")
    parser.add_argument("--out", type=Path, help="of race, a file of JSON lines to add to")
    parser.add_argument(
        "--save", action="store_true", help="also write docs/results/data/gpu-numbers.json or gpu-race.json"
    )
    given = parser.parse_args()
    if given.what == "child":
        child(json.loads(given.folder))
        return
    folder = Path(given.folder)
    if given.what == "plan":
        dims = {name: int(size) for name, _, size in (each.partition("=") for each in given.dims)}
        plan(folder, given.steps, given.budget or ["60%"], dims, given.effort)
        return
    if given.what == "open":
        open_all(folder)
        return
    from scripts import results

    planned = by_step(folder) if given.what in ("numbers", "race") else {}
    steps = {step: plans for step, plans in planned.items() if not given.only or step in given.only}
    if given.what == "numbers":
        os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
        made = results.printed(row for plans in steps.values() for row in numbers(folder, plans))
        table = results.Table("python -m scripts.gpu_truth numbers FOLDER --save", NUMBERS_HEADS, made)
    elif given.what == "table":
        lines = [json.loads(line) for line in folder.read_text().splitlines()]
        table = results.Table(
            "python -m scripts.gpu_truth table LINES --save", RACE_HEADS, results.printed(rows(lines))
        )
    else:
        found = []
        for plans in steps.values():
            for each in race(folder, plans, given.others or [], not given.no_limits):
                found.append(each)
                print(json.dumps(each), flush=True)
                if given.out:
                    with given.out.open("a") as file:
                        print(json.dumps(each), file=file)
        table = results.Table("python -m scripts.gpu_truth race FOLDER", RACE_HEADS, results.printed(rows(found)))
    if given.save:
        results.save("gpu-numbers" if given.what == "numbers" else "gpu-race", table)


if __name__ == "__main__":
    main()
