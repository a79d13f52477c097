"""The energy meter on files that stand for the kernel's."""

import pytest

from models.energy import Meter


def zone(root, name, label, value, limit=1_000_000):
    folder = root / name
    folder.mkdir(parents=True)
    for file, content in (("name", label), ("energy_uj", value), ("max_energy_range_uj", limit)):
        (folder / file).write_text(f"{content}\n")
    return folder / "energy_uj"


def test_packages_are_summed_and_nothing_is_counted_twice(tmp_path):
    first = zone(tmp_path, "intel-rapl:0", "package-0", 100)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 200)
    others = [
        zone(tmp_path, "intel-rapl:0:0", "core", 0),
        zone(tmp_path, "intel-rapl:2", "psys", 0),
        zone(tmp_path, "intel-rapl-mmio:0", "package-0", 0),
    ]
    meter = Meter(tmp_path)
    assert meter.joules == 0
    for path, value in ((first, 500_100), (second, 250_200), *((path, 9) for path in others)):
        path.write_text(str(value))
    meter.update()
    assert meter.packages == {"package-0": 0.5, "package-1": 0.25}
    assert meter.joules == 0.75
    assert not meter.missing


def test_a_counter_that_starts_anew(tmp_path):
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    meter = Meter(tmp_path)
    for value in (100_000, 300_000, 200_000):  # 0.2 J, 0.2 J, and all but 0.1 J of a round.
        counter.write_text(str(value))
        meter.update()
    assert meter.joules == pytest.approx(0.2 + 0.2 + 0.9)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda root: None, "no RAPL package in"),
        (lambda root: zone(root, "intel-rapl:0", "psys", 0), "no RAPL package in"),
        (lambda root: zone(root, "intel-rapl:0", "package-0", "?"), "intel-rapl:0 cannot be read"),
        (lambda root: zone(root, "intel-rapl:0", "package-0", 0).unlink(), "cannot be read"),
    ],
)
def test_no_counter_is_said(tmp_path, prepare, message):
    prepare(tmp_path)
    meter = Meter(tmp_path)
    meter.update()
    assert meter.joules is None
    assert message in meter.missing


def test_a_counter_for_root_alone(tmp_path, monkeypatch):
    counter = zone(tmp_path, "intel-rapl:1", "package-1", 0)
    zone(tmp_path, "intel-rapl:0", "package-0", 0)
    read = type(counter).read_text

    def refuse(path, *args, **kwargs):  # Permissions do not bind root, who may run this.
        if path == counter:
            raise PermissionError(13, "Permission denied")
        return read(path, *args, **kwargs)

    monkeypatch.setattr(type(counter), "read_text", refuse)
    meter = Meter(tmp_path)
    assert meter.joules is None  # Half of the machine would look like all of it.
    assert "sudo chmod a+r" in meter.missing


def test_a_counter_that_goes_away(tmp_path):
    counter = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    meter = Meter(tmp_path)
    counter.unlink()
    meter.update()
    meter.update()
    assert meter.joules is None
    assert "then no more" in meter.missing
