"""The cache folder stays bounded, and what is kept for one installation of ONNX Runtime is not used by another."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from onnx_remat.process import cache

DAY = 24 * 3600


def write(folder: Path, name: str, days: float) -> Path:
    """A file that was last used some days ago."""
    path = folder / name
    path.write_bytes(b"content")
    os.utime(path, (time.time() - days * DAY,) * 2)
    return path


def test_files_that_were_used_longest_ago_are_removed_and_those_of_others_stay(tmp_path, monkeypatch):
    monkeypatch.setitem(cache._KEPT, r"[0-9a-f]{32}\.kernel", 3)
    kernels = [write(tmp_path, f"{i:032x}.kernel", 100 - i) for i in range(5)]
    libraries = [
        write(tmp_path, f"libonnx_remat_{kind}-{i:016x}.so", i) for kind in ("blas", "fused") for i in range(6)
    ]
    killed = [write(tmp_path, f"{1:032x}.{name}.tmp", 2) for name in ("123", "ab_c")]
    killed.append(write(tmp_path, f"libonnx_remat_blas-{1:016x}.123.tmp", 2))
    alive = write(tmp_path, f"{2:032x}.123.tmp", 0.5)
    others = [write(tmp_path, name, 1000) for name in ("errors.cpython-311.pyc", "libother.so", "x.tmp", "x.kernel")]
    cache.count_as_used(kernels[0])
    cache.tidy(tmp_path)
    kept = {kernels[0], kernels[3], kernels[4], *libraries[:4], *libraries[6:10], alive, *others}
    assert {*tmp_path.iterdir()} == kept and killed


def test_reading_writes_a_time_once_a_day(tmp_path):
    path = write(tmp_path, "x.kernel", 0.5)
    before = path.stat().st_mtime_ns
    cache.count_as_used(path)
    assert path.stat().st_mtime_ns == before
    cache.count_as_used(tmp_path / "missing")


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path):
    target = write(tmp_path, "x.kernel", 1)
    with pytest.raises(OSError, match="full"), cache.replacing(target) as partial:
        partial.write_bytes(b"half")
        raise OSError("full")
    assert [*tmp_path.iterdir()] == [target] and target.read_bytes() == b"content"


def test_files_that_are_written_at_once_have_names_of_their_own(tmp_path, monkeypatch):
    """Processes of two containers may have the same id."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    target = tmp_path / "x.kernel"
    with cache.replacing(target) as one, cache.replacing(target) as other:
        one.write_bytes(b"one")
        other.write_bytes(b"other")
    assert target.read_bytes() == b"one" and [*tmp_path.iterdir()] == [target]


@pytest.mark.parametrize("change", ["library", "oneDNN"])
def test_another_runtime_and_other_instructions_have_plans_of_their_own(change, tmp_path, monkeypatch):
    """A build that no distribution names, say; and it is not imported to tell."""
    library = tmp_path / "onnxruntime" / "capi" / "libonnxruntime.so"
    library.parent.mkdir(parents=True)
    (tmp_path / "onnxruntime" / "__init__.py").write_text("raise AssertionError('imported')")
    library.write_bytes(b"a build")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    found = cache.surroundings.__wrapped__
    before = found()
    assert found() == before
    if change == "library":
        library.write_bytes(b"another build")
    else:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert found() != before and "onnxruntime" not in sys.modules


def test_code_is_not_looked_for_where_other_processes_remove_folders(tmp_path):
    for name in ("a.py", "c.c", "notes.md", "inner/b.py", "__pycache__/sessions/key/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert sorted(each.name for each in cache.sources(tmp_path)) == ["a.py", "b.py", "c.c"]
