"""The table of options in the guide, as `onnx_remat.options.OPTIONS` states them.

python -m scripts.options writes it between the marks ``<!-- options -->`` and ``<!-- end -->`` of docs/guides/cli.md.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from onnx_remat.app.flags import USUAL_COSTS, selector_names
from onnx_remat.options import OPTIONS, Options

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "cli.md"


def table() -> str:
    """A row per option: its flag, its name in Python, its help."""
    filled = {"provider": "cpu", "selectors": ", ".join(selector_names()), "effort": "30s", "costs": USUAL_COSTS}
    rows = [("flag", "in Python", "meaning"), ("---",) * 3]
    for name, option in OPTIONS.items():
        if option.flag:
            words = f"{option.flag} {'|'.join(option.choices) if option.choices else option.metavar or ''}".rstrip()
            default = Options.__dataclass_fields__[name].default
            called = f"{name}={not default}" if isinstance(default, bool) else name
            rows.append((f"`{words}`", f"`{called}`", option.help.format(**filled)))
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def rendered(page: str) -> str:
    """The page with the table as it is now."""
    made = f"<!-- options -->\n{table()}\n<!-- end -->"
    return re.sub(r"(?ms)^<!-- options -->\n.*?^<!-- end -->$", lambda _: made, page)


def main() -> None:
    """Render the page."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(rendered(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
