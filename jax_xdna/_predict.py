"""`python -m jax_xdna predict`: a GPT-2 training step on an NPU that need not be there."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import sys
import textwrap
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import _ffi
from ._cost import Cost, CostModel
from ._explain import explain
from ._host import host
from ._policy import Dot, Policy
from ._table import si, table

CORES = {"npu1": 16, "npu2": 32}
# arXiv 2504.03083: GPT-2 124M in llm.c, Ryzen 9 7940HS (npu1) on mains; see docs/hardware.md.
PUBLISHED = {"before": 145e9, "after": 255e9, "products": 2.8}


class Line(NamedTuple):
    """Products of one shape in a step."""

    dot: Dot  # its `calls` are those of all of them
    cost: Cost | None

    @property
    def offloaded(self) -> bool:
        return self.cost is not None and self.cost.total < self.cost.cpu


def step_dots(preset: str, batch: int, seq: int) -> list[Dot]:
    """The products of a training step, forward, dX and dW, with attention's: one of each size.

    `layout` names all layouts of the size.
    """
    gpt2, train = (importlib.import_module(f"models.{name}") for name in ("gpt2", "train"))
    if preset not in gpt2.PRESETS:
        raise ValueError(f"--model is {preset!r}; it must be one of {', '.join(gpt2.PRESETS)}")
    config = gpt2.PRESETS[preset]
    if not 1 <= seq <= config.n_positions:
        raise ValueError(f"--seq is {seq}; {preset} takes 1 to {config.n_positions} tokens")
    model = gpt2.GPT2(config)
    shape: Any = jax.ShapeDtypeStruct
    tokens = shape((batch, seq + 1), jnp.int32)
    weights = shape((batch, seq), jnp.float32)
    key = jax.random.key(0)
    params = jax.eval_shape(model.init, key, jnp.zeros((1, 1), jnp.int32))["params"]

    def loss(params: Any, tokens: jax.Array, weights: jax.Array) -> Any:
        return train.loss_sum(model, params, tokens, weights, None)

    rows = explain(jax.grad(loss), params, tokens, weights, policy=Policy.never(), print=False)
    found: dict[tuple[int, ...], Dot] = {}
    for row in rows:
        fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(Dot)}
        dot, size = Dot(**fields), (row.batch, row.m, row.k, row.n)
        if (same := found.get(size)) is not None:
            layouts = sorted({*same.layout.split(), row.layout})
            dot = dataclasses.replace(same, layout=" ".join(layouts), calls=same.calls + row.calls)
        found[size] = dot
    return sorted(found.values(), key=lambda dot: (dot.batch, -dot.flops))


def report(lines: Sequence[Line]) -> str:
    """The table of the step and its sums."""
    head = ("#", "batch×M×K×N", "layout", "calls", "place", "CPU ms", "NPU ms", "array ms")
    body = []
    for number, line in enumerate(lines, 1):
        dot, cost = line
        figures = ["-"] * 6
        if cost:
            times = (f"{1e3 * seconds:.3f}" for seconds in (cost.cpu, cost.total, cost.npu))
            figures = [*times, f"{cost.intensity:.0f}", cost.bound, f"{cost.useful_share:.3f}"]
        body.append(
            (
                str(number),
                f"{dot.batch}×{dot.m}×{dot.k}×{dot.n}",
                dot.layout,
                str(dot.calls),
                "NPU" if line.offloaded else "CPU",
                *figures,
            )
        )
    text = table((*head, "FLOP/B", "bound", "useful"), body, right=(0, 3, 5, 6, 7, 8, 10))
    for place in ("NPU", "CPU"):
        part = [line for line in lines if line.offloaded == (place == "NPU")]
        if part:
            text += f"\n{place}: {_sums(part, place)}"
    return text


def _sums(lines: Sequence[Line], place: str) -> str:
    flops = sum(line.dot.flops for line in lines)
    costs = [(line.dot.calls, line.cost, line.dot.flops) for line in lines if line.cost]
    cpu = sum(calls * cost.cpu for calls, cost, _ in costs)
    text = f"{sum(line.dot.calls for line in lines)} products, {si(flops)}FLOP; "
    if place == "CPU":
        return text + f"{1e3 * cpu:.0f} ms"
    npu, total = (sum(n * getattr(c, name) for n, c, _ in costs) for name in ("npu", "total"))
    useful = sum(c.useful_share * f for _, c, f in costs) / flops
    return (
        f"{text}array {1e3 * npu:.1f} ms ({si(flops / npu)}FLOP/s), with packing {1e3 * total:.1f}"
        f" ms ({si(flops / total)}FLOP/s), this CPU {1e3 * cpu:.1f} ms ({si(flops / cpu)}FLOP/s); "
        f"useful share {useful:.3f}"
    )


def designs(lines: Sequence[Line], arch: str, numerics: str) -> str:
    """Milliseconds of the array for the products that go there, by design and power mode."""
    shapes = [(d.m, d.k, d.n, d.batch * d.calls) for d, _ in (x for x in lines if x.offloaded)]
    body = []
    for result, resident in product(("f32", "bf16"), (False, True)):
        row = ["A resident in L2" if resident else "fifos", result]
        for power in ("turbo", "default"):
            tile = _ffi.best_tile(arch, shapes, numerics, result, resident, power)
            plans = (
                (_ffi.plan(arch, m, k, n, numerics, tile, result, resident, power), calls)
                for m, k, n, calls in shapes
            )
            milliseconds = 1e3 * sum(plan["seconds"]["total"] * calls for plan, calls in plans)
            row += [f"{milliseconds:.2f}", "×".join(map(str, tile[:3]))]
        body.append(row)
    head = ("design", "C leaves as", "turbo ms", "tile", "default ms", "tile")
    return table(head, body, right=(2, 4))


def published(lines: Sequence[Line]) -> str:
    """What was published for a 124M step on npu1, in milliseconds of this step's FLOPs."""
    taken = [line for line in lines if line.offloaded]
    flops = sum(line.dot.flops for line in taken)
    before, after = flops / PUBLISHED["before"], flops / PUBLISHED["after"]
    products = (before - after) / (1 - 1 / PUBLISHED["products"])
    rest = before - products
    ours = sum(line.dot.calls * line.cost.total for line in taken if line.cost)
    text = (
        f"Published for a Ryzen 9 7940HS on mains (arXiv 2504.03083): {si(PUBLISHED['before'])}"
        f"FLOP/s end to end on its CPU, {si(PUBLISHED['after'])}FLOP/s with the products on its "
        f"NPU, over {PUBLISHED['products']}× on products. If a step counts {si(flops)}FLOP there "
        f"too, products took {1e3 * products:.0f} ms, then "
        f"{1e3 * products / PUBLISHED['products']:.0f} ms, and the rest {1e3 * rest:.0f} ms. With "
        f"the {1e3 * ours:.0f} ms predicted for products here: {si(flops / (rest + ours))}FLOP/s "
        "end to end."
    )
    return textwrap.fill(text, 100)


