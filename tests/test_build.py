"""Designs and artifacts of the NPU, as far as they can be tested without its tools."""

import hashlib
import json
import threading
from pathlib import Path

import pytest

from aie_kernels import artifact, build, mlir, structure, toolchain
from jax_xdna import _ffi

ACCEPTED = Path(__file__).parent / "data" / "designs" / "npu1_4col_64x64x48.mlir"
TILE = (64, 64, 48, 2)
DESCRIPTION = {
    "arch": "npu1",
    "numerics": "bf16",
    "result": "f32",
    "tile": [64, 64, 48, 2],
    "mlir_aie": "1",
}
TOOLS = toolchain.Toolchain("1.4.5", "22", Path("aiecc"), Path("peano"), Path("include"))


def plan_of(arch, tile=TILE, numerics="bf16", result="f32"):
    return _ffi.plan(arch, 256, 768, 2304, numerics, tile, result)


def emitted(arch, tile):
    return mlir.emit(plan_of(arch, tile))


def test_text_is_the_design_that_the_tools_accepted():
    header, accepted = ACCEPTED.read_text().split("\n", 1)
    assert emitted("npu1", TILE) == accepted.rstrip("\n") + "\n"
    # The other accepted designs, by digest: their first line and ours.
    for name, tile, first, digest in (
        ("npu1", TILE, header, "39c741614796d773ecd71f9692c67b6b990c7cea06354cee30c19a8416b9ed0e"),
        (
            "npu1",
            (64, 32, 96, 1),
            "// Packed bf16 GEMM, npu1, 4x4 cores, tile 64x32x96, C single-buffered; sequence for"
            " M,K,N = 256,768,2304.",
            "5e9a1823eb6d8fd27c5d224f583bd119e7642ee3503935b476b4a898269cd3d7",
        ),
        (
            "npu2",
            TILE,
            "// Packed bf16 GEMM, npu2, 4x8 cores, tile 64x64x48, C double-buffered; sequence for"
            " M,K,N = 256,768,2304.",
            "cba696db5defc380e510a6c84b6ec4b02964d3457351c12ddc66ed93094eaab7",
        ),
    ):
        text = f"{first}\n{emitted(name, tile)}\n"
        assert hashlib.sha256(text.encode()).hexdigest() == digest, (name, tile)


def test_structure_of_an_accepted_design():
    read = structure.parse(ACCEPTED.read_text())
    assert read.differences(structure.packed_gemm("npu1", TILE)) == []
    assert read.fifos["A_L2L1_2"].consumers == ((0, 4), (1, 4), (2, 4), (3, 4))
    assert read.locks[3, 5] == (15, 0) and read.runtime_words[3, 5] == 0xD00
    assert len(read.cores) == 16 and set(read.cores.values()) == {0xD00}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("aie.device(npu1)", "aie.device(npu2)", "device npu2, not npu1"),
        ("address = 3328", "address = 4096", "runtime_words (0, 2): 4096, not 3328"),
        ("(%tile_0_2, 15)", "(%tile_0_2, 14)", "locks (0, 2): (14, 0), not (15, 0)"),
        ("stack_size = 3328", "stack_size = 1024", "cores (0, 2): 1024, not 3328"),
        ("{%mem_tile_0_1}, 2 : i32", "{%mem_tile_0_1}, 3 : i32", "fifos A_L3L2_0"),
        ("{%tile_0_2, %tile_1_2,", "{%tile_1_2, %tile_0_2,", "fifos A_L2L1_0"),
        ("[0, 3072, 6144, 9216]", "[0, 3072, 9216, 6144]", "unexpected Link"),
        ("memref<12288xf32>> ", "memref<12289xf32>> ", "fifos C_L2L3_0"),
    ],
)
def test_another_structure_is_noticed(old, new, said):
    text = ACCEPTED.read_text()
    assert old in text
    with pytest.raises(build.BuildError) as error:
        build.check_design(text.replace(old, new, 1), plan_of("npu1"))
    assert said in str(error.value)


