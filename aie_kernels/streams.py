"""Instruction streams of the NPU as text.

    python -m aie_kernels.streams show FILE
    python -m aie_kernels.streams make ARCH M K N FILE [--numerics bf16|bfp16]

`show` prints one line per operation, after the word offset at which it starts.
"""

import argparse
import sys
from pathlib import Path

from jax_xdna import _ffi


def show(stream: bytes) -> str:
    """The stream as text. Raises ValueError naming the word offset when it is damaged."""
    arch, ops = _ffi.decode_stream(stream)
    lines = [f"{arch}, {len(ops)} operations, {len(stream)} bytes"]
    word = 4  # the header
    for op, text in zip(ops, _ffi.describe_stream(stream), strict=True):
        lines.append(f"{word:6}  {text}")
        word += op["words"]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m aie_kernels.streams", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    command = commands.add_parser("show", help="print a stream")
    command.add_argument("file", type=Path)
    command = commands.add_parser("make", help="write the stream of a product")
    command.add_argument("arch", choices=["npu1", "npu2"])
    for name in ("m", "k", "n"):
        command.add_argument(name, type=int, metavar=name.upper())
    command.add_argument("file", type=Path)
    command.add_argument("--numerics", choices=["bf16", "bfp16"], default="bf16")
    got = parser.parse_args(arguments)
    try:
        if got.command == "show":
            print(show(got.file.read_bytes()))
        else:
            plan = _ffi.plan(got.arch, got.m, got.k, got.n, got.numerics)
            got.file.write_bytes(plan["stream"])
    except (OSError, ValueError) as error:
        print(f"{got.file}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
