"""The commands ``onnx-remat``, also as ``python -m onnx_remat``, and ``onnx-remat-bench``.

Imports happen inside the functions, which report an interruption: the imports of a command take a second.
"""

import gc


def main() -> int:
    """Run ``onnx-remat`` and return the exit code."""
    # The objects of a graph stay: to look for dead ones every 700 takes an eighth of the time on 100,000 nodes.
    gc.set_threshold(100_000)
    try:
        from onnx_remat.app import cli
    except BaseException as error:
        return _interrupted("onnx-remat", error)
    return cli.main()


def bench() -> int:
    """Run ``onnx-remat-bench`` and return the exit code."""
    try:
        from onnx_remat.app import bench
    except BaseException as error:
        return _interrupted("onnx-remat-bench", error)
    return bench.main()


def _interrupted(name: str, error: BaseException) -> int:
    """Report an interruption and return 130 where one caused `error`; re-raise any other error."""
    from onnx_remat.app import streams

    if not streams.is_interruption(error):
        raise error
    return streams.interrupted(name)


if __name__ == "__main__":
    raise SystemExit(main())
