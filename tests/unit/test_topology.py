"""Declared topologies, and those read from NCCL's dumps and from what ranks say of themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fusedcomm.topology import Link, Topology, nccl
from fusedcomm.topology.declared import VARIABLE, declared_topology
from fusedcomm.topology.detect import Facts, facts_of, topology_of
from fusedcomm.topology.links import GB, PCIE, PCIE_HOST, SHARED_MEMORY, TCP, nvlink
from fusedcomm.topology.model import parse_domains
from fusedcomm.topology.partition import domains_of

DUMPS = Path(__file__).parent / "topologies"
SLOW = Link("slow", 1e9, 1e-3)


# Declared


def test_a_declared_topology_answers_for_every_rank_and_pair() -> None:
    topology = Topology(
        domains=[[5, 4], [0, 1, 2, 3]], links={(1, 0): SLOW, (3, 4): SLOW},
        inside="nvswitch-h100", between="network", multicast=[False, True],
    )  # fmt: skip
    assert topology.domains == ((0, 1, 2, 3), (4, 5))
    assert topology.multicast == (True, False)
    assert (topology.world_size, topology.uniform) == (6, False)
    assert [topology.domain_of(rank) for rank in range(6)] == [0, 0, 0, 0, 1, 1]
    assert [topology.local_rank(rank) for rank in range(6)] == [0, 1, 2, 3, 0, 1]
    assert topology.link(0, 1) == topology.link(1, 0) == SLOW == topology.link(4, 3)
    assert topology.link(2, 3).kind == "nvswitch" and topology.link(0, 4).kind == "network"
    assert topology.slowest_inside == topology.slowest_between == SLOW
    assert "ranks 0-3" in topology.describe()[0] and "multicast" in topology.describe()[0]


def test_a_part_of_a_topology_is_numbered_anew() -> None:
    whole = Topology([[0, 1, 2], [3, 4, 5]], links={(2, 5): SLOW}, multicast=[False, True])
    part = whole.restricted([5, 2, 4])
    assert part.domains == ((0, 2), (1,))
    assert part.link(0, 1) == SLOW and part.link(1, 2) == whole.between
    assert part.multicast == (True, False)
    assert whole.restricted(range(6)) == whole and whole.restricted([0, 1, 2]) != whole


def test_what_has_one_rank_or_one_domain_has_no_such_link() -> None:
    assert Topology([[0]]).slowest_inside is None
    assert Topology([[0, 1]]).slowest_between is None
    crossing = Topology([[0], [1]], links={(0, 1): SLOW}, between="network")
    assert crossing.slowest_between == SLOW  # every pair is named: the usual link does not occur


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"domains": []}, "list of lists"),
        ({"domains": "0,1"}, "list of lists"),
        ({"domains": [0, 1]}, "domain 0 must be a list"),
        ({"domains": [[0], []]}, "domain 1 is empty"),
        ({"domains": [[0, 1], [1]]}, "rank 1 stands in domain 0 and in 1"),
        ({"domains": [[0, 2]]}, "missing: 1"),
        ({"domains": [[-1, 0]]}, "from 0 on"),
        ({"domains": [[0, 1]], "links": {(0, 2): SLOW}}, "pairs of different ranks 0 to 1"),
        ({"domains": [[0, 1]], "links": {(0, 0): SLOW}}, "pairs of different ranks"),
        ({"domains": [[0, 1]], "links": {(0, 1): SLOW, (1, 0): TCP}}, "two links"),
        ({"domains": [[0, 1]], "inside": "string"}, "nvswitch-h100"),
        ({"domains": [[0], [1]], "multicast": [True]}, "1 entries for 2 domains"),
    ],
)
def test_what_is_no_topology(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Topology(**arguments)


@pytest.mark.parametrize("bad", [("", 1.0, 1.0), ("x", 0.0, 1.0), ("x", 1.0, -1.0)])
def test_what_is_no_link(bad: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="link"):
        Link(*bad)


def test_domains_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_domains("0-2;3, 5 ,4") == [[0, 1, 2], [3, 5, 4]]
    for wrong in ("a", "0;;1", "0-", "0,1;", "[[0]]"):
        with pytest.raises(ValueError, match="cannot read"):
            parse_domains(wrong)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert declared_topology(None, [0, 1]) is None
    monkeypatch.setenv(VARIABLE, "0,1;2,3")
    found = declared_topology(None, range(4))
    assert found is not None and found.domains == ((0, 1), (2, 3)) and found.between == TCP
    # A group of ranks 1, 2 and 3 of the default group: they are its ranks 0, 1 and 2.
    found = declared_topology(None, [1, 2, 3])
    assert found is not None and found.domains == ((0,), (1, 2))
    for members in (range(5), [0, 7]):
        with pytest.raises(ValueError, match="every rank of the default group"):
            declared_topology(None, members)
    monkeypatch.setenv(VARIABLE, "0,1;1,2")
    with pytest.raises(ValueError, match="once"):
        declared_topology(None, range(3))
    given = declared_topology([[0], [1, 2]], range(3))  # the argument goes first
    assert given is not None and given.domains == ((0,), (1, 2))
    with pytest.raises(ValueError, match="2 ranks, the group 3"):
        declared_topology([[0], [1]], range(3))


def test_every_two_ranks_of_a_domain_reach_each_other() -> None:
    # A chain: 0-1-2-3. Not one domain, for 0 and 2 do not reach each other.
    assert domains_of(4, lambda a, b: abs(a - b) == 1) == [[0, 1], [2, 3]]
    one_way = {(0, 1)}
    assert domains_of(2, lambda a, b: (a, b) in one_way) == [[0], [1]]


# NCCL's dumps


@pytest.mark.parametrize(
    ("name", "domains", "kind", "gigabytes", "between"),
    [
        ("nvswitch_node", [range(8)], "nvswitch", 371, None),
        ("nvlink_pairs", [(0, 1), (2, 3)], "nvlink", 240, 100 / 8 * 0.9 / 4),
        ("pcie_two_numa", [(0, 1), (2, 3)], "pcie", 24, 25 / 8 * 0.9 / 4),
        ("vm_flat_nvswitch", [range(8)], "nvswitch", 371, None),
        ("vm_flat_pcie", [(0,), (1,), (2,), (3,)], None, None, 100 / 8 * 0.9 / 4),
    ],
)
def test_domains_and_links_of_known_machines(
    name: str, domains: list[Any], kind: str | None, gigabytes: float, between: float | None
) -> None:
    topology = nccl.read_dump(DUMPS / f"{name}.xml")
    assert topology.domains == tuple(map(tuple, domains))
    inside = topology.slowest_inside
    if kind is None:
        assert inside is None
    else:
        assert inside is not None and inside.kind == kind
        assert inside.bandwidth == pytest.approx(gigabytes * GB, rel=0.01)
    crossing = topology.slowest_between
    assert (crossing is None) == (between is None)
    if crossing is not None and between is not None:
        assert crossing.bandwidth == pytest.approx(between * GB)
    assert ("hidden" in " ".join(topology.notes)) == name.startswith("vm")
    assert topology.multicast == (False,) * len(topology.domains)


def test_multicast_is_a_fact_of_its_own() -> None:
    assert nccl.read_dump(DUMPS / "nvswitch_node.xml", multicast=True).multicast == (True,)
    assert not any(nccl.read_dump(DUMPS / "nvlink_pairs.xml", multicast=True).multicast)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no xml", "no XML"),
        ("<graphs/>", "begins with <system>"),
        ('<system><cpu numaid="0"/></system>', "no <gpu>"),
        ('<system><cpu numaid="x"><pci><gpu dev="0"/></pci></cpu></system>', "not a number"),
    ],
)
def test_what_is_no_dump(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nccl.parse_dump(text)


def test_nvlink_over_several_hosts_is_no_domain() -> None:
    node = (DUMPS / "nvswitch_node.xml").read_text().replace('<system version="1">\n', "")
    other = node.replace("0x9f1c2a30d5e4b781", "0x1")
    for rank in range(8):
        other = other.replace(f'rank="{rank}"', f'rank="{rank + 8}"')
    two = nccl.parse_dump("<system>" + (node + other).replace("</system>\n", "") + "</system>")
    assert two.domains == (tuple(range(8)), tuple(range(8, 16)))
    assert any("several machines" in note for note in two.notes)


# What ranks say of themselves


def gpu(number: int, reaches: dict[int, Link], machine: str = "a", **more: Any) -> Facts:
    links = {f"GPU-{other}": link for other, link in reaches.items()}
    return Facts(machine, "cuda", f"GPU-{number}", links, **more)


def test_ranks_of_one_machine_are_a_domain() -> None:
    found = topology_of([Facts("a"), Facts("b"), Facts("a")])
    assert found.domains == ((0, 2), (1,))
    assert found.link(0, 2) == SHARED_MEMORY and found.link(0, 1) == TCP
    assert topology_of([Facts("a")]).domains == ((0,),)


def test_gpus_are_a_domain_where_both_directions_work() -> None:
    fast = nvlink(18, 90, switched=True)
    facts = [gpu(0, {1: fast, 2: PCIE}), gpu(1, {0: fast}), gpu(2, {0: PCIE_HOST, 1: PCIE})]
    found = topology_of(facts)
    assert found.domains == ((0, 1), (2,)) and found.link(0, 1) == fast
    assert any("doctor" in note for note in found.notes)
    two_hosts = [gpu(0, {1: fast}, clique="c.1"), gpu(1, {0: fast}, "b", clique="c.1")]
    found = topology_of(two_hosts)
    assert found.domains == ((0,), (1,)) and "several machines" in found.notes[0]
    shared = topology_of([gpu(0, {}), gpu(0, {})])
    assert shared.domains == ((0, 1),) and shared.link(0, 1).kind == "same-gpu"


def test_without_nvml_gpus_of_a_machine_are_taken_to_reach_each_other() -> None:
    found = topology_of([gpu(0, {}, note="no NVML"), gpu(1, {}, note="no NVML")])
    assert found.domains == ((0, 1),) and "no NVML" in found.notes[0]


def test_what_is_declared_may_split_machines_but_not_join_them() -> None:
    facts = [Facts("a"), Facts("a"), Facts("b"), Facts("b")]
    finer = Topology([[0], [1], [2, 3]])
    assert topology_of(facts, finer).domains == finer.domains
    with pytest.raises(ValueError, match="ranks 0 and 2, which lie on different machines"):
        topology_of(facts, Topology([[0, 1, 2], [3]]))
    with pytest.raises(ValueError, match="has 2 ranks, the group 4"):
        topology_of(facts, Topology([[0, 1]]))


def test_rank_0s_measurements_hold_for_all() -> None:
    measured = {"shared-memory": Link("shared-memory", 5e9, 1e-5)}
    other = {"shared-memory": Link("shared-memory", 7e9, 1e-5)}
    facts = [Facts("a", measured=measured), Facts("a", measured=other)]
    assert topology_of(facts).link(0, 1) == measured["shared-memory"]
    assert topology_of(facts, Topology([[0], [1]])).inside == measured["shared-memory"]
    assert topology_of(facts[::-1]).link(0, 1) == other["shared-memory"]


def test_facts_travel_as_text() -> None:
    facts = gpu(3, {1: PCIE}, clique="c", measured={"tcp": TCP}, note="µ")
    assert Facts.from_json(facts.to_json()) == facts
    assert facts_of("here", torch.device("cpu")).device == "cpu"
