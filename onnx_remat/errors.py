"""All errors that onnx-remat raises on purpose, in one class tree; each class has its command-line exit code."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from onnx_remat.messages import Message


class OnnxRematError(Exception):
    """Base of every error caused by the input, the budget or the environment, never by a bug in onnx-remat.

    Parameters
    ----------
    text : str
        One line for the user; with `parts`, a template for `messages.Message`.
    *parts : object
        Values for the template. A `Setting` is data: its text is a Python argument, on the command line a flag.
    **of_python
        Arguments of a second base class from Python, such as ImportError's `name`.

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

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields: the arguments of some classes are more than the text."""
        return _unpickled, (type(self), self.args, self.__dict__)

    @property
    def message(self) -> str:
        """Text of the error, a `Message` where it names settings."""
        text: str = self.args[0]
        return text

    @property
    def settings(self) -> dict[str, object]:
        """Settings with a value in the text, by name; the last of a name counts."""
        found = self.message.settings() if isinstance(self.message, Message) else ()
        return {each.name: each.value for each in found if each.has_value}


def _unpickled(kind: type[OnnxRematError], args: tuple[Any, ...], fields: dict[str, Any]) -> OnnxRematError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


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
        Lowest peak of any plan found, in bytes of what the budget covers.
    lower_bound_bytes : int
        Lower bound on the peak of every schedule of this graph.

    Attributes
    ----------
    cut_short : bool
        Whether a time limit cut planning short: another run may find a plan.
    """

    exit_code = 3
    cut_short = False

    def __init__(self, message: str, best_peak_bytes: int, lower_bound_bytes: int) -> None:
        super().__init__(message)
        self.best_peak_bytes = best_peak_bytes
        self.lower_bound_bytes = lower_bound_bytes


class ModelError(OnnxRematError):
    """The model is unreadable, invalid, or uses something onnx-remat does not support."""


class ShapeError(ModelError):
    """The size of a value in bytes is unknown."""


class VerificationError(OnnxRematError):
    """The rewritten model fails its verification; nothing was written."""

    exit_code = 5


class ConversionError(OnnxRematError):
    """A framework's training step cannot be converted to standard ONNX, or its result is wrong; nothing was written."""

    exit_code = 6


class RankLostError(OnnxRematError):
    """Another process of a distributed job has ended or does not respond."""

    exit_code = 7


class MissingExtraError(OnnxRematError, ImportError):
    """A package from one of onnx-remat's extras is not installed; also an ImportError."""


def closest(name: str, names: Iterable[str]) -> str | None:
    """Return the closest match of `name` in `names`, None where none is close; the dashes of flags do not count.

    A slip adds or drops two letters at most.

    >>> closest("bath", ["batch", "length"]), closest("bath", ["n"]), closest("--effort", ["--for"])
    ('batch', None, None)
    """
    bare = name.lstrip("-")
    known = {each.lstrip("-"): each for each in names}
    near = [each for each in known if abs(len(each) - len(bare)) <= 2]
    return next((known[each] for each in difflib.get_close_matches(bare, near, n=1)), None)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown `name`: the closest of `names`, empty where none is close.

    >>> "no such dim" + did_you_mean("bath", ["batch", "length"])
    "no such dim; did you mean 'batch'?"
    """
    found = closest(name, names)
    return "" if found is None else f"; did you mean {found!r}?"
