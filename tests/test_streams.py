"""Instruction streams from Python: round trips, damage, the printer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aie_kernels import streams
from jax_xdna import _ffi

GOLDEN = Path(__file__).parent / "data" / "streams"

word = st.integers(0, 2**32 - 1)
direction = st.sampled_from(["S2MM", "MM2S"])
byte = st.integers(0, 255)
operation = st.one_of(
    st.fixed_dictionaries({"kind": st.just("write"), "address": word, "value": word}),
    st.fixed_dictionaries(
        {"kind": st.just("mask_write"), "address": word, "value": word, "mask": word}
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("block_write"),
            "address": word,
            "block": st.lists(word, min_size=1, max_size=12),
        }
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("patch"),
            "address": word,
            "argument": word,
            "argument_offset": st.integers(0, 2**64 - 1),
        }
    ),
    st.fixed_dictionaries(
        {
            "kind": st.just("wait"),
            "column": byte,
            "row": byte,
            "direction": direction,
            "channel": byte,
        }
    ),
)


def without_length(op):
    return {key: value for key, value in op.items() if key != "words"}


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(["npu1", "npu2"]), st.lists(operation, max_size=30))
def test_operations_survive_encoding(arch, ops):
    stream = _ffi.encode_stream(arch, ops)
    got_arch, got = _ffi.decode_stream(stream)
    assert got_arch == arch
    assert [without_length(op) for op in got] == ops
    assert sum(op["words"] for op in got) * 4 + 16 == len(stream)
    assert len(_ffi.describe_stream(stream)) == len(ops)


@pytest.mark.parametrize("file", sorted(GOLDEN.glob("*.bin")), ids=lambda file: file.stem)
def test_golden_streams_survive_decoding(file):
    stream = file.read_bytes()
    assert _ffi.encode_stream(*_ffi.decode_stream(stream)) == stream


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_a_torn_stream_names_the_word(data):
    stream = (GOLDEN / "npu1_col0_four_pushes_then_reuse.bin").read_bytes()
    torn = stream[: data.draw(st.integers(0, len(stream) - 1))]
    with pytest.raises(ValueError, match=r"word \d+: |no whole number of words"):
        _ffi.decode_stream(torn)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=400))
def test_garbage_is_refused(garbage):
    with pytest.raises(ValueError):
        _ffi.decode_stream(garbage)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        ([{"kind": "jump"}], "unknown kind"),
        ([{"kind": "wait", "column": 0, "row": 0, "direction": "up", "channel": 0}], '"up"'),
        ([{"kind": "wait", "column": 256, "row": 0, "direction": "S2MM", "channel": 0}], "256"),
        ([{"kind": "block_write", "address": 0, "block": []}], "block write"),
    ],
)
def test_what_has_no_encoding_is_refused(ops, message):
    with pytest.raises(ValueError, match=message):
        _ffi.encode_stream("npu1", ops)


def test_the_printer(tmp_path):
    file = GOLDEN / "npu1_4col_64x64x48_256x768x2304.bin"
    run = subprocess.run(
        [sys.executable, "-m", "aie_kernels.streams", "show", str(file)],
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = run.stdout.splitlines()
    assert lines[0] == "npu1, 92 operations, 2784 bytes"
    assert lines[1].split() == "4 column 0 row 0 BD 0 147456 words contiguous".split()
    assert "   392  column 0 row 2  L1        0xD00 = 12" in lines
    assert "   584  column 0 row 2  lock      15 = 1" in lines
    assert lines[-1].split() == "692 column 3 row 0 wait S2MM 0".split()
    assert len(lines) == 93


def test_make_then_show(tmp_path, capsys):
    file = tmp_path / "gemm.bin"
    assert streams.main(["make", "npu2", "100", "200", "300", str(file)]) == 0
    assert file.read_bytes() == _ffi.plan("npu2", 100, 200, 300)["stream"]
    assert streams.main(["show", str(file)]) == 0
    assert capsys.readouterr().out.startswith("npu2, ")


def test_the_printer_on_damage(tmp_path, capsys):
    file = tmp_path / "torn.bin"
    file.write_bytes((GOLDEN / "npu1_col0_linear_in_out.bin").read_bytes()[:-8])
    assert streams.main(["show", str(file)]) == 1
    error = capsys.readouterr().err
    assert "word 3: the header says 300 bytes, there are 292" in error
    assert streams.main(["show", str(tmp_path / "missing.bin")]) == 1
    assert "missing.bin" in capsys.readouterr().err
