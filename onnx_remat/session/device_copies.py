"""What copies alongside the kernels need of CUDA: streams of their own, events, and memory of the host."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

from onnx_remat.fuse import shim
from onnx_remat.messages import Message, Setting
from onnx_remat.session.cuda_memory import check, pinned, runtime

_NON_BLOCKING = 1  # cudaStreamNonBlocking: it does not wait for the default stream
_NO_TIMING = 2  # cudaEventDisableTiming


def enable(secret: int, first: int, copies: Sequence[Mapping[str, Any]], nbytes: int, state: int = 0) -> None:
    """Within `shim.offered`, let copies run: give them streams, events and `nbytes` of the host.

    Parameters
    ----------
    secret : int
    first : int
        Handle of the first copy; those of the others follow.
    copies : sequence of mapping
        `copies.Copy.stated` of each.
    nbytes : int
    state : int
        Address of the session's state on the host.

    Raises
    ------
    ModelError
        The host has too little memory that a device can copy from.
    """
    with runtime() as cuda:
        names = "cudaEventRecord", "cudaStreamWaitEvent", "cudaMemcpyAsync"
        functions = [_address(getattr(cuda, name)) for name in names]
        host = pinned(cuda, nbytes, Message("plan with a larger {}", Setting("budget")))
        shim.give(secret, host, _address(cuda.cudaFreeHost))
        streams = {kind: _stream(cuda, secret) for kind in (shim.OUT, shim.IN)}
        done: dict[int, int] = {}
        for number, copy in enumerate(copies):
            issued = stream = 0
            if copy["kind"] != shim.WAIT:
                issued, stream = _event(cuda, secret), streams[copy["kind"]]
                done[copy["event"]] = _event(cuda, secret)
            place = (state if copy["state"] else host) + copy["offset"]
            ends = stream, issued, done[copy["event"]]
            shim.describe_copy(secret, first + number, [copy["kind"], place, copy["nbytes"], *ends, *functions])


def _event(cuda: Any, secret: int) -> int:
    made = ctypes.c_void_p()
    check(cuda.cudaEventCreateWithFlags(ctypes.byref(made), ctypes.c_uint(_NO_TIMING)), "make an event")
    shim.give(secret, made.value or 0, _address(cuda.cudaEventDestroy))
    return made.value or 0


def _stream(cuda: Any, secret: int) -> int:
    """Return a stream of this session's own: another may capture a graph at the same time."""
    made, how = ctypes.c_void_p(), (ctypes.c_uint(_NON_BLOCKING), ctypes.c_int(0))
    check(cuda.cudaStreamCreateWithPriority(ctypes.byref(made), *how), "make a stream for copies")
    shim.give(secret, made.value or 0, _address(cuda.cudaStreamDestroy))
    return made.value or 0


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
