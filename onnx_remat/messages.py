"""What users read: texts that name settings, and findings, as text and as JSON.

A text is a template and its parts, as in `str.format`; a `Setting` among them is data until a front writes it: Python
writes ``budget=5000000``, the command line ``--budget 5000000B``.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any, ClassVar


class Word(str):
    """What stands for a value that the reader has to choose: ``N``, ``PYTHON``."""

    __slots__ = ()

    def __repr__(self) -> str:
        """The word itself, without quotes."""
        return str(self)


@dataclass(frozen=True, slots=True)
class Setting:
    """An argument in a message, by its name in Python, with or without a value; its text is Python's.

    >>> print(Setting("effort", 60.0), Setting("costs", "no.json"), Setting("keep"), Setting("jobs", Word("N")))
    effort=60 costs='no.json' keep= jobs=N
    """

    name: str
    value: object = Word()

    @property
    def has_value(self) -> bool:
        """Is there more to it than its name?"""
        return not isinstance(self.value, Word) or bool(self.value)

    def __str__(self) -> str:
        """As in a call."""
        if isinstance(self.value, Real) and not isinstance(self.value, bool):
            return f"{self.name}={number(self.value)}"
        return f"{self.name}={self.value!r}"


def number(value: Real) -> str:
    """A number without digits that say nothing.

    >>> number(60.0), number(5_000_000)
    ('60', '5000000')
    """
    return f"{value:d}" if isinstance(value, Integral) else f"{float(value):g}"


class Message(str):
    """A text, the settings in it written as Python does; `spelled` writes them otherwise.

    >>> text = Message("try {} ({})", Setting("budget", 5_000_000), "5.0 MB")
    >>> print(text, "|", text.spelled(lambda setting: f"--{setting.name} {setting.value}B"))
    try budget=5000000 (5.0 MB) | try --budget 5000000B (5.0 MB)

    Parameters
    ----------
    template : str
        As for `str.format` where parts follow; else the text.
    *parts : object
        Settings, messages and anything else.
    """

    template: str
    parts: tuple[object, ...]

    def __new__(cls, template: str, *parts: object) -> Message:
        """Fill in the parts."""
        made = super().__new__(cls, template.format(*parts) if parts else template)
        made.template, made.parts = template, parts
        return made

    def spelled(self, write: Callable[[Setting], str]) -> str:
        """The text with every setting as `write` writes it."""
        if not self.parts:
            return str(self)
        return self.template.format(
            *(write(part) if isinstance(part, Setting) else spelled(part, write) for part in self.parts)
        )

    def settings(self) -> Iterator[Setting]:
        """The settings, in their order in the text."""
        for part in self.parts:
            if isinstance(part, Setting):
                yield part
            elif isinstance(part, Message):
                yield from part.settings()


def spelled(text: object, write: Callable[[Setting], str]) -> str:
    """Any text with the settings of messages as `write` writes them."""
    return text.spelled(write) if isinstance(text, Message) else str(text)


def joined(separator: str, pieces: Iterable[str]) -> Message:
    """`str.join` of texts that may be messages.

    >>> print(joined("; ", ["no plan", Message("try {}", Setting("effort", 60))]))
    no plan; try effort=60
    """
    parts = tuple(pieces)
    return Message(separator.join(["{}"] * len(parts)), *parts)


def to_data(text: str) -> dict[str, Any]:
    """A text that may be a message as what JSON has, for another process; `from_data` reads it.

    >>> text = Message("try {}, {{or less}}", Setting("dims", {"batch": Word("N")}))
    >>> print(from_data(to_data(text)), from_data(to_data(text)) == text)
    try dims={'batch': N}, {or less} True
    """
    found: list[Setting] = []

    def mark(setting: Setting) -> str:
        found.append(setting)
        return _MARK

    pieces = spelled(text, mark).split(_MARK)
    return {"pieces": pieces, "settings": [[setting.name, _packed(setting.value)] for setting in found]}


def from_data(data: Mapping[str, Any]) -> str:
    """The text that `to_data` was given."""
    pieces = [piece.replace("{", "{{").replace("}", "}}") for piece in data["pieces"]]
    settings = [Setting(name, _unpacked(value)) for name, value in data["settings"]]
    return Message("{}".join(pieces), *settings) if settings else str(data["pieces"][0])


_MARK = "\0"  # control characters of names are spelt out in every message


def _packed(value: object) -> Any:
    if isinstance(value, Word):
        return {"word": str(value)}
    return {"of": {name: _packed(each) for name, each in value.items()}} if isinstance(value, Mapping) else value


def _unpacked(value: Any) -> object:
    if not isinstance(value, Mapping):
        return value
    return Word(value["word"]) if "word" in value else {name: _unpacked(each) for name, each in value["of"].items()}


@dataclass(frozen=True, slots=True)
class Finding(ABC):
    """What was found out: a record whose fields are the keys of its JSON."""

    schema: ClassVar[str]
    """Name and version of the JSON layout: the number rises when a field changes its meaning or goes away."""

    def to_dict(self) -> dict[str, Any]:
        """The schema and the fields."""
        return {"schema": self.schema, **asdict(self)}

    def to_json(self) -> str:
        """The finding as a JSON object."""
        return json.dumps(self.to_dict(), indent=2)

    @abstractmethod
    def lines(self) -> list[str]:
        """The finding for people, line by line."""

    def to_text(self) -> str:
        """The finding for people."""
        return joined("\n", self.lines())
