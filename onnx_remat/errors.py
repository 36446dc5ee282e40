"""Every way onnx-remat refuses, in one tree; each class carries its command-line exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from onnx_remat.messages import Message


class OnnxRematError(Exception):
    """Base of every error that is the input's, the budget's or the environment's, never a bug of ours.

    Parameters
    ----------
    text : str
        One line for the user: a template for `messages.Message` where parts follow.
    *parts : object
        What is filled in. Settings among them are data: their text is Python's, the command line writes its flags.
    **of_python
        Of the exception of Python's that it is besides: an ImportError's `name`.

    Examples
    --------
    >>> from onnx_remat.messages import Setting
    >>> error = UsageError("try {}, or less", Setting("effort", 60))
    >>> print(error, error.settings)
    try effort=60, or less {'effort': 60}
    """

    exit_code = 4

    def __init__(self, text: str = "", *parts: object, **of_python: Any) -> None:
        super().__init__(Message(text, *parts) if parts else text, **of_python)

    @property
    def message(self) -> str:
        """The text, a `Message` where it names settings."""
        text: str = self.args[0]
        return text

    @property
    def settings(self) -> dict[str, object]:
        """Settings that the text names with a value; the last one of a name counts."""
        found = self.message.settings() if isinstance(self.message, Message) else ()
        return {each.name: each.value for each in found if each.has_value}


class UsageError(OnnxRematError, ValueError):
    """An argument is malformed or names something that does not exist."""

    exit_code = 2


class BudgetInfeasibleError(OnnxRematError):
    """No plan was found under the budget.

    Parameters
    ----------
    message : str
        One line for the user.
    best_peak_bytes : int
        Least that any plan found takes of what the budget covers, in bytes.
    lower_bound_bytes : int
        No schedule of this graph can take less of it.
    """

    exit_code = 3

    def __init__(self, message: str, best_peak_bytes: int, lower_bound_bytes: int) -> None:
        super().__init__(message)
        self.best_peak_bytes = best_peak_bytes
        self.lower_bound_bytes = lower_bound_bytes


class ModelError(OnnxRematError):
    """The model is unreadable, invalid, or uses something onnx-remat does not support."""


class ShapeError(ModelError):
    """A value's size in bytes cannot be told."""


class VerificationError(OnnxRematError):
    """The rewritten model is not what was promised; nothing was written."""

    exit_code = 5


class ConversionError(OnnxRematError):
    """A framework's training step cannot be turned into standard ONNX, or came out wrong; nothing was written."""

    exit_code = 6


class RankLostError(OnnxRematError):
    """Another process of a job has ended, or does not answer."""

    exit_code = 7


class MissingExtraError(OnnxRematError, ImportError):
    """A package that an extra of ours brings is not installed; to Python it is an ImportError like others."""


def closest(name: str, names: Iterable[str]) -> str | None:
    """The one of `names` most like `name`, None where none is like it.

    >>> closest("bath", ["batch", "length"]), closest("bath", ["n"])
    ('batch', None)
    """
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown `name`: the nearest of `names`, or nothing.

    >>> "no such dim" + did_you_mean("bath", ["batch", "length"])
    "no such dim; did you mean 'batch'?"
    """
    found = closest(name, names)
    return "" if found is None else f"; did you mean {found!r}?"
