"""Completion in shells, by argcomplete: a shell that was told of a command asks it for the next word.

eval "$(register-python-argcomplete onnx-remat)"
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

_ASKED = "_ARGCOMPLETE"  # set by the shell: which word of the line is the command
_COMMAND = 2  # the second one: `onnx-remat sweep`


def words() -> list[str] | None:
    """What stands on the line after the command's name, the unfinished word left out; None where no shell asks."""
    if _ASKED not in os.environ:
        return None
    from argcomplete.lexers import split_line

    _, _, _, found, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    return list(found[1:])


def answer(parser: argparse.ArgumentParser, of_command: bool = False) -> None:
    """Tell the shell what may come next and end the process; nothing where no shell asks."""
    if _ASKED not in os.environ:
        return
    import argcomplete

    if of_command:
        os.environ[_ASKED] = str(_COMMAND)
    argcomplete.autocomplete(parser)


def complete_first(action: argparse.Action, commands: Sequence[str]) -> None:
    """Let a positional argument be one of the commands or a file."""

    def completer(prefix: str, **_: object) -> list[str]:
        from argcomplete.completers import FilesCompleter

        return [c for c in commands if c.startswith(prefix)] + list(FilesCompleter()(prefix))

    action.completer = completer  # type: ignore[attr-defined]  # read by argcomplete
