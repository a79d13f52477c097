"""Shape logic only: which GEMM a `dot_general` or a matmul is, and the reshapes around it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Layout = Literal["NN", "NT", "TN", "TT"]
LAYOUTS: tuple[Layout, ...] = ("NN", "NT", "TN", "TT")
Shape = tuple[int, ...]
# ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), as in lax.dot_general.
DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class Ranks(NamedTuple):
    """How many dimensions of an array M, K and N each consist of."""

    m: int = 1
    k: int = 1
    n: int = 1


@dataclass(frozen=True)
class Operand:
    """How an operand becomes one of a GEMM: transpose (rarely), then reshape."""

    shape: Shape
    permutation: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Gemm:
    """C[batch] = A[batch] · B[batch]; the layout's letters say how A and B are stored.

    First letter: N when A is stored (M, K), T when stored (K, M). Second: N when B is stored
    (K, N), T when stored (N, K). M, K and N stand for as many dimensions as `ranks` says: they stay
    apart, so that each can be sharded. C is (batch…, M, N) and is reshaped to `out_shape`.
    """

    layout: Layout
    ranks: Ranks
    lhs: Operand
    rhs: Operand
    out_shape: Shape
    batch: int
    m: int
    k: int
    n: int

    @property
    def copies(self) -> int:
        """Operands that must be transposed in memory first."""
        return (self.lhs.permutation is not None) + (self.rhs.permutation is not None)


def layout_of(lhs: str, rhs: str) -> Layout:
    """The layout with these letters."""
    return LAYOUTS[2 * (lhs == "T") + (rhs == "T")]


def _wide(shape: Shape, dims: Sequence[int]) -> Shape:
    """The sizes of `dims` but 1: one dimension at least, and few enough to have a letter each."""
    sizes = tuple(shape[d] for d in dims if shape[d] != 1) or (1,)
    return (*sizes[:7], math.prod(sizes[7:])) if len(sizes) > 8 else sizes


def _as_matrix(
    shape: Shape, batch: Sequence[int], rows: Sequence[int], depth: Sequence[int]
) -> tuple[bool, tuple[int, ...] | None]:
    """Whether `depth` comes last, and the transpose needed: None when a reshape does it."""
    orders = {
        True: (*batch, *rows, *depth),
        False: (*batch, *depth, *rows),
    }
    for depth_last, order in orders.items():
        # Dimensions of size 1 may stand anywhere without moving a byte.
        wide = [d for d in order if shape[d] != 1]
        if wide == sorted(wide):
            return depth_last, None
    # Keep the innermost dimension innermost: such a copy moves whole runs.
    depth_last = next((d in depth for d in reversed(range(len(shape))) if shape[d] != 1), True)
    return depth_last, orders[depth_last]


def canonicalize(
    lhs: Shape,
    rhs: Shape,
    dimension_numbers: DimensionNumbers,
    lhs_order: Sequence[int] | None = None,
    rhs_order: Sequence[int] | None = None,
) -> Gemm:
    """The GEMM that computes `lax.dot_general(lhs, rhs, dimension_numbers)`.

    Operands are taken as they are, without dimensions of size 1, unless their dimensions are
    interleaved: only then they are transposed. The sizes must already be valid for dot_general.

    With `lhs_order`, the product is that of `lhs` transposed to this order: dimension i that the
    dimension numbers speak of is dimension lhs_order[i] of `lhs`. `rhs_order` likewise.
    """
    lhs_order = range(len(lhs)) if lhs_order is None else lhs_order
    rhs_order = range(len(rhs)) if rhs_order is None else rhs_order
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    a_batch = [lhs_order[d] for d in lhs_batch]
    b_batch = [rhs_order[d] for d in rhs_batch]
    a_free = [o for d, o in enumerate(lhs_order) if d not in (*lhs_contract, *lhs_batch)]
    b_free = [o for d, o in enumerate(rhs_order) if d not in (*rhs_contract, *rhs_batch)]
    pairs = [(lhs_order[i], rhs_order[j]) for i, j in zip(lhs_contract, rhs_contract, strict=True)]

    # Contracted pairs may come in any order: take the one that copies the fewest elements.
    best = None
    for by in (0, 1):
        depth = sorted(pairs, key=lambda pair: pair[by])
        a_last, a_order = _as_matrix(lhs, a_batch, a_free, [pair[0] for pair in depth])
        b_last, b_order = _as_matrix(rhs, b_batch, b_free, [pair[1] for pair in depth])
        cost = (a_order is not None) * math.prod(lhs) + (b_order is not None) * math.prod(rhs)
        if best is None or cost < best[0]:
            best = (cost, a_last, a_order, b_last, b_order, [pair[0] for pair in depth])
    assert best is not None
    _, a_last, a_order, b_last, b_order, a_depth = best

    lead = tuple(lhs[d] for d in a_batch if lhs[d] != 1)
    m, k, n = _wide(lhs, a_free), _wide(lhs, a_depth), _wide(rhs, b_free)
    return Gemm(
        layout=layout_of("N" if a_last else "T", "T" if b_last else "N"),
        ranks=Ranks(len(m), len(k), len(n)),
        lhs=Operand((*lead, *m, *k) if a_last else (*lead, *k, *m), a_order),
        rhs=Operand((*lead, *n, *k) if b_last else (*lead, *k, *n), b_order),
        out_shape=(
            *(lhs[d] for d in a_batch),
            *(lhs[d] for d in a_free),
            *(rhs[d] for d in b_free),
        ),
        batch=math.prod(lead),
        m=math.prod(m),
        k=math.prod(k),
        n=math.prod(n),
    )


def _broadcast(lhs: Shape, rhs: Shape) -> Shape | None:
    sizes = []
    for x, y in itertools.zip_longest(reversed(lhs), reversed(rhs), fillvalue=1):
        if x != y and 1 not in (x, y):
            return None
        sizes.append(y if x == 1 else x)
    return tuple(reversed(sizes))


@dataclass(frozen=True)
class Matmul:
    """A GEMM in layout NN; operands are broadcast to `*_broadcast` first where it is not None."""

    gemm: Gemm
    lhs_broadcast: Shape | None = None
    rhs_broadcast: Shape | None = None


def matmul(lhs: Shape, rhs: Shape) -> Matmul:
    """The GEMM that computes `jnp.matmul` of these shapes.

    A right operand without batch takes the left one's batch as rows; a left operand without batch
    is shared by the right one's batch. Raises ValueError when the shapes do not fit.
    """
    if not lhs or not rhs:
        raise ValueError(f"dot needs operands of rank 1 or more; a has shape {lhs}, b {rhs}")
    a = lhs if len(lhs) > 1 else (1, *lhs)
    b = rhs if len(rhs) > 1 else (*rhs, 1)
    (m, k), (depth, n) = a[-2:], b[-2:]
    if k != depth:
        raise ValueError(
            f"dot: K differs: a has shape {lhs} with {k} columns, b has shape {rhs} with {depth} "
            f"{'rows' if len(rhs) > 1 else 'elements'}"
        )
    lead = _broadcast(a[:-2], b[:-2])
    if lead is None:
        raise ValueError(
            f"dot: batch dimensions {a[:-2]} of a and {b[:-2]} of b cannot be broadcast together"
        )
    out_shape = (*lead, *((m,) if len(lhs) > 1 else ()), *((n,) if len(rhs) > 1 else ()))
    batch_a, batch_b = math.prod(a[:-2]), math.prod(b[:-2])
    if batch_b == 1:
        rows = _wide(a, range(len(a) - 1))
        ranks, left, right = Ranks(m=len(rows)), Operand((*rows, k)), Operand((k, n))
        return Matmul(Gemm("NN", ranks, left, right, out_shape, 1, batch_a * m, k, n))
    batch = math.prod(lead)
    sizes = tuple(size for size in lead if size != 1)
    shared = batch_a == 1
    gemm = Gemm(
        "NN",
        Ranks(),
        Operand((m, k) if shared else (*sizes, m, k)),
        Operand((*sizes, k, n)),
        out_shape,
        batch,
        m,
        k,
        n,
    )
    return Matmul(
        gemm,
        None if shared or batch_a == batch else (*lead, m, k),
        None if batch_b == batch else (*lead, k, n),
    )
