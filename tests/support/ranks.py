"""Jobs of several ranks on this machine: `launch` starts them as torchrun does, each runs `main` of this file.

A job is a JSON object: what is passed to `DataParallel`, batches in an ``.npz`` under ``<step>.<rank>.<micro>.<name>``,
and what to do after which step. Every rank leaves ``rank<i>.json`` and ``rank<i>.npz`` in the job's folder.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank left: exit code, standard error, what it noted, its state in the end."""

    code: int
    errors: str
    notes: dict
    state: dict


def launch(folder: Path, count: int, job: dict, state: dict, batches: dict, seconds: float = 300) -> list[Rank]:
    """Run a job to its end; one that outlasts `seconds` is ended and fails the test."""
    (ranks,) = launch_in_turn([folder], count, [job], state, batches, seconds)
    return ranks


def launch_in_turn(
    folders: Sequence[Path], count: int, jobs: Sequence[dict], state: dict, batches: dict, seconds: float = 300
) -> list[list[Rank]]:
    """Run jobs one after the other, each in a folder of its own, in processes that are started once for all of them."""
    for folder, job in zip(folders, jobs, strict=True):
        folder.mkdir(exist_ok=True)
        np.savez(folder / "state.npz", **state)
        np.savez(folder / "batches.npz", **batches)
        (folder / "job.json").write_text(json.dumps(job))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    common |= {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "ORT_DISABLE_TELEMETRY": "1"}
    command = [sys.executable, "-m", "tests.support.ranks", *map(str, folders)]
    processes = [
        subprocess.Popen(
            command, env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=ROOT,
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(count)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=seconds)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    ended = [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]
    return [[_left(folder, rank, *how) for rank, how in enumerate(ended)] for folder in folders]


def _left(folder: Path, rank: int, code: int, errors: str) -> Rank:
    notes, state = folder / f"rank{rank}.json", folder / f"rank{rank}.npz"
    return Rank(
        code, errors, json.loads(notes.read_text()) if notes.exists() else {},
        dict(np.load(state)) if state.exists() else {},
    )  # fmt: skip


def train(folder: Path) -> None:
    """One rank's part of a job."""
    from onnx_remat.distributed import DataParallel, Parts
    from onnx_remat.measure.probe import reset_peak, resident
    from onnx_remat.session.heap import trim

    job = json.loads((folder / "job.json").read_text())
    rank = int(os.environ["RANK"])
    batches = dict(np.load(folder / "batches.npz"))
    losses, times, base = [], [], 0
    state = dict(np.load(folder / "state.npz"))
    step = job["model"]
    if isinstance(step, list):
        step = Parts(Path(step[0]).read_bytes(), Path(step[1]).read_bytes())
    if job.get("warm"):
        _warm(job["warm"])
        trim()
        base = reset_peak() - resident("RssFile")
    parallel = DataParallel(step, state, threads=1, **job.get("options", {}))
    if "load" in job:
        parallel.load(job["load"])
    for step in range(parallel.steps, job["steps"]):
        if (rank, step) == tuple(job.get("kill", ())):
            os.kill(os.getpid(), signal.SIGKILL)
        micro = [_batch(batches, f"{step}.{rank}.{i}.") for i in range(job.get("micro", 1))]
        micro = [batch for batch in micro if batch]
        weights = [next(iter(b.values())).shape[0] for b in micro] if job.get("weigh") else job.get("weight")
        weights = job.get("weights", {}).get(str(rank), weights)
        losses.append(parallel.step(micro or None, weights))
        times.append([parallel.times.compute, parallel.times.communication, parallel.times.update])
        if step + 1 == job.get("save_at"):
            parallel.save(job["save"])
    # Pages of libraries are nobody's budget: a kernel maps more or fewer at a time, and takes them back when it likes.
    peak = resident("VmHWM") - resident("RssFile") - base
    taken, notes = parallel.taken(), {"predicted": parallel.parts.foreseen, "recompute": parallel.parts.recompute}
    fields = {name: getattr(taken, name) for name in taken.__slots__}
    notes |= {"losses": losses, "times": times, "resident": peak, "taken": fields, "steps": parallel.steps}
    (folder / f"rank{rank}.json").write_text(json.dumps(notes))
    np.savez(folder / f"rank{rank}.npz", **parallel.state())
    parallel.close()


def _warm(path: str) -> None:
    """What interpreter, libraries, the engine and a session take whatever the step."""
    import torch

    from onnx_remat.session.session import Session

    with Session(path) as session:
        session.run({array.name: np.zeros(array.shape, array.dtype_name) for array in session.inputs})
    for shape in (1, 1 << 20):
        torch.distributed.all_reduce(torch.zeros(shape))
        torch.distributed.broadcast(torch.zeros(shape), src=0)
        torch.distributed.reduce(torch.zeros(shape), dst=0)


def _batch(batches: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): batches[name] for name in batches if name.startswith(prefix)}


def main() -> None:
    from onnx_remat import distributed
    from tests.support.warm import warm_processes

    folders = list(map(Path, sys.argv[1:]))
    timeout = json.loads((folders[0] / "job.json").read_text()).get("timeout", 60)
    with warm_processes():
        code = distributed.run(lambda: [train(folder) for folder in folders], timeout=timeout)
    sys.exit(code)


if __name__ == "__main__":
    main()
