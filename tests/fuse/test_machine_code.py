"""Machine code: kept on the disk, compiled again where it is damaged, and without addresses in it."""

from __future__ import annotations

import os
import time

import pytest

from onnx_remat.errors import ModelError
from onnx_remat.fuse import machine_code
from onnx_remat.process import cache

pytestmark = pytest.mark.skipif(bool(machine_code.why_not()), reason="no fused kernels here")

HEAD = "define i32 @kernel(ptr %in, ptr %out, ptr %sizes, i64 %begin, i64 %end) {\n"


def text(number: int) -> str:
    return f"{HEAD}  store i64 {number}, ptr %out\n  ret i32 0\n}}\n"


def test_code_is_found_on_the_disk(tmp_path, monkeypatch):
    texts = [text(1), text(2), text(1)]
    first = machine_code.compiled(texts, tmp_path)
    assert first[0] == first[2] != first[1] and len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(machine_code, "_compile", lambda _: pytest.fail("compiled again"))
    assert machine_code.compiled(texts, tmp_path) == first


@pytest.mark.parametrize("damage", ["cut", "empty", "changed"])
def test_damaged_code_is_compiled_again(damage, tmp_path):
    (wanted,) = machine_code.compiled([text(3)], tmp_path)
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    path.write_bytes({"cut": data[:-8], "empty": b"", "changed": data[:40] + bytes([data[40] ^ 1]) + data[41:]}[damage])
    assert machine_code.compiled([text(3)], tmp_path) == [wanted]
    assert path.read_bytes() == data


def test_code_of_another_processor_is_not_taken(tmp_path, monkeypatch):
    machine_code.compiled([text(4)], tmp_path)
    target = machine_code._target()
    monkeypatch.setattr(machine_code, "_target", lambda: (*target[:-1], target[-1] + ",+other"))
    assert machine_code._load(tmp_path, machine_code._key(text(4))) is None


def test_two_processes_compile_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_code, "_LEAST_KERNELS_FOR_HELPER", 4)
    monkeypatch.setattr(machine_code.os, "cpu_count", lambda: 2)
    mine = []
    whole = machine_code._compile
    monkeypatch.setattr(machine_code, "_compile", lambda each: mine.append(each) or whole(each))
    texts = [text(100 + i) for i in range(6)]
    found = machine_code.compiled(texts, tmp_path)
    assert len(set(found)) == 6 and mine == texts[3:]
    assert machine_code.compiled(texts, tmp_path) == found


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path):
    assert machine_code.compiled([text(5)], tmp_path / "missing") == machine_code.compiled([text(5)], tmp_path)


OUTSIDE = """declare float @expf(float)
define i32 @kernel(ptr %in, ptr %out, ptr %sizes, i64 %begin, i64 %end) {
  %a = load float, ptr %in
  %x = call float @expf(float %a)
  store float %x, ptr %out
  ret i32 0
}
"""
VARIABLE = """@v = internal global i64 7
define i32 @kernel(ptr %in, ptr %out, ptr %sizes, i64 %begin, i64 %end) {
  %a = load volatile i64, ptr @v
  store i64 %a, ptr %out
  store volatile i64 %begin, ptr @v
  ret i32 0
}
"""


@pytest.mark.parametrize(("text", "named"), [(OUTSIDE, "refers to 'expf'"), (VARIABLE, "has variables")])
def test_code_that_needs_more_than_itself_is_refused(text, named):
    with pytest.raises(ModelError, match=named):
        machine_code._compile(text)


def test_kernels_that_were_used_longest_ago_are_removed(tmp_path, monkeypatch):
    monkeypatch.setitem(cache._KEPT, r"[0-9a-f]{32}\.kernel", 2)
    texts = [text(200 + i) for i in range(3)]
    names = [f"{machine_code._key(each)}.kernel" for each in texts]
    machine_code.compiled(texts[:2], tmp_path)
    cache.tidy.cache_clear()  # another process
    for days, name in enumerate(names[:2], start=2):
        os.utime(tmp_path / name, (time.time() - days * 24 * 3600,) * 2)
    machine_code.compiled(texts[1:], tmp_path)  # finds one and compiles one
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(names[1:])
