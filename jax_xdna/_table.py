"""Plain-text tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def table(head: Sequence[str], body: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Columns padded to equal width; those in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()

    return "\n".join([line(head), line(["-" * width for width in widths]), *map(line, body)])


def si(value: float) -> str:
    """Three significant digits with an SI prefix and a trailing space before the unit."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g} "
