"""The commands ``onnx-remat``, also as ``python -m onnx_remat``, and ``onnx-remat-bench``.

This imports nothing before it can say that it was interrupted: what a command needs takes a second to import.
"""


def main() -> int:
    """Run ``onnx-remat``; returns the exit code."""
    try:
        from onnx_remat.app import cli
    except BaseException as error:
        return _interrupted("onnx-remat", error)
    return cli.main()


def bench() -> int:
    """Run ``onnx-remat-bench``; returns the exit code."""
    try:
        from onnx_remat.app import bench
    except BaseException as error:
        return _interrupted("onnx-remat-bench", error)
    return bench.main()


def _interrupted(name: str, error: BaseException) -> int:
    """Say so and return 130 where an interruption is behind an error; raise it otherwise."""
    from onnx_remat.app import streams

    if not streams.is_interruption(error):
        raise error
    return streams.interrupted(name)


if __name__ == "__main__":
    raise SystemExit(main())
