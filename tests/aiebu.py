"""AMD's own decoder reads our streams: python tests/aiebu.py ROOT

Streams of every product of a GPT-2 124M step, for all designs and several token counts, and long
ones that reuse descriptors, go through aiebu-asm and aiebu-dump; their listing must hold the
operations that jax_xdna decodes. Both tools come from Debian sid, in the directory ROOT, which is
made when it is not there. Exit code 0 when all agree, or with a printed reason when debootstrap
cannot run.
"""

import subprocess
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path

from gpt2_step import gpt2_step
from sid import sid_root

from jax_xdna import _ffi


def listing(stream):
    """Our operations in the words of aiebu-dump."""
    _, ops = _ffi.decode_stream(stream)
    lines = []
    for i, op in enumerate(ops):
        match op["kind"]:
            case "write":
                lines.append(f"XAIE_IO_WRITE @0x{op['address']:x}, 0x{op['value']:x}")
            case "mask_write":
                lines.append(
                    f"XAIE_IO_MASKWRITE @0x{op['address']:x}, 0x{op['mask']:x}(), 0x{op['value']:x}"
                )
            case "block_write":
                words = list(op["block"])
                if i + 1 < len(ops) and ops[i + 1]["kind"] == "patch":
                    words[1] = 0  # aiebu moves the offset into the patch
                lines.append(f"XAIE_IO_BLOCKWRITE @0x{op['address']:x}, [{len(words)}]")
                lines += [f"XAIE_IO_BLOCKWRITE.{j} 0x{word:x}" for j, word in enumerate(words)]
            case "patch":
                lines.append(
                    f"XAIE_IO_CUSTOM_OP_DDR_PATCH @0x{op['address']:x}, #{op['argument']}, "
                    f"+0x{op['argument_offset']:x}"
                )
            case "wait":
                lines.append(
                    f"XAIE_IO_CUSTOM_OP_TCT R[{op['row']}]+1, C[{op['column']}]+1, "
                    f"#DMA_{op['direction']}, {op['channel']}"
                )
    return lines


def streams():
    """name → stream."""
    found = {}
    for arch, numerics in [("npu1", "bf16"), ("npu2", "bf16"), ("npu2", "bfp16")]:
        for tokens in (64, 128, 256, 1024):
            shapes = gpt2_step(tokens)
            for result, resident in [("f32", False), ("bf16", False), ("f32", True)]:
                tile = _ffi.best_tile(arch, shapes, numerics, result, resident)
                for m, k, n, _ in shapes:
                    plan = _ffi.plan(arch, m, k, n, numerics, tile, result, resident)
                    name = f"{arch}_{numerics}_{result}_{plan['feed']}_{m}x{k}x{n}"
                    found[name] = plan["stream"]
        # Many pushes, with waits and descriptors used again, on both input lanes.
        for m, n in [(64 * 20, 64 * 300), (64 * 300, 64 * 20)]:
            plan = _ffi.plan(arch, m, 32, n, numerics, (16, 32, 16, 2))
            found[f"{arch}_{numerics}_long_{m}x32x{n}"] = plan["stream"]
    return found


def dumps(root, found):
    """name → what AMD's tools print of the stream, without headings and spacing."""
    with tempfile.TemporaryDirectory(dir=root / "tmp") as work:
        for name, stream in found.items():
            (Path(work) / f"{name}.bin").write_bytes(stream)
        script = (
            f"cd /tmp/{Path(work).name} && for f in *.bin; do "
            "aiebu-asm -t aie2txn -c $f -o x.elf >/dev/null && aiebu-dump -d x.elf >$f.txt "
            "|| exit 1; done"
        )
        subprocess.run(["chroot", str(root), "sh", "-c", script], check=True)
        return {
            name: [
                " ".join(line.split())
                for line in (Path(work) / f"{name}.bin.txt").read_text().splitlines()
                if line.startswith("XAIE_IO")
            ]
            for name in found
        }


def main():
    root = Path(sys.argv[1])
    reason = sid_root(root)
    if reason is not None:
        print(f"aiebu: skipped, {reason}")
        return 0
    found = streams()
    wrong = 0
    for name, theirs in dumps(root, found).items():
        ours = listing(found[name])
        if ours != theirs:
            wrong += 1
            pairs = zip_longest(ours, theirs)
            place, (mine, other) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
            print(f"{name}: line {place + 1}: ours {mine}, aiebu's {other}")
    print(f"aiebu: {len(found) - wrong} of {len(found)} streams agree")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
