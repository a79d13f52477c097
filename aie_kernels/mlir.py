"""The packed design as MLIR text, in the form that mlir-aie's passes of May 2026 accepted.

For inspection and comparison; it needs no tools. The build makes its own through IRON (design.py)
and compares the two by structure. The accepted designs are those with an f32 result.
"""

from typing import Any

from aie_kernels.structure import CORE_ROWS, FIRST_CORE_ROW, Place, columns_of, packed_gemm

_FIFO_OF = {"A": "A_L3L2_{lane}", "B": "B_L3L2_{column}", "C": "C_L2L3_{column}"}


def _tile(place: Place) -> str:
    kind = {0: "shim_noc_tile", 1: "mem_tile"}.get(place[1], "tile")
    return f"%{kind}_{place[0]}_{place[1]}"


def _core(place: Place, a: str, b: str, c: str, narrow: bool) -> list[str]:
    """The loop around the kernel: go, words, I·J tiles of C, KK steps each."""
    column, row = place[0], place[1] - FIRST_CORE_ROW
    fifo_a, fifo_b, fifo_c = f"A_L2L1_{row}", f"B_L2L1_{column}", f"C_L1L2_{column}_{row}"
    words = f"%rtp_{column}_{row}"
    view = "!aie.objectfifosubview"
    acquire = f"""\
          %4 = aie.objectfifo.acquire @{fifo_c}(Produce, 1) : {view}<{c}>
          %5 = aie.objectfifo.subview.access %4[0] : {view}<{c}> -> {c}
"""
    before, total, sums, after = acquire, "%5", c, ""
    if narrow:  # summed up in a buffer of the core, rounded into the one that leaves
        total, sums = f"%sum_{column}_{row}", c.replace("bf16", "f32")
        narrowing = f"@packed_gemm_epilogue_f32_bf16({total}, %5) : ({sums}, {c}) -> ()"
        before, after = "", f"{acquire}          func.call {narrowing}\n"
    return f"""\
    %core_{place[0]}_{place[1]} = aie.core({_tile(place)}) {{
      %c0 = arith.constant 0 : index
      %c4294967295 = arith.constant 4294967295 : index
      %c1 = arith.constant 1 : index
      scf.for %arg0 = %c0 to %c4294967295 step %c1 {{
        aie.use_lock(%go_{column}_{row}, AcquireGreaterEqual, 1)
        %c0_0 = arith.constant 0 : index
        %0 = memref.load {words}[%c0_0] : memref<2xi32>
        %1 = arith.index_cast %0 : i32 to index
        %c1_1 = arith.constant 1 : index
        %2 = memref.load {words}[%c1_1] : memref<2xi32>
        %3 = arith.index_cast %2 : i32 to index
        %c0_2 = arith.constant 0 : index
        %c1_3 = arith.constant 1 : index
        scf.for %arg1 = %c0_2 to %1 step %c1_3 {{
{before}          func.call @packed_gemm_zero_f32({total}) : ({sums}) -> ()
          %c0_4 = arith.constant 0 : index
          %c1_5 = arith.constant 1 : index
          scf.for %arg2 = %c0_4 to %3 step %c1_5 {{
            %6 = aie.objectfifo.acquire @{fifo_a}(Consume, 1) : {view}<{a}>
            %7 = aie.objectfifo.subview.access %6[0] : {view}<{a}> -> {a}
            %8 = aie.objectfifo.acquire @{fifo_b}(Consume, 1) : {view}<{b}>
            %9 = aie.objectfifo.subview.access %8[0] : {view}<{b}> -> {b}
            func.call @packed_gemm_step_bf16_f32(%7, %9, {total}) : ({a}, {b}, {sums}) -> ()
            aie.objectfifo.release @{fifo_a}(Consume, 1)
            aie.objectfifo.release @{fifo_b}(Consume, 1)
          }}
{after}          aie.objectfifo.release @{fifo_c}(Produce, 1)
        }}
      }}
      aie.end
    }} {{stack_size = 3328 : i32}}""".splitlines()