def roofline(lines: Sequence[Line], model: CostModel, title: str, path: Path) -> None:
    """Draws every product that goes to the NPU under the roof of its datapath, as a PNG."""
    from matplotlib.figure import Figure

    constants = _ffi.model_constants(model.arch, model.numerics, model.power)
    macs, clock, bandwidth = (
        constants[name][0] for name in ("macs_per_cycle", "clock", "dram_bandwidth")
    )
    peak = 2 * macs * clock * CORES[model.arch] / 1e9
    knee = 1e9 * peak / bandwidth
    cpu = model.host.flops / 1e9
    taken = [(str(i), x.dot, x.cost) for i, x in enumerate(lines, 1) if x.offloaded and x.cost]
    intensities = [cost.intensity for *_, cost in taken]
    gflop = [2e-9 * dot.batch * dot.m * dot.k * dot.n for _, dot, _ in taken]
    array = [work / cost.npu for work, (*_, cost) in zip(gflop, taken, strict=True)]
    whole = [work / cost.total for work, (*_, cost) in zip(gflop, taken, strict=True)]
    left, right = min([*intensities, knee]) / 1.5, max([*intensities, knee]) * 1.5

    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.add_subplot()
    roof = f"{peak:,.0f} GFLOP/s ({macs:.1f} multiply-adds a cycle of {CORES[model.arch]} cores)"
    axes.plot(
        [left, knee, right],
        [1e-9 * left * bandwidth, peak, peak],
        color="black",
        label=f"roof: {roof}, {1e-9 * bandwidth:.0f} GB/s",
    )
    axes.axhline(cpu, ls="--", color="grey", label=f"this CPU, XLA f32: {cpu:,.0f} GFLOP/s")
    if model.arch == "npu1":
        between = [PUBLISHED[name] / 1e9 for name in ("before", "after")]
        label = "published, whole steps of GPT-2: {:.0f} to {:.0f} GFLOP/s".format(*between)
        axes.axhspan(*between, alpha=0.2, color="tab:green", label=label)
    axes.plot(intensities, array, "o", label="the array, dispatch included")
    axes.plot(intensities, whole, "s", fillstyle="none", label="with packing and unpacking")
    # One label for points that lie on each other.
    spots: list[tuple[float, float, list[str]]] = []
    for x, y, (number, *_) in sorted(zip(intensities, array, taken, strict=True), reverse=True):
        for u, v, numbers in spots:
            if abs(math.log(x / u)) < 0.02 and abs(math.log(y / v)) < 0.11:
                numbers.append(number)
                break
        else:
            spots.append((x, y, [number]))
    for x, y, numbers in spots:
        text = ", ".join(sorted(numbers, key=int))
        axes.annotate(text, (x, y), (7, -4), textcoords="offset points")
    axes.set(xscale="log", yscale="log", xlim=(left, right), title=title)
    axes.set_ylim(min([*whole, cpu]) / 1.5, peak * 1.5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter("{x:,.0f}")
    axes.set_xlabel("FLOPs over bytes from and to DRAM (numbers: rows of the table)")
    axes.set_ylabel("GFLOP/s, padding not counted")
    axes.grid(which="both", alpha=0.25)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_xdna predict",
        description="The products of a GPT-2 training step: predicted times on an NPU, which need "
        "not be there, beside this CPU's measured rate.",
    )
    parser.add_argument("--model", default="gpt2", metavar="PRESET")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--arch", choices=list(CORES), required=True)
    parser.add_argument("--numerics", choices=["bf16", "bfp16"], default="bf16")
    parser.add_argument("--power", choices=["turbo", "default"], default="turbo")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a roofline plot there")
    got = parser.parse_args(arguments)
    try:
        if got.batch < 1:
            raise ValueError(f"--batch is {got.batch}; it must be at least 1")
        dots = step_dots(got.model, got.batch, got.seq)
        shapes = [(d.m, d.k, d.n, d.calls) for d in dots if d.batch == 1]
        model = CostModel.of(host(), got.arch, got.numerics, got.power, shapes)
    except ImportError as error:
        print(f"{error}; pip install 'jax-xdna[finetune]' brings it", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    lines = [Line(dot, model.cost(dot)) for dot in dots]
    title = (
        f"{got.model}, batch {got.batch} × {got.seq} tokens, on {got.arch} ({got.numerics}, "
        f"{got.power} mode), predicted"
    )
    tile = "×".join(map(str, model.tile[:3]))
    print(f"{title}\ntile {tile}; times of one call\n\n{report(lines)}\n")
    if any(line.offloaded for line in lines):
        by_design = designs(lines, got.arch, got.numerics)
        print(f"The array's time for the NPU's products, by design:\n\n{by_design}")
        if (got.arch, got.model) == ("npu1", "gpt2"):
            print(f"\n{published(lines)}")
    print("\nConstants:")
    constants = _ffi.model_constants(got.arch, got.numerics, got.power)
    for name, (value, source) in constants.items():
        print(f"  {name:<22}{value:<10.4g}{source}")
    print(
        f"  this CPU: XLA f32 {si(model.host.flops)}FLOP/s, packing {si(model.host.pack)}B/s, "
        f"unpacking {si(model.host.unpack)}B/s, measured"
    )
    if got.png:
        try:
            roofline(lines, model, title, got.png)
        except OSError as error:
            print(f"--png: {error}", file=sys.stderr)
            return 1
    return 0
