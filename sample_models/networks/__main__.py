"""Write training steps: ``python -m sample_models.networks FOLDER FAMILY:NETWORK ...``, a family alone is all of it."""

from __future__ import annotations

import argparse
from pathlib import Path

import onnx

from . import FAMILIES, builder


def main() -> None:
    """Write those that the folder lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"families: {', '.join(FAMILIES)}; default: list them")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for key in given.names or FAMILIES:
        keys = [key] if ":" in key else [f"{key}:{name}" for name in FAMILIES[key]()]
        for each in keys:
            path = given.folder / f"{each.partition(':')[2]}.onnx"
            if given.names and not path.exists():
                onnx.save(builder(each)()(), path)
            print(path if given.names else each, flush=True)


if __name__ == "__main__":
    main()
