"""Parse and format sizes, dims and durations. SI and IEC units are literal: 1 GB = 10^9, 1 GiB = 2^30 bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from onnx_remat.errors import UsageError
from onnx_remat.messages import Setting

_UNITS = {"b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_NUMBER = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e([+-]?[0-9]+))?"
_SIZE = re.compile(rf"{_NUMBER}\s*([kmgt]?i?b)", re.IGNORECASE)
_PERCENT = re.compile(rf"{_NUMBER}\s*%", re.IGNORECASE)
_DURATION = re.compile(rf"{_NUMBER}\s*(ms|s|m|min|h)?", re.IGNORECASE)
_LONGEST = 30 * 86400.0
_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Budget:
    """A memory limit: bytes, or a fraction of the memory that the original takes.

    `slower` instead of either: the least memory for which a step takes at most such a fraction more time, or compute.
    """

    bytes: int | None = None
    fraction: float | None = None
    slower: float | None = None

    def resolve(self, original: int) -> int:
        """Return the limit in bytes, given the covered bytes of the original; UsageError where that takes planning."""
        if self.bytes is not None:
            return self.bytes
        if self.fraction is None:
            raise UsageError(
                "a budget by time, such as auto, is for rewriting one file: give a size or a percentage here"
            )
        return int(original * self.fraction)


AUTO = Budget(slower=0.1)
"""The budget ``"auto"``."""


def parse_budget(text: str | int | Budget) -> Budget:
    """Parse a budget.

    Parameters
    ----------
    text : str, int or Budget
        ``"4GB"``, ``"3.5GiB"``, ``"123456789B"``, ``"80%"``; an int is bytes. ``"+5%"``: the least memory for which a
        step takes at most 5 % more time; ``"auto"`` is ``"+10%"``.

    Raises
    ------
    UsageError
        `text` is not a positive, finite size with a unit.

    Examples
    --------
    >>> parse_budget("4GB").bytes, parse_budget("1.5 GiB").bytes, parse_budget("80%").fraction
    (4000000000, 1610612736, 0.8)
    >>> parse_budget("auto") == parse_budget("+10%")
    True
    >>> parse_budget("0.6")
    Traceback (most recent call last):
        ...
    onnx_remat.errors.UsageError: budget '0.6' is not a size: write 60% of what the original takes, or ...
    """
    if isinstance(text, Budget):
        return _checked(text)
    if isinstance(text, bool) or not isinstance(text, Integral | str):
        share = isinstance(text, float) and 0 < text <= 1
        hint = f": for a share write '{100 * text:g}%'" if share else ""
        raise UsageError(f"budget must be text like '4GB' or '80%', or an int of bytes, not {text!r:.100}{hint}")
    if isinstance(text, str) and text.strip() == "auto":
        return AUTO
    number: float
    if isinstance(text, Integral):  # numpy's, too
        number, budget = int(text), Budget(bytes=int(text))
    elif match := _SIZE.fullmatch(text.strip()):
        number = _number(match, text) * _UNITS[match[3].lower()]
        budget = Budget(bytes=int(number))
    elif match := _PERCENT.fullmatch(text.strip().removeprefix("+")):
        number = _number(match, text)
        budget = Budget(slower=number / 100) if text.strip().startswith("+") else Budget(fraction=number / 100)
    else:
        if re.fullmatch(rf"-?{_NUMBER}", text.strip(), re.IGNORECASE) and float(text) <= 0:
            raise UsageError(f"budget {text!r} must be greater than zero")
        raise UsageError(f"budget {text!r} is not a size: write {_meant(text.strip())}")
    if isinstance(text, Integral) and 0 < number <= _PERCENTS:
        raise UsageError(f"budget {text} would be {text} bytes: for a share write '{text}%'")
    if number <= 0 or budget.bytes == 0:
        raise UsageError(f"budget {text!r} must be greater than zero")
    if number > 2**62:
        raise UsageError(f"budget {text!r} is larger than any machine's memory")
    return budget


def as_budget(nbytes: int) -> int | str:
    """Return a size as an argument that `parse_budget` takes for bytes: text where an int is taken for a percentage.

    >>> as_budget(76), as_budget(5_000_000)
    ('76B', 5000000)
    """
    return nbytes if nbytes > _PERCENTS else f"{nbytes}B"


def _checked(budget: Budget) -> Budget:
    """Return a `Budget` if its fields are valid; UsageError otherwise."""
    given = [value for value in (budget.bytes, budget.fraction, budget.slower) if value is not None]
    if len(given) == 1 and budget.bytes is not None:
        return parse_budget(f"{budget.bytes}B")
    if len(given) != 1 or not isinstance(given[0], Real) or not 0 < given[0] < math.inf:
        raise UsageError(f"{budget} is neither a number of bytes nor a fraction, greater than zero")
    return budget


def _meant(text: str) -> str:
    """Suggest budgets in place of one without a unit, or with half of one."""
    if re.fullmatch(_NUMBER, text, re.IGNORECASE):
        number = float(text)
        if number > _LARGE:
            return f"{text}B for bytes"
        share = f"{100 * number:g}%" if number <= 1 else f"{text}%"
        return f"{share} of what the original takes, or the unit of a size: {text}MB, {text}GB, ..."
    if re.fullmatch(rf"{_NUMBER}\s*[kmgt]", text, re.IGNORECASE):
        return f"{text.upper()}B (powers of 1000) or {text.upper()}iB (of 1024)"
    return "e.g. 4GB, 3.5GiB, 123456789B, 80%, auto or +5%"


_PERCENTS, _LARGE = 100, 10_000
"""Up to which an int is meant as a percentage, and above which a number without a unit is meant as bytes."""


def _number(match: re.Match[str], text: str) -> float:
    try:
        number = float(match[1]) * 10.0 ** int(match[2] or 0)
    except (OverflowError, ValueError):  # the latter: an exponent of thousands of digits
        number = math.inf
    if not math.isfinite(number):
        raise UsageError(f"{text!r} is not a finite number")
    return number


def parse_size(size: str | int) -> int:
    """Parse a size in bytes from an int or from text with a unit; 0 is allowed.

    >>> parse_size("64MiB"), parse_size(0), parse_size("0B")
    (67108864, 0, 0)
    """
    if size in (0, "0", "0B"):
        return 0
    whole = isinstance(size, Integral) and not isinstance(size, bool)
    found = parse_budget(Budget(int(size)) if whole else size).bytes
    if found is None:
        raise UsageError(f"{size!r} is not a size in bytes, like '64MiB'")
    return found


def parse_duration(text: str | float | int) -> float:
    """Parse a duration into seconds: ``"30s"``, ``"500ms"``, ``"2m"`` or a plain number.

    >>> parse_duration("2m"), parse_duration("500ms"), parse_duration(30)
    (120.0, 0.5, 30.0)
    """
    match = _DURATION.fullmatch(str(text).strip())
    if isinstance(text, bool) or match is None:
        raise UsageError(f"duration {text!r:.100} is not a time: write e.g. 30s, 500ms or 2m")
    seconds = _number(match, str(text)) * _SECONDS[(match[3] or "").lower()]
    if seconds <= 0:
        raise UsageError(f"duration {text!r} must be greater than zero")
    if seconds > _LONGEST:
        raise UsageError(f"duration {text!r} is longer than {_LONGEST / 86400:.0f} days")
    return seconds


def parse_dims(items: list[str] | tuple[str, ...]) -> dict[str, int]:
    """Parse sizes of symbolic dimensions from ``NAME=VALUE`` texts.

    >>> parse_dims(["batch=32", "seq=128"])
    {'batch': 32, 'seq': 128}
    """
    dims: dict[str, int] = {}
    for item in items:
        name, equals, value = item.rpartition("=")
        if not equals or not name or not re.fullmatch(r"\s*[0-9]{1,18}\s*", value):
            raise UsageError(f"dim {item!r} is not NAME=VALUE with a whole number, e.g. batch=32")
        if dims.get(name, int(value)) != int(value):
            raise UsageError(f"dim {name!r} is bound twice, to {dims[name]} and to {value}")
        dims[name] = int(value)
    return dims


def parse_pairs(items: list[str] | tuple[str, ...]) -> dict[str, str]:
    """Parse the output of each input from ``IN=OUT`` texts; names with ``=`` in them have equally many.

    >>> parse_pairs(["w=w_next", "layer=0/w=layer=0/w_next"])
    {'w': 'w_next', 'layer=0/w': 'layer=0/w_next'}
    """
    pairs: dict[str, str] = {}
    for item in items:
        parts = item.split("=")
        name, output = ("=".join(half) for half in (parts[: len(parts) // 2], parts[len(parts) // 2 :]))
        if not name or not output:
            raise UsageError(f"state {item!r} is not IN=OUT with the names of an input and an output, e.g. w=w_next")
        if pairs.get(name, output) != output:
            raise UsageError(f"state {name!r} is named twice, with outputs {pairs[name]!r} and {output!r}")
        pairs[name] = output
    return pairs


def check_dims(dims: object) -> dict[str, int]:
    """Return sizes of symbolic dimensions as a dict of Python ints.

    >>> check_dims(None), check_dims({"batch": 32})
    ({}, {'batch': 32})

    Raises
    ------
    UsageError
        `dims` is not a mapping of names to whole numbers of 0 or more.
    """
    if dims is None:
        return {}
    if not isinstance(dims, Mapping):
        raise UsageError(f"dims must map names to sizes, such as {{'batch': 32}}, not be {dims!r:.100}")
    for name, size in dims.items():
        if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, Integral) or size < 0:
            raise UsageError(f"dims must map names to whole numbers, not {name!r:.100} to {size!r:.100}")
    return {name: int(size) for name, size in dims.items()}


def check_threads(threads: object) -> int:
    """Return a number of threads as a Python int, 0 for the default.

    >>> check_threads(2), check_threads(0)
    (2, 0)

    Raises
    ------
    UsageError
        `threads` is not a whole number of 0 or more.
    """
    if isinstance(threads, bool) or not isinstance(threads, Integral) or threads < 0:
        given = Setting("threads", threads)
        raise UsageError("{} is not a number of threads: use 1 or more, or leave {} out", given, Setting("threads"))
    return int(threads)


def format_bytes(size: int) -> str:
    """Format a size for people, in the SI units of the command line.

    >>> format_bytes(0), format_bytes(999), format_bytes(123456789)
    ('0 B', '999 B', '123.5 MB')
    """
    number, unit = float(size), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if abs(number) < 999.95:
            break
        number, unit = number / 1000, larger
    return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"


def format_seconds(seconds: float) -> str:
    """Format a duration for people.

    >>> format_seconds(7.4), format_seconds(187), format_seconds(7500)
    ('7 s', '3 min 07 s', '2 h 05 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format a table as lines of text: the first column aligned left, the others right.

    >>> table([("peak", "9 MB"), ("  inputs", "1.5 MB")])
    ['peak        9 MB', '  inputs  1.5 MB']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(f"{cell:<{width}}" if not i else f"{cell:>{width}}" for i, (cell, width) in enumerate(cells)).rstrip()
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]
