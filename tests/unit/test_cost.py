"""Predicted times against the table, and the choices that follow from them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fusedcomm.topology import Link, Topology, calibration, nccl
from fusedcomm.topology.cost import ALGORITHMS, can_run, choose, predict

A, B, A2, B2 = 2e-6, 100e9, 20e-6, 10e9
LINK, WIDE = Link("link", B, A), Link("wide", B2, A2)
DUMPS = Path(__file__).parent / "topologies"


def one(n: int, **more: object) -> Topology:
    return Topology([list(range(n))], inside=LINK, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("s", [0, 1000, 1 << 26])
def test_all_reduce_costs_what_the_table_says(n: int, s: int) -> None:
    power = math.floor(math.log2(n))
    extra = 0.0 if n == 1 << power else 2 * (A + s / B)
    table = {
        "pairwise": (n - 1) * A + (n - 1) * s / B,
        "one_shot": A + (n - 1) * s / B,
        "parameter_server": 2 * (n * A + n * s / B),
        "ring": 2 * (n - 1) * A + 2 * (n - 1) / n * s / B,
        "halving_doubling": 2 * power * A + 2 * (n - 1) / n * s / B + extra,
        "two_shot": 2 * A + 2 * (n - 1) / n * s / B,
        "multimem": A + (1 + 1 / n) * s / B,
    }
    for algorithm, seconds in table.items():
        assert predict("all_reduce", algorithm, s, one(n)) == pytest.approx(seconds), algorithm
    assert table.keys() | {"hierarchical"} == set(ALGORITHMS["all_reduce"])


@pytest.mark.parametrize(("domains", "g"), [(2, 2), (4, 2), (2, 4), (4, 1)])
def test_several_domains_cost_the_sum_of_their_parts(domains: int, g: int) -> None:
    n, s = domains, 1 << 20
    topology = Topology(
        [[d * g + i for i in range(g)] for d in range(n)], inside=LINK, between=WIDE
    )
    inside = 0.0 if g == 1 else A + (g - 1) / g * s / B
    across = (n - 1) * A2 + (n - 1) / n * s / g / B2
    assert predict("all_reduce", "hierarchical", s, topology) == pytest.approx(
        2 * inside + 2 * across
    )
    for op in ("all_gather", "reduce_scatter"):
        assert predict(op, "hierarchical", s, topology) == pytest.approx(inside + across)
    assert choose("all_reduce", s, n * g, topology).algorithm == "hierarchical"
    assert choose("all_to_all", s, n * g, topology).algorithm == "two_level"


def test_adding_costs_time_where_it_does() -> None:
    rate = 1e9
    adding = Topology([[0, 1, 2, 3]], inside=Link("x", B, A, reduce_rate=rate))
    s = 1 << 20
    more = {name: predict("all_reduce", name, s, adding) - predict("all_reduce", name, s, one(4))
            for name in ("one_shot", "two_shot", "ring", "multimem")}  # fmt: skip
    assert more == pytest.approx(
        {"one_shot": 3 * s / rate, "two_shot": 0.75 * s / rate, "ring": 0.75 * s / rate,
         "multimem": 0.0}
    )  # fmt: skip


def crossover(topology: Topology, first: str, second: str) -> int:
    """The least power of two at which ``second`` is chosen over ``first``."""
    for exponent in range(40):
        chosen = choose("all_reduce", 1 << exponent, topology.world_size, topology, (first, second))
        if chosen.algorithm == second:
            return 1 << exponent
    return -1


def test_choices_on_known_machines_are_those_of_the_field() -> None:
    """One-shot below some 100 KB on 8 H100s, less the more ranks; two-shot or multimem above."""
    node = nccl.read_dump(DUMPS / "nvswitch_node.xml")
    assert choose("all_reduce", 1 << 10, 8, node).algorithm == "one_shot"
    assert choose("all_reduce", 1 << 24, 8, node).algorithm == "two_shot"
    switch = nccl.read_dump(DUMPS / "nvswitch_node.xml", multicast=True)
    assert choose("all_reduce", 1 << 24, 8, switch).algorithm == "multimem"
    eight = crossover(node, "one_shot", "two_shot")
    assert 1 << 16 <= eight <= 1 << 20, eight
    four = crossover(node.restricted(range(4)), "one_shot", "two_shot")
    assert four > eight
    assert crossover(node.restricted([0, 1]), "one_shot", "two_shot") == -1
    for name in ("nvlink_pairs", "pcie_two_numa"):
        pairs = nccl.read_dump(DUMPS / f"{name}.xml")
        assert choose("all_reduce", 1 << 20, 4, pairs).algorithm == "hierarchical"
    alone = nccl.read_dump(DUMPS / "vm_flat_pcie.xml")
    assert choose("all_reduce", 1 << 20, 4, alone).algorithm == "hierarchical"


def test_a_ring_of_fast_links_is_used_as_one() -> None:
    ring = Topology([[0, 1, 2, 3]], links={(i, (i + 1) % 4): LINK for i in range(4)}, inside=WIDE)
    assert choose("all_reduce", 1 << 26, 4, ring).algorithm == "ring"
    assert choose("all_reduce", 1 << 6, 4, ring).algorithm == "ring"  # 6 x 2 µs beat 20 µs
    assert choose("all_reduce", 1 << 26, 4, one(4)).algorithm == "two_shot"


def test_what_cannot_run_is_not_chosen() -> None:
    several, uneven = Topology([[0, 1], [2, 3]]), Topology([[0, 1], [2]])
    assert not can_run("two_shot", several) and can_run("hierarchical", several)
    assert not can_run("hierarchical", one(4)) and not can_run("multimem", one(4))
    with pytest.raises(ValueError, match="unequal size"):
        choose("all_reduce", 8, 3, uneven)
    with pytest.raises(ValueError, match="need another topology"):
        choose("all_reduce", 8, 4, several, ("ring",))
    for arguments, message in (
        (("all_reduce", 8, 3, several), "has 4 ranks, not 3"),
        (("all_reduce", -1, 4, several), "negative"),
        (("reduce", 8, 4, several), "op must be one of all_reduce"),
        (("all_reduce", 8, 4, several, ("tree",)), "no algorithm tree"),
    ):
        with pytest.raises(ValueError, match=message):
            choose(*arguments)
    with pytest.raises(ValueError, match="no algorithm 'ring'"):
        predict("all_gather", "ring", 8, one(2))


def test_a_choice_says_why() -> None:
    chosen = choose("all_reduce", 4096, 4, one(4))
    assert chosen.algorithm in chosen.reason and "4096 bytes" in chosen.reason
    assert list(chosen.predictions.values()) == sorted(chosen.predictions.values())
    assert chosen.seconds == chosen.predictions[chosen.algorithm]
    alone = choose("all_reduce", 4096, 1, Topology([[0]]))
    assert (alone.algorithm, alone.seconds) == ("one_shot", 0.0)


# Calibration


def test_what_was_measured_is_kept_by_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration.load.cache_clear()
    try:
        assert calibration.load() == {}
        links = {"link": LINK, "sums": Link("sums", 1e9, 1e-6, reduce_rate=2e9)}
        file = calibration.save(links, {"date": "today"})
        assert file == calibration.path() and file.parent == tmp_path / "fusedcomm"
        assert calibration.host_key() in file.name and calibration.load() == links
        assert [path.name for path in file.parent.iterdir()] == [file.name]
        measured = one(4).with_links(calibration.load())
        assert measured == one(4)
        for broken in (
            "{",
            '{"version": 0}',
            '{"version": 1, "links": {"x": {"kind": "x"}}}',
            "[]",
        ):
            file.write_text(broken)
            calibration.load.cache_clear()
            with pytest.warns(UserWarning, match="cannot be used.*--calibrate"):
                assert calibration.load() == {}
    finally:
        calibration.load.cache_clear()