def test_bf16_result_is_summed_up_apart():
    plan = plan_of("npu2", TILE, "bfp16", "bf16")
    text = mlir.emit(plan)
    build.check_design(text, plan)
    read = structure.parse(text)
    assert read.sums[7, 5] == 64 * 48 and len(read.sums) == 32
    assert read.fifos["C_L1L2_7_3"].dtype == "bf16"
    assert "@packed_gemm_epilogue_f32_bf16(%sum_7_3, %5)" in text
    with pytest.raises(build.BuildError, match=r"sums \(0, 2\): None, not 3072"):
        build.check_design(emitted("npu2", TILE), plan)


def test_text_without_a_design():
    with pytest.raises(ValueError, match=r"no aie\.device"):
        structure.parse("module {}")


@pytest.mark.parametrize(("arch", "result"), [("npu1", "f32"), ("npu2", "bf16")])
def test_the_tools_stream_is_checked_on_the_simulated_array(arch, result):
    plan = _ffi.plan(arch, 64, 32, 16 * structure.columns_of(arch), "bf16", (16, 32, 16, 2), result)
    stream = plan["stream"]
    build.check_stream(stream, plan)
    _, ops = _ffi.decode_stream(stream)
    for i, what in ((0, "not for the array of our streams"), (-1, "without waiting for it")):
        less = [op for op in ops if op is not ops[i]]
        with pytest.raises(build.BuildError, match=what):
            build.check_stream(_ffi.encode_stream(arch, less), plan)
    swapped = [
        {**op, "argument": {0: 1, 1: 0, 2: 2}[op["argument"]]} if "argument" in op else op
        for op in ops
    ]
    with pytest.raises(build.BuildError):
        build.check_stream(_ffi.encode_stream(arch, swapped), plan)


def write(directory):
    (directory / "gemm.xclbin").write_bytes(b"xclbin2 and so on")


def test_artifact_is_complete_or_absent(tmp_path):
    def fail(directory):
        write(directory)
        raise build.BuildError("no")

    with pytest.raises(build.BuildError):
        artifact.build(tmp_path, DESCRIPTION, fail)
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []
    directory, built = artifact.build(tmp_path, DESCRIPTION, write)
    assert built
    assert directory.name.startswith("npu1-bf16-f32-64x64x48x2-")
    digest = hashlib.sha256(b"xclbin2 and so on").hexdigest()
    assert artifact.load(directory) == {**DESCRIPTION, "files": {"gemm.xclbin": digest}}
    assert artifact.build(tmp_path, DESCRIPTION, fail) == (directory, False)
    other, built = artifact.build(tmp_path, {**DESCRIPTION, "mlir_aie": "2"}, write)
    assert built and other != directory


@pytest.mark.parametrize("damage", ["gemm.xclbin", "manifest.json"])
def test_damaged_artifact_is_built_again(tmp_path, damage):
    directory, _ = artifact.build(tmp_path, DESCRIPTION, write)
    (directory / damage).write_bytes(b"half")
    with pytest.raises(ValueError, match="is not"):
        artifact.load(directory)
    assert artifact.build(tmp_path, DESCRIPTION, write) == (directory, True)
    artifact.load(directory)


