"""Texts for users that name settings, and findings as text and as JSON.

A text is a template and its parts, as in `str.format`. A `Setting` among the parts stays data until it is shown: in
Python as ``budget=5000000``, on the command line as ``--budget 5000000B``.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any, ClassVar


class Word(str):
    """A placeholder for a value that the reader chooses: ``N``, ``PYTHON``."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the word without quotes."""
        return str(self)


@dataclass(frozen=True, slots=True)
class Setting:
    """An argument in a message: its name in Python, with or without a value; its text is that of a Python call.

    >>> print(Setting("effort", 60.0), Setting("costs", "no.json"), Setting("keep"), Setting("jobs", Word("N")))
    effort=60 costs='no.json' keep= jobs=N
    """

    name: str
    value: object = Word()

    @property
    def has_value(self) -> bool:
        """Does it have a value?"""
        return not isinstance(self.value, Word) or bool(self.value)

    def __str__(self) -> str:
        """Return ``name=value``, as in a call."""
        if isinstance(self.value, Real) and not isinstance(self.value, bool):
            return f"{self.name}={number(self.value)}"
        return f"{self.name}={self.value!r}"


def number(value: Real) -> str:
    """Format a number without trailing zeros.

    >>> number(60.0), number(5_000_000)
    ('60', '5000000')
    """
    return f"{value:d}" if isinstance(value, Integral) else f"{float(value):g}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, the name of its type if there is none.

    >>> first_line(ValueError("\\n one \\n two")), first_line(ValueError())
    ('one', 'ValueError')
    """
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


class Message(str):
    """A text with its settings written as Python arguments; `spelled` writes them in another form.

    >>> text = Message("try {} ({})", Setting("budget", 5_000_000), "5.0 MB")
    >>> print(text, "|", text.spelled(lambda setting: f"--{setting.name} {setting.value}B"))
    try budget=5000000 (5.0 MB) | try --budget 5000000B (5.0 MB)

    Parameters
    ----------
    template : str
        A template for `str.format`; without `parts`, the text itself.
    *parts : object
        Settings, messages and any other values.
    """

    template: str
    parts: tuple[object, ...]

    def __new__(cls, template: str, *parts: object) -> Message:
        """Fill the parts into the template."""
        made = super().__new__(cls, template.format(*parts) if parts else template)
        made.template, made.parts = template, parts
        return made

    def spelled(self, write: Callable[[Setting], str]) -> str:
        """Return the text with every setting formatted by `write`."""
        if not self.parts:
            return str(self)
        return self.template.format(
            *(write(part) if isinstance(part, Setting) else _spelled(part, write) for part in self.parts)
        )

    def settings(self) -> Iterator[Setting]:
        """Yield the settings in the order of the text."""
        for part in self.parts:
            if isinstance(part, Setting):
                yield part
            elif isinstance(part, Message):
                yield from part.settings()


def spelled(text: object, write: Callable[[Setting], str]) -> str:
    """Return any text, a message with its settings formatted by `write`."""
    return str(_spelled(text, write))


def _spelled(part: object, write: Callable[[Setting], str]) -> object:
    """Return a part as it is, because its format may be that of a number, and a message spelled."""
    return part.spelled(write) if isinstance(part, Message) else part


def changed(text: str, change: Callable[[Setting], Setting]) -> str:
    """Return any text, a message with every setting replaced by `change`.

    >>> print(changed(Message("try {}", Setting("effort", 60)), lambda setting: Setting("planning", {"effort": 60})))
    try planning={'effort': 60}
    """
    if not isinstance(text, Message) or not text.parts:
        return text
    parts = (
        change(p) if isinstance(p, Setting) else changed(p, change) if isinstance(p, str) else p for p in text.parts
    )
    return Message(text.template, *parts)


def joined(separator: str, pieces: Iterable[str]) -> Message:
    """Join texts that may be messages, like `str.join`.

    >>> print(joined("; ", ["no plan", Message("try {}", Setting("effort", 60))]))
    no plan; try effort=60
    """
    parts = tuple(pieces)
    return Message(separator.join(["{}"] * len(parts)), *parts)


def to_data(text: str) -> dict[str, Any]:
    """Return a text, which may be a message, as JSON data for another process; `from_data` reads it.

    >>> text = Message("try {}, {{or less}}", Setting("dims", {"batch": Word("N")}))
    >>> print(from_data(to_data(text)), from_data(to_data(text)) == text)
    try dims={'batch': N}, {or less} True
    """
    found: list[Setting] = []

    def mark(setting: Setting) -> str:
        found.append(setting)
        return _MARK

    pieces = spelled(text, mark).split(_MARK) if isinstance(text, Message) else [text]
    return {"pieces": pieces, "settings": [[setting.name, _packed(setting.value)] for setting in found]}


def from_data(data: Mapping[str, Any]) -> str:
    """Return the text that was given to `to_data`."""
    pieces = [piece.replace("{", "{{").replace("}", "}}") for piece in data["pieces"]]
    settings = [Setting(name, _unpacked(value)) for name, value in data["settings"]]
    return Message("{}".join(pieces), *settings) if settings else str(data["pieces"][0])


_MARK = "\0"  # never part of a message: control characters in names are escaped


def _packed(value: object) -> Any:
    if isinstance(value, Word):
        return {"word": str(value)}
    return {"of": {name: _packed(each) for name, each in value.items()}} if isinstance(value, Mapping) else value


def _unpacked(value: Any) -> object:
    if not isinstance(value, Mapping):
        return value
    return Word(value["word"]) if "word" in value else {name: _unpacked(each) for name, each in value["of"].items()}


def json_text(data: object) -> str:
    """Return data as JSON, which has no NaN and no infinity: they become null.

    >>> print(json_text({"losses": (1.5, float("nan"))}).replace("\\n", ""))
    {  "losses": [    1.5,    null  ]}
    """
    return json.dumps(_finite(data), indent=2, allow_nan=False)


def _finite(data: object) -> object:
    if isinstance(data, Mapping):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


@dataclass(frozen=True, slots=True)
class Finding(ABC):
    """A command's result: a record whose fields are the keys of its JSON."""

    schema: ClassVar[str]
    """Name and version of the JSON layout: the version increases when a field changes its meaning or is removed."""

    def to_dict(self) -> dict[str, Any]:
        """Return the schema and the fields."""
        return {"schema": self.schema, **asdict(self)}

    def to_json(self) -> str:
        """Return the finding as a JSON object."""
        return json_text(self.to_dict())

    @abstractmethod
    def lines(self) -> list[str]:
        """Return the finding as lines of text."""

    def to_text(self) -> str:
        """Return the finding as text."""
        return joined("\n", self.lines())

    def __str__(self) -> str:
        return self.to_text()
