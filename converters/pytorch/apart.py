"""Prepare a step in another process if possible; this one imports nothing that only `prepare` needs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from onnx_remat.process import forked

from .living import Living, Place, forks
from .outside import Outside
from .own_step import Known, Measurement
from .preparation import Prepared, Request


def carried_out(request: Request, own: Known | None = None) -> tuple[Prepared, Mapping[str, Outside]]:
    """Prepare a step in a forked copy of this process, or here if that is impossible or it is for a device.

    Parameters
    ----------
    request : Request
    own : Known, optional
        PyTorch's own step, where it is measured already.

    Returns
    -------
    (Prepared, mapping of str to Outside)
        The result, and the tensors outside the step by input name.
    """
    if forks() and request.provider == "cpu":
        living = Living.now()
        made = forked.call(partial(_apart, request, living), "the export")
        if made is not None:
            places = {name: one for name, one in made.outside.items() if isinstance(one, Place)}
            return made, {name: living.outside(place) for name, place in places.items()}
    from .prepare import prepared

    with nullcontext(own) if request.provider != "cpu" else _measured(request) as found:
        made = prepared(request, found)
    return made, {name: one for name, one in made.outside.items() if isinstance(one, Outside)}


def _apart(request: Request, living: Living) -> Prepared | None:
    with _measured(request) as own:  # first, while the heap is that of the training process
        from .prepare import prepared_apart

        return prepared_apart(request, own, living)


def _measured(request: Request) -> AbstractContextManager[Measurement | None]:
    """Start to measure PyTorch's own step if that is of interest and possible; the export goes on meanwhile."""
    return Measurement(request) if request.compares and forks() else nullcontext()
