"""The fake device's books, in a process of the GPU environment: loaded before onnxruntime, which it then hands out.

device = Device(folder)                # from build.build
session = device.ort.InferenceSession(path, providers=[("CUDAExecutionProvider", device.exact())])
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

DIRECTIONS = ("host", "up", "down", "device")
"""Copies: within the host, to the device, to the host, within the device."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the books.

    Attributes
    ----------
    kind : str
        ``M`` allocated, ``F`` freed, ``0`` to ``3`` copied (an index into `DIRECTIONS`), ``W`` the host waited.
    bytes, address : int
        Of what was allocated, freed or written.
    """

    kind: str
    bytes: int
    address: int


class _Event(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_int64), ("address", ctypes.c_int64), ("kind", ctypes.c_int64)]


class Device:
    """The fake device that this process sees; there is one."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(folder / "libfake.so"), ctypes.RTLD_GLOBAL)
        for path in sorted(folder.glob("lib*.so.*")):
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        import onnxruntime  # only now: it looks for the libraries

        self.ort: ModuleType = onnxruntime

    def read(self, name: str) -> int:
        """``live``, ``peak`` (bytes), ``waits``, ``launches``, or a setting."""
        return ctypes.c_int64.in_dll(self._library, f"fake_{name}").value

    def set(self, name: str, value: int) -> None:
        """``capacity`` of the device, or ``workspace_forward``, ``_filter``, ``_data``, ``_reduce``, in bytes."""
        ctypes.c_int64.in_dll(self._library, f"fake_{name}").value = value

    def copies(self) -> dict[str, tuple[int, int]]:
        """Per direction, how many copies and how many bytes; directions without any are left out."""
        count, size = ((ctypes.c_int64 * 4).in_dll(self._library, f"fake_{what}") for what in ("copies", "copied"))
        return {where: (count[i], size[i]) for i, where in enumerate(DIRECTIONS) if count[i]}

    def events(self) -> list[Event]:
        """Everything since the last reset, in order."""
        at = ctypes.POINTER(_Event).in_dll(self._library, "fake_events")
        return [Event(chr(at[i].kind), at[i].bytes, at[i].address) for i in range(self.read("event_count"))]

    def reset(self) -> None:
        """Start the books again: peak is what is live now."""
        self._library.fake_reset()

    def exact(self) -> dict[str, str]:
        """Provider options under which every tensor is an allocation of its own: no arena."""
        functions = {"alloc": self._library.fake_alloc, "free": self._library.fake_free}
        return {f"gpu_external_{k}": str(ctypes.cast(f, ctypes.c_void_p).value) for k, f in functions.items()}
