"""report.html: one well-formed file of its own, with what the log says, whatever a model wrote."""

import re
from html.parser import HTMLParser

import pytest

from models.html_report import Line, Report, chart, page

HOSTILE = (
    "</pre><script>alert('x')</script><img src=x onerror=alert(1)>&amp;\N{RIGHT-TO-LEFT OVERRIDE}"
)
VOID = {"meta", "circle", "path", "br"}


class Page(HTMLParser):
    """Tags with attributes, text, and that every tag is closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self._open = [], [], []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta"}:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)

    def named(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def rows(steps, shift=0.0):
    found = [{"step": 0, "val_loss": 5.0}]
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 5.0 - step / steps + shift, "lr": 1e-3, "grad_norm": 1.0}
        found.append({**row, "tokens_per_second": 100.0 * step})
    return [*found, {"step": steps, "val_loss": 4.0 + shift}]


def report(**changed):
    summary = {"val_loss": 4.0, "val_perplexity": 54.6, "fp32_val_perplexity": 54.0}
    values = {
        "title": "runs/x",
        "status": "step 10 of 10",
        "rows": rows(10),
        "fp32_rows": rows(10, 0.1),
        "samples": [{"step": 0, "text": "first"}, {"step": 10, "text": "last"}],
        "summary": summary,
        "stages": {"pack A": 1.0, "pack B": 0.0, "run": 2.0, "unpack": 0.0, "everything else": 1.0},
        "energy": ["training: not measured"],
        "options": {"data": ["a.txt", "b.txt"], "lr": None, "steps": 10},
    }
    return Report(**{**values, **changed})


def test_one_file_that_loads_and_runs_nothing():
    text = page(report())
    found = Page(text)
    assert not {"script", "link", "img", "iframe", "object"} & {name for name, _ in found.tags}
    for _, attrs in found.tags:
        assert not {"src", "href"} & attrs.keys()
        assert not any(name.startswith("on") for name in attrs)
    assert (
        "url(" not in text
        and "@import" not in text
        and "http" not in text.replace("http-equiv", "")
    )
    (policy,) = [m for m in found.named("meta") if m.get("http-equiv")]
    assert policy["content"] == "default-src 'none'; style-src 'unsafe-inline'"


def test_what_it_says():
    found = Page(page(report()))
    text = "\n".join(found.text)
    for part in (
        "54.600",
        "+1.111%",  # of 54.6 against 54.0
        "Where 4.0 s went",
        "50.0%",
        "not measured",
        "--data\na.txt b.txt",
        "fp32, validation",
        "jaxlib",
    ):
        assert part in text
    assert "--lr" not in text  # not given
    assert [s["aria-label"] for s in found.named("svg")] == [
        "Loss, nats per token",
        "Learning rate",
        "Gradient norm, before clipping",
        "Tokens per second",
    ]
    assert [("open" in attrs) for attrs in found.named("details")] == [False, True]


@pytest.mark.parametrize("place", ["title", "status", "samples", "options", "energy", "ran"])
def test_hostile_text_is_only_text(place):
    values = {
        "samples": [{"step": 1, "text": HOSTILE}],
        "options": {"data": [HOSTILE]},
        "energy": [HOSTILE],
        "ran": [HOSTILE],
    }
    found = Page(page(report(**{place: values.get(place, HOSTILE)})))
    assert not found.named("script") and not found.named("img")
    assert HOSTILE in "".join(found.text)


def test_a_run_with_nothing_yet():
    found = Page(page(Report(title="x", status="stopped", rows=[])))
    assert not found.named("svg")


def coordinates(figure):
    """Points of the first line that is drawn."""
    path = re.search(r'<path class="mean a" d="M([^"]*)"', figure)[1]
    return [tuple(map(float, point.split())) for point in path.split("L")]


def test_points_are_where_they_belong():
    figure = chart("t", [Line("x", "a", [(0, 0.0), (5, 2.0), (10, 1.0)])])
    (x0, y0), (x1, y1), (x2, y2) = coordinates(figure)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(2 * (y0 - y2), abs=0.3)  # Larger is higher.
    ticks = {
        float(t): float(y) - 4
        for y, t in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)', figure)
    }
    assert ticks[1] == pytest.approx(y2, abs=0.1) and ticks[2] == pytest.approx(y1, abs=0.1)


def test_many_steps_are_means_and_ranges():
    points = [(step, float(step % 2)) for step in range(6000)]
    figure = chart("t", [Line("x", "a", points)])
    assert len(figure) < 20_000
    heights = {y for _, y in coordinates(figure)}
    assert len(heights) == 1  # Every mean is a half, however much single steps jump.
    assert 'class="range a"' in figure


@pytest.mark.parametrize(
    "points", [[(3, 2.5)], [(1, 0.0), (2, 0.0)], [(1, -4.0), (2, -4.0)], [(0, 1e9)]]
)
def test_flat_and_single_points(points):
    for marked in (False, True):
        figure = chart("t", [Line("x", "a", points, marked)])
        assert "nan" not in figure and "inf" not in figure
        assert all(0 <= x <= 480 and 0 <= y <= 260 for x, y in coordinates(figure))


def test_steps_that_were_not_finite_are_left_out():
    log = rows(10)
    log[5]["loss"] = log[5]["grad_norm"] = None
    text = page(report(rows=log, fp32_rows=()))
    assert Page(text).named("svg") and "nan" not in text.lower().replace("finance", "")