def test_builders_at_the_same_time_build_once(tmp_path):
    start = threading.Barrier(4)
    built, compiled = [], []

    def slow(directory):
        compiled.append(1)
        (directory / "first").write_text("1")
        threading.Event().wait(0.2)
        write(directory)

    def builder():
        start.wait()
        directory, new = artifact.build(tmp_path, DESCRIPTION, slow)
        artifact.load(directory)
        built.append(new)

    threads = [threading.Thread(target=builder) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(built) == [False, False, False, True]
    assert len(compiled) == 1


def test_description_names_what_a_user_must_know():
    one = build.describe(plan_of("npu2"), TOOLS)
    assert json.loads(json.dumps(one)) == one
    assert one["runtime_words_address"] == 0xD00 and one["go_lock"] == 15
    assert one["micro_tile"] == [4, 8, 8] and one["mlir_aie"] == "1.4.5"
    names = {
        artifact.name_of(build.describe(plan_of(*arguments), TOOLS))
        for arguments in (
            ("npu2", TILE, "bf16"),
            ("npu2", TILE, "bf16", "bf16"),
            ("npu2", TILE, "bfp16"),
            ("npu1", TILE, "bf16"),
            ("npu1", (64, 32, 96, 1), "bf16"),
        )
    }
    assert len(names) == 5


def test_missing_tools_are_named(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("PEANO_INSTALL_DIR", raising=False)
    monkeypatch.delenv("MLIR_AIE_INSTALL_DIR", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(toolchain.ToolchainError) as error:
        toolchain.find(version=lambda _: None)
    for part in (
        "mlir-aie 1.4.5 is not installed",
        "aiecc is neither on PATH",
        "no bin/clang++ in PEANO_INSTALL_DIR",
        "pip install mlir_aie==1.4.5 -f https://github.com/Xilinx/mlir-aie/releases",
    ):
        assert part in str(error.value)
    with pytest.raises(toolchain.ToolchainError, match="mlir-aie 1.4.1 is installed, the design"):
        toolchain.find(version=lambda _: "1.4.1")
    assert build.main(["--arch", "npu1", "--cache-dir", str(tmp_path / "cache")]) == 1
    assert "the NPU toolchain is not complete" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_tools_are_found_where_the_variables_say(monkeypatch, tmp_path):
    for part in ("mlir/include/aie_api/aie.hpp", "mlir/bin/aiecc", "peano/bin/clang++"):
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / part).touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MLIR_AIE_INSTALL_DIR", str(tmp_path / "mlir"))
    monkeypatch.setenv("PEANO_INSTALL_DIR", str(tmp_path / "peano"))
    tools = toolchain.find(version={"mlir_aie": "1.4.5+abc", "llvm-aie": "22.0"}.get)
    mlir_aie = tmp_path / "mlir"
    assert tools == toolchain.Toolchain(
        "1.4.5+abc",
        "22.0",
        mlir_aie / "bin" / "aiecc",
        tmp_path / "peano",
        mlir_aie / "include",
    )


@pytest.mark.parametrize(
    ("vendor", "device", "arch"),
    [("0x1022", "0x1502", "npu1"), ("0x1022", "0x17f0", "npu2"), ("0x1022", "0x17f1", None)],
)
def test_arch_from_pci(tmp_path, vendor, device, arch):
    for name, ids in {
        "0000:00:01.0": ("0x8086", "0x1502"),
        "0000:c4:00.1": (vendor, device),
    }.items():
        (tmp_path / name).mkdir()
        for file, text in zip(("vendor", "device"), ids, strict=True):
            (tmp_path / name / file).write_text(text + "\n")
    if arch:
        assert build.detect(tmp_path) == arch
    else:
        with pytest.raises(build.BuildError, match=r"0000:c4:00\.1 is an NPU of a generation"):
            build.detect(tmp_path)


def test_arch_without_an_npu(tmp_path):
    with pytest.raises(build.BuildError, match="no AMD NPU on the PCI bus"):
        build.detect(tmp_path)


def test_command_line(tmp_path, capsys):
    target = tmp_path / "design.mlir"
    arguments = ["--arch", "npu1", "--tile", "64", "64", "48", "2", "--emit-mlir", str(target)]
    assert build.main(arguments) == 0
    build.check_design(target.read_text(), plan_of("npu1"))
    assert build.main(["--arch", "npu1", "--numerics", "bfp16"]) == 1
    assert "bfp16 needs npu2's block floating point datapath" in capsys.readouterr().err
    assert build.main(["--arch", "npu1", "--tile", "128", "128", "128", "2"]) == 1
    assert "L1 needs" in capsys.readouterr().err
    assert build.main(["--arch", "npu1", "--tile", "64", "40", "48", "2"]) == 1
    assert "tile 64x40x48: m and n must be multiples of 16 and k of 32" in capsys.readouterr().err