def _sequence(plan: dict[str, Any], cores: list[Place]) -> list[str]:
    """The runtime sequence of a plan that needs no descriptor twice."""
    item = {"A": 2, "B": 2, "C": 4 if plan["result"] == "f32" else 2}
    dtype = {"A": "bf16", "B": "bf16", "C": plan["result"]}
    sizes = dict(zip("ABC", plan["buffer_bytes"], strict=True))
    memref = {x: f"memref<{sizes[x] // item[x]}x{dtype[x]}>" for x in "ABC"}
    arguments = ", ".join(f"%arg{i}: {memref[x]}" for i, x in enumerate("ABC"))
    lines = [f"    aie.runtime_sequence @gemm({arguments}) {{"]
    names = [(column, row - FIRST_CORE_ROW) for column, row in cores]
    tasks: dict[tuple[int, str, int], int] = {}  # the last one of a channel
    number = 0
    for step in plan["steps"]:
        if step["kind"] == "push":
            if not step["write_bd"]:
                raise ValueError("the plan repeats a descriptor, which this text form cannot say")
            x, column = step["buffer"], step["column"]
            lane = column * CORE_ROWS // plan["columns"]
            fifo = _FIFO_OF[x].format(lane=lane, column=column)
            attributes = ["issue_token = true"] if step["token"] else []
            if step["repeats"] > 1:
                attributes.append(f"repeat_count = {step['repeats'] - 1} : i32")
            suffix = f" {{{', '.join(attributes)}}}" if attributes else ""
            start, count = step["offset"] // item[x], step["bytes"] // item[x]
            lines += [
                f"      %{number} = aiex.dma_configure_task_for @{fifo} {{",
                f"        aie.dma_bd(%arg{'ABC'.index(x)} : {memref[x]}, {start}, {count})"
                " {burst_length = 0 : i32}",
                "        aie.end",
                f"      }}{suffix}",
                f"      aiex.dma_start_task(%{number})",
            ]
            tasks[column, step["direction"], step["channel"]] = number
            number += 1
        elif step["kind"] == "wait":
            task = tasks[step["column"], step["direction"], step["channel"]]
            lines.append(f"      aiex.dma_await_task(%{task})")
        elif step["kind"] == "runtime_words":
            i, depth, j = plan["tiles"]
            for column, row in names:
                lines.append(f"      aiex.npu.rtp_write(@rtp_{column}_{row}, 0, {i * j})")
                lines.append(f"      aiex.npu.rtp_write(@rtp_{column}_{row}, 1, {depth})")
        else:
            lines += [f"      aiex.set_lock(%go_{column}_{row}, 1)" for column, row in names]
    return [*lines, "    }"]


def emit(plan: dict[str, Any]) -> str:
    """The design of the plan's tile with the runtime sequence of its product.

    The plan is what `jax_xdna._ffi.plan` gives. Raises ValueError when its sequence writes a
    descriptor twice.
    """
    tile, arch, narrow = plan["tile"], plan["arch"], plan["result"] == "bf16"
    m, k, n, _ = tile
    s = packed_gemm(arch, tile, plan["result"])
    columns = columns_of(arch)
    cores = [(c, FIRST_CORE_ROW + r) for r in range(CORE_ROWS) for c in range(columns)]
    a, b, sums = f"memref<{m * k}xbf16>", f"memref<{k * n}xbf16>", f"memref<{m * n}xf32>"
    c = f"memref<{m * n}x{plan['result']}>"
    link_with = 'attributes {link_with = "packed_gemm.o"}'
    lines = [
        "module {",
        f"  aie.device({arch}) {{",
        f"    func.func private @packed_gemm_zero_f32({sums}) {link_with}",
        f"    func.func private @packed_gemm_step_bf16_f32({a}, {b}, {sums}) {link_with}",
    ]
    if narrow:
        lines.append(
            f"    func.func private @packed_gemm_epilogue_f32_bf16({sums}, {c}) {link_with}"
        )
    for place in [(c, r) for r in (0, 1) for c in range(columns)] + cores:
        lines.append(f"    {_tile(place)} = aie.tile({place[0]}, {place[1]})")
    links = {link.sinks[0]: link for link in s.links}
    for fifo in s.fifos.values():
        ends = f"{_tile(fifo.producer)}, {{{', '.join(map(_tile, fifo.consumers))}}}"
        depths = f"[{fifo.producer_depth} : i32, {fifo.consumer_depth} : i32]"
        if fifo.name[0] != "C":
            depths = f"{fifo.producer_depth} : i32"
        kind = f"!aie.objectfifo<memref<{fifo.elements}x{fifo.dtype}>>"
        lines.append(f"    aie.objectfifo @{fifo.name}({ends}, {depths}) : {kind} ")
        if link := links.get(fifo.name):
            sources = ", ".join(f"@{name}" for name in link.sources)
            offsets = ", ".join(map(str, link.offsets))
            lines.append(f"    aie.objectfifo.link [{sources}] -> [@{fifo.name}]([{offsets}] [])")
    for place in cores:
        name = f"rtp_{place[0]}_{place[1] - FIRST_CORE_ROW}"
        attributes = f'address = {s.runtime_words[place]} : i32, sym_name = "{name}"'
        lines.append(f"    %{name} = aie.buffer({_tile(place)}) {{{attributes}}} : memref<2xi32> ")
    for place in s.sums:
        name = f"sum_{place[0]}_{place[1] - FIRST_CORE_ROW}"
        lines.append(f'    %{name} = aie.buffer({_tile(place)}) {{sym_name = "{name}"}} : {sums} ')
    for place in cores:
        name = f"go_{place[0]}_{place[1] - FIRST_CORE_ROW}"
        number, initial = s.locks[place]
        attributes = f'init = {initial} : i32, sym_name = "{name}"'
        lines.append(f"    %{name} = aie.lock({_tile(place)}, {number}) {{{attributes}}}")
    for place in cores:
        lines += _core(place, a, b, c, narrow)
    lines += _sequence(plan, cores)
    return "\n".join([*lines, "  }", "}", ""])
