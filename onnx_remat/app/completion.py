"""Shell completion by argcomplete: a shell in which a command is registered queries it for the next word.

eval "$(register-python-argcomplete onnx-remat)"
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

_QUERY = "_ARGCOMPLETE"  # set by the shell: index of the word that is the command
_COMMAND = 2  # the second word: `onnx-remat sweep`


def words() -> list[str] | None:
    """Return the words after the command's name, without the unfinished one; None where no shell queries."""
    if _QUERY not in os.environ:
        return None
    from argcomplete.lexers import split_line

    _, _, _, found, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    return list(found[1:])


def answer(parser: argparse.ArgumentParser, of_command: bool = False) -> None:
    """Print the possible next words for the shell and exit; do nothing where no shell queries."""
    if _QUERY not in os.environ:
        return
    import argcomplete

    if of_command:
        os.environ[_QUERY] = str(_COMMAND)
    argcomplete.autocomplete(parser)


def complete_first(action: argparse.Action, commands: Sequence[str]) -> None:
    """Complete a positional argument by the commands and by files."""

    def completer(prefix: str, **_: object) -> list[str]:
        from argcomplete.completers import FilesCompleter

        return [c for c in commands if c.startswith(prefix)] + list(FilesCompleter()(prefix))

    action.completer = completer  # type: ignore[attr-defined]  # read by argcomplete
