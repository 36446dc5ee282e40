"""Progress on a terminal: stage, elapsed time, the best plan so far, time left. No output elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

from onnx_remat.units import format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

_PER_SECOND = 5  # redraws, so that the elapsed time advances between calls


class Progress:
    """A callback for `Options.progress` that updates one line of a terminal until `clear`.

    Parameters
    ----------
    quiet : bool
        Show nothing; also implied where standard error is not a terminal, or one that cannot rewrite a line.
    log : bool
        There, unless `quiet`, write a line for each new stage, for logs and notebooks.
    """

    def __init__(self, quiet: bool = False, log: bool = False) -> None:
        self._show = sys.stderr.isatty() and not quiet and os.environ.get("TERM") != "dumb"
        self._log = log and not quiet and not self._show
        self._told: set[str] = set()
        self._began = time.monotonic()
        self._stage, self._fraction, self._since = "", 0.0, self._began
        self._live: Live | None = None

    def __call__(self, stage: str, fraction: float) -> None:
        """Show `stage` and the fraction of it that is done."""
        what, _, _ = stage.partition(" of ")  # without figures
        if self._log and what not in self._told:
            self._told.add(what)
            print(f"onnx-remat: {what}", file=sys.stderr, flush=True)
        if not self._show:
            return
        if fraction <= self._fraction or fraction >= 1:  # another stage, or the next round of one
            self._since = time.monotonic()
        self._stage, self._fraction = stage, fraction
        if self._live is None:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(
                console=Console(stderr=True), get_renderable=self._line, refresh_per_second=_PER_SECOND, transient=True
            )
            with contextlib.suppress(OSError):
                self._live.start()

    def clear(self) -> None:
        """Remove the line."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def _line(self) -> RenderableType:
        from rich.spinner import Spinner
        from rich.text import Text

        return Spinner("dots", Text(self.text(time.monotonic())))

    def text(self, now: float) -> str:
        """Return the line's text at time `now` of the monotonic clock."""
        parts = [self._stage, f"{format_seconds(now - self._began)} so far"]
        if 0 < self._fraction < 1:
            spent = now - self._since
            parts.append(f"about {format_seconds(spent * (1 - self._fraction) / self._fraction)} left of this stage")
        return ", ".join(parts)
