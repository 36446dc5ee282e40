"""Second uses of one `Session` on the fake device: JSON in and out.

In: ``path`` of a step by `test_cuda_session.update` whose input ``scale`` has a default. Out: by name, what was found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from onnx_remat.errors import OnnxRematError
from onnx_remat.session.session import Session
from onnx_remat.session.training import Loop
from tests.support.fake_cuda.here import Books
from tests.support.fake_cuda.lying import Held
from tests.support.fake_cuda.session import state_of


def main() -> None:
    """Do what stdin asks for."""
    path = json.load(sys.stdin)["path"]
    books = Books()  # it holds the device
    books.compute()
    found = {"lying": _lying, "shared": _shared, "left_out": _left_out, "restored": _restored}
    print(json.dumps({name: of(path) for name, of in found.items()}))


def _refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except OnnxRematError as error:
        return str(error)
    return ""


def _lying(path: str) -> dict[str, bool]:
    """A `Loop` of the host's arrays, after a run with arrays of the device."""
    with Session(path, "cuda", donate=True) as session:
        held = {name: Held(array) for name, array in state_of(session, 0).items()}
        session.run(held)
        left, state = held["w"].read(), state_of(session, 1)
        loop = Loop(session, state, device="cuda")
        starts = bool(np.array_equal(loop.view("w"), state["w"]))
        loop.step()
        return {"starts": starts, "apart": bool(np.array_equal(held["w"].read(), left))}


def _shared(path: str) -> list[str]:
    """Uses of a `Loop` after another one, and of that after a run."""
    with Session(path, "cuda", donate=True) as session:
        first = Loop(session, state_of(session, 0), device="cuda")
        first.step()
        second = Loop(session, state_of(session, 1), device="cuda")
        found = [_refusal(first.step), _refusal(first.state), _refusal(second.step)]
        session.run(state_of(session, 2))
        return [*found, _refusal(second.step)]


def _left_out(path: str) -> dict[str, Any]:
    """Runs without an input that an earlier one was given, with a default and without."""
    with Session(path, "cuda", donate=True) as session:
        state = state_of(session, 0)
        plain = {name: state[name] for name in "wmv"}

        def new(feeds: dict[str, np.ndarray]) -> bytes:
            made = session.run({name: array.copy() for name, array in feeds.items()})
            return bytes(made["new.w"].tobytes())

        default, scaled = new(plain), new(state)
        refused = _refusal(lambda: session.run({name: state[name] for name in "mv"}))
        return {"differ": default != scaled, "again": new(plain) == default, "refused": refused}


def _restored(path: str) -> bool:
    """Whether a `Loop` has a default again once it goes on from a state without the value that a batch had."""
    with Session(path, "cuda", donate=True) as session:
        state = state_of(session, 0)
        loop = Loop(session, {name: state[name] for name in state if name != "scale"}, device="cuda")
        start = loop.state()
        loop.step()
        default = loop.view("w").tobytes()
        loop.restore(start)
        loop.step({"scale": state["scale"]})
        other = loop.view("w").tobytes()
        loop.restore(start)
        loop.step()
        return bool(other != default and loop.view("w").tobytes() == default)


if __name__ == "__main__":
    main()
