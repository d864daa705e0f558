"""The mixture of experts over several domains: right, and a token crosses once per domain."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fusedcomm as fc
from fusedcomm.engines.relays import Relays
from fusedcomm.testing import disturb, straggler
from tests.conftest import Pools
from tests.ranks.fault_calls import die, see
from tests.ranks.moe_cases import OPS, Case, Problem, call, expected
from tests.ranks.moe_layers import OPTIONS, check_equals_whole, check_ways_to_train
from tests.ranks.test_domains_tensor_parallel import FOUR_OF_TWO, INTERLEAVED, TWO_OF_TWO
from tests.ranks.test_moe import check, exact, large, matrix
from tests.ranks.test_moe_limits import dropped

#: Domains of three, ranks in no order.
TWO_OF_THREE = "4,0,2;1,5,3"


def check_two_levels(rank: int, cases: list[Case], engine: str = "host") -> None:
    comm = fc.Communicator.of()
    assert len(comm.topology.domains) > 1
    with fc.trace() as recorded:
        check(rank, cases)
    assert recorded.plans and {plan.engine for plan in recorded.plans} == {engine}
    moe = [plan for plan in recorded.plans if plan.op in ("dispatch", "combine", "moe_ffn")]
    assert {plan.chunks for plan in moe} == {"two_level"}


@pytest.mark.parametrize("domains", [TWO_OF_TWO, INTERLEAVED])
def test_against_a_dense_loop(pools: Pools, domains: str) -> None:
    cases = matrix("auto", 4)
    pools(4, FUSEDCOMM_DOMAINS=domains).run(check_two_levels, cases, timeout_s=180)


@pytest.mark.parametrize(("world_size", "domains"), [(8, FOUR_OF_TWO), (6, TWO_OF_THREE)])
def test_more_and_larger_domains(pools: Pools, world_size: int, domains: str) -> None:
    cases = matrix("auto", world_size)[::4]
    pools(world_size, FUSEDCOMM_DOMAINS=domains).run(check_two_levels, cases, timeout_s=180)


def test_large_problems(pools: Pools) -> None:
    cases = [replace(case, engine="auto") for case in large(4) if max(case.tokens) < 4000]
    pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(check_two_levels, cases, timeout_s=240)


def test_rows_come_back_exactly_and_plans_are_replayed(pools: Pools) -> None:
    pools(4, FUSEDCOMM_DOMAINS=INTERLEAVED).run(exact, "auto", 4)


def test_what_finds_no_room_is_dropped_and_counted(pools: Pools) -> None:
    found = pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(dropped, "auto", 4)
    assert all(sum(counts) > 0 for counts in zip(*found, strict=True))


def as_in_one_domain(rank: int, engine: str) -> None:
    """Rows are bit for bit those of one domain, as are sums of the experts of one domain.

    So are rows that are sent with the same plan, and gradients of such sums.
    """
    world_size, hidden = dist.get_world_size(), 24
    torch.manual_seed(rank)
    x = torch.randn(17, hidden, dtype=torch.bfloat16)
    ids = torch.randint(-1, 9, (17, 3))
    weights = torch.rand(17, 3)
    ids[:8] = 2 * (rank // 2) + torch.randint(0, 2, (8, 3))  # experts of one rank of the domain
    found = []
    for topology in (None, [list(range(world_size))]):
        with fc.Communicator.of(channel=f"compared {topology}", topology=topology) as comm:
            leaf = x.clone().requires_grad_()
            d = fc.dispatch(leaf, ids, weights, 8, group=comm, align=4, engine=engine)
            y = fc.combine(d.x * 2.0, d)
            y.sum().backward()
            again = fc.dispatch(x[:, :6].float(), plan=d)
            found.append((d, y.detach(), leaf.grad, again.x))
    (d, y, dx, again), (other, sums, gradient, once_more) = found
    for name in ("x", "offs", "counts", "padded_counts", "weights", "dropped"):
        assert torch.equal(getattr(d, name), getattr(other, name)), name
    assert torch.equal(again, once_more) and torch.equal(again, d.x[:, :6].float())
    assert torch.equal(y[:8], sums[:8]) and torch.equal(dx[:8], gradient[:8])
    torch.testing.assert_close(y, sums)
    torch.testing.assert_close(dx, gradient)


def routed_once(rank: int) -> None:
    """What follows from a routing is made once, by whichever operation comes first."""
    x, ids, weights = routing(rank)
    weights.requires_grad_()
    with mock.patch.object(Relays, "of", side_effect=Relays.of) as made:
        d = fc.dispatch(x.requires_grad_(), ids, weights, E)
        fc.combine(d.x, d, save_rows=False).sum().backward()
        again = fc.dispatch(x.detach(), plan=d)
        assert made.call_count == 1
        fc.combine(again.x, again).sum().backward()
        assert made.call_count == 1
        fc.dispatch(x, ids, weights, E)
        assert made.call_count == 2


def test_a_routing_is_made_once(pools: Pools) -> None:
    pools(4, FUSEDCOMM_DOMAINS=INTERLEAVED).run(routed_once)


def test_rows_are_those_of_one_domain(pools: Pools) -> None:
    pools(4, FUSEDCOMM_DOMAINS=INTERLEAVED).run(as_in_one_domain, "host")


# What crosses

E, K, HIDDEN = 12, 4, 10
ROW = 4 * HIDDEN


def routing(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, another number on every rank, with choices of no expert among theirs."""
    generator = torch.Generator().manual_seed(rank)
    tokens = (13, 0, 40, 7, 1, 22, 9, 30)[rank]
    x = torch.randn(tokens, HIDDEN, generator=generator)
    ids = torch.randint(-1, E + 1, (tokens, K), generator=generator)
    return x, ids, torch.rand(tokens, K, generator=generator)


def abroad(rank: int) -> tuple[int, int, int]:
    """Pairs of a token and a foreign domain where it has experts; choices of such; such domains."""
    comm = fc.Communicator.of()
    topology, block = comm.topology, -(-E // comm.world_size)
    mine, pairs, choices = topology.domain_of(rank), set(), 0
    for token, row in enumerate(routing(rank)[1].tolist()):
        for e in row:
            if 0 <= e < E and (domain := topology.domain_of(e // block)) != mine:
                pairs.add((token, domain))
                choices += 1
    return len(pairs), choices, len({domain for _, domain in pairs})


def crossing(rank: int, engine: str) -> dict[str, list[list[int]]]:
    """By step, of every rank, the bytes and messages that it sends to other domains."""
    comm = fc.Communicator.of()
    between, world_size = comm.between, comm.world_size
    assert between is not None
    x, ids, weights = routing(rank)
    x.requires_grad_(), weights.requires_grad_()
    local = len(range(E)[rank * -(-E // world_size) :][: -(-E // world_size)])
    w13, w2 = torch.randn(local, 6, HIDDEN), torch.randn(local, HIDDEN, 3)
    found: dict[str, list[list[int]]] = {}

    def counted(name: str, step: Callable[[], Any]) -> Any:
        before = (between.bytes_sent, between.messages_sent)
        result = step()
        own = torch.tensor([between.bytes_sent - before[0], between.messages_sent - before[1]])
        everyone = [torch.empty_like(own) for _ in range(world_size)]
        dist.all_gather(everyone, own)
        found[name] = [each.tolist() for each in everyone]
        return result

    d = counted("route, dispatch", lambda: fc.dispatch(x, ids, weights, E, engine=engine))
    counted("dispatch", lambda: fc.dispatch(x, plan=d))
    y = counted("combine", lambda: fc.combine(d.x, d))
    counted("combine, dispatch, backward", y.sum().backward)
    experts = (w13.requires_grad_(), w2.requires_grad_())
    options: dict[str, Any] = {"num_experts": E, "engine": engine}
    y = counted("route, moe_ffn", lambda: fc.moe_ffn(x, ids, weights, *experts, **options))
    counted("moe_ffn, backward", y.sum().backward)
    y = fc.moe_ffn(x, ids, weights, *experts, **options, save_rows=False)
    counted("moe_ffn, backward, rows made again", y.sum().backward)
    found["abroad"] = [list(each) for each in map(abroad, range(world_size))]
    return found


def check_crossing(found: dict[str, list[list[int]]], world_size: int, n: int) -> None:
    """What crosses between n domains is what docs/moe.md says."""
    pairs, choices, ways = (sum(own) for own in zip(*found["abroad"], strict=True))
    assert choices > 1.2 * pairs, "tokens have several experts in a domain"
    rows, lists = pairs * ROW, 4 * choices
    # Every rank tells each other domain its counts; what else goes there, or comes back for it, is
    # one message, if it is anything.
    table, told = world_size * (n - 1) * 4 * E, world_size * (n - 1)
    expected = {
        "route, dispatch": (table + lists + rows, told + 2 * ways),
        "dispatch": (rows, ways),
        "combine": (lists + rows, 2 * ways),
        "combine, dispatch, backward": ((rows + lists + lists) + rows, 3 * ways),
        "route, moe_ffn": (table + lists + (rows + lists) + rows, told + 3 * ways),
        "moe_ffn, backward": ((rows + lists) + (rows + lists), 2 * ways),
        "moe_ffn, backward, rows made again": ((rows + lists) + (rows + lists), 2 * ways),
    }
    for name, (size, messages) in expected.items():
        sent = [sum(own) for own in zip(*found[name], strict=True)]
        assert sent == [size, messages], name
    # What a rank gives in a dispatch is its own tokens' affair alone.
    own = [[pairs * ROW, ways] for pairs, _, ways in found["abroad"]]
    assert found["dispatch"] == own


@pytest.mark.parametrize(("world_size", "domains"), [(4, INTERLEAVED), (8, FOUR_OF_TWO)])
def test_a_token_crosses_once_per_domain(pools: Pools, world_size: int, domains: str) -> None:
    found = pools(world_size, FUSEDCOMM_DOMAINS=domains).run(crossing, "auto")[0]
    check_crossing(found, world_size, domains.count(";") + 1)


def plainly(rank: int) -> list[int]:
    """Bytes of rows that cross in a dispatch: in two levels, and by the plain engine."""
    comm = fc.Communicator.of()
    x, ids, weights = routing(rank)
    between, topology = comm.between, comm.topology
    assert between is not None
    d = fc.dispatch(x, ids, weights, E)
    before = between.bytes_sent
    fc.dispatch(x, plan=d)
    two_levels = between.bytes_sent - before
    plain = fc.dispatch(x, ids, weights, E, engine="plain")
    assert torch.equal(plain.x, d.x)
    sent, exchange = 0, dist.all_to_all_single

    def counting(out: Any, rows: torch.Tensor, out_splits: Any, splits: Any, **more: Any) -> Any:
        nonlocal sent
        mine = topology.domain_of(rank)
        abroad = [n for peer, n in enumerate(splits) if topology.domain_of(peer) != mine]
        sent += sum(abroad) * rows[0].nbytes if len(rows) else 0
        return exchange(out, rows, out_splits, splits, **more)

    with mock.patch.object(dist, "all_to_all_single", counting):
        fc.dispatch(x, plan=plain)
    return [two_levels, sent, abroad(rank)[1] * ROW]


def test_the_plain_engine_sends_a_row_for_every_expert(pools: Pools) -> None:
    for two_levels, plain, choices in pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(plainly):
        assert plain == choices and two_levels <= plain
        assert two_levels < 0.7 * plain or not plain


# What else a group over domains must do


def bits(rank: int) -> list[str]:
    """The bits of all results, with one rank late at each of its signals, and without."""
    world_size, found = dist.get_world_size(), []
    cases = [Case(op, (300, 90), k=3, experts=7, hidden=32, dtype=torch.bfloat16) for op in OPS]
    cases = [replace(case, engine="auto", routing="sentinels") for case in cases]
    inside = fc.Communicator.of().inside
    assert inside is not None
    for who in (None, 0, 3):
        with straggler(inside.rank, "signal", 0.002) if who == rank else nullcontext():
            results: dict[str, torch.Tensor] = {}
            for case in cases:
                local = call(case, Problem.of(case, world_size), rank, world_size)
                results |= {f"{case.op} {n}": t for n, t in local.results().items()}
        every = [t.contiguous().view(torch.uint8).numpy().tobytes() for t in results.values()]
        found.append(str(hash(tuple(every))))
    return found


def test_results_do_not_depend_on_who_is_early(pools: Pools) -> None:
    for found in pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(bits):
        assert len(set(found)) == 1


@pytest.mark.parametrize("name", ["shared with a gate", "gpt-oss", "function"])
def test_a_layer_equals_the_whole(pools: Pools, name: str) -> None:
    pool = pools(4, FUSEDCOMM_DOMAINS=INTERLEAVED)
    pool.run(check_equals_whole, OPTIONS[name])


def test_ways_to_train(pools: Pools) -> None:
    pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(check_ways_to_train)


def workspace_bytes(
    rank: int, engine: str, limits: dict[str, int]
) -> tuple[dict[str, dict[str, int]], int]:
    """What is held after a call, and rows that were received at most."""
    experts, k, hidden = 8, 4, 64
    with fc.Communicator.of(channel=f"bytes {limits}") as comm:
        ids = (torch.arange(24 * k) % experts).view(24, k)
        x = torch.ones(24, hidden, dtype=torch.bfloat16)
        d = fc.dispatch(x, ids, None, experts, group=comm, engine=engine, **limits)
        fc.combine(d.x, d)
        return comm.workspace_bytes(), len(d.x)


@pytest.mark.parametrize("limits", [{}, {"capacity": 128, "max_tokens": 32}], ids=str)
def test_memory_is_what_the_formula_says(pools: Pools, limits: dict[str, int]) -> None:
    """A rank sends, and gets back, the choices of N sources that are for its domain."""
    k, row, local, n, g = 4, 2 * 64, 2, 2, 2
    for held, received in pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(
        workspace_bytes, "host", limits
    ):
        # Half of a rank's 24 k choices are for either domain, and it carries two ranks'.
        sent = n * k * limits["max_tokens"] if limits else n * 24 * k // 2
        assert held["moe rows"]["data"] == 2 * received * row
        assert held["moe returns"]["data"] == 2 * sent * row
        words = 2 * (1 + g * ((4 * local + 1) * n + 1))
        for kind in ("moe rows", "moe returns"):
            assert held[kind]["flags"] == 4096 * -(-128 * words // 4096)


def beside(rank: int, engine: str) -> None:
    """Rows are on their way, also across, while something else is computed and exchanged."""
    comm = fc.Communicator.of()
    case = Case("moe_ffn", (21, 8), k=3, bias=True)
    problem = Problem.of(case, 4)
    right = expected(case, problem, rank, 4)
    mine = case.experts_of(rank, 4)
    x = problem.xs[rank].float().requires_grad_()
    weights = problem.weights[rank].float().requires_grad_()
    own = {n: getattr(problem, n)[mine].float() for n in ("w13", "w2", "b13", "b2")}

    options: dict[str, Any] = {"num_experts": 8, "engine": engine}

    def other() -> torch.Tensor:
        assert len(comm.calls.aside) == 1
        return fc.all_reduce(torch.ones(3))

    for _ in range(3):
        y, four = fc.moe_ffn(x, problem.ids[rank], weights, **own, **options, beside=other)
        assert bool((four == 4).all()) and not comm.calls.aside
        torch.testing.assert_close(y.double(), right["y"], rtol=1e-4, atol=1e-4)
    y.backward(problem.dys[rank].float())
    torch.testing.assert_close(weights.grad.double(), right["dweights"], rtol=1e-4, atol=1e-4)


def test_beside(pools: Pools) -> None:
    pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(beside, "auto")


def frozen(rank: int, engine: str) -> None:
    """Only some gradients are asked for; those that are, are right."""
    for op in OPS:
        case = Case(op, (9, 14), k=3, engine=engine, routing="sentinels")
        problem = Problem.of(case, 4)
        full = call(case, problem, rank, 4).results()
        for save_rows in (True, False):
            ids, mine = problem.ids[rank], case.experts_of(rank, 4)
            x = problem.xs[rank].float()
            weights = problem.weights[rank].float().requires_grad_()
            w13, w2 = problem.w13[mine].float(), problem.w2[mine].float()
            if op == "moe_ffn":
                options = {"num_experts": 8, "engine": engine, "save_rows": save_rows}
                y = fc.moe_ffn(x, ids, weights, w13, w2, **options)
                y.backward(problem.dys[rank].float())
                torch.testing.assert_close(weights.grad, full["dweights"])
            else:
                d = fc.dispatch(x, ids, weights, 8, engine=engine)
                fc.combine(d.x * 3.0, d, save_rows=save_rows).sum().backward()
                valid = (ids >= 0) & (ids < 8)
                right = (3.0 * x.sum(1, keepdim=True)) * valid
                torch.testing.assert_close(weights.grad, right)


def test_some_gradients(pools: Pools) -> None:
    pools(4, FUSEDCOMM_DOMAINS=INTERLEAVED).run(frozen, "auto")


def compiled(rank: int, backend: str, engine: str, names: tuple[str, ...]) -> None:
    """Compilers see what comes of it, and keep it."""
    generator = torch.Generator().manual_seed(rank)
    w13 = torch.randn(2, 6, HIDDEN, generator=generator)
    w2 = torch.randn(2, HIDDEN, 3, generator=generator)

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return fc.moe_ffn(x * 2, ids, weights, w13, w2, num_experts=8, engine=engine) + 1

    def pair(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        d = fc.dispatch(x * 2, ids, weights, 8, engine=engine)
        return fc.combine(d.x * 3, d)

    x, ids, weights = routing(rank)
    for eager in [function for function in (layer, pair) if function.__name__ in names]:
        torch._dynamo.reset()
        found = []
        for function in (eager, torch.compile(eager, fullgraph=True, backend=backend)):
            leaf, factors = x.clone().requires_grad_(), weights.clone().requires_grad_()
            y = function(leaf, ids.clamp(max=8), factors)
            y.sum().backward()
            found.append([y.detach(), leaf.grad, factors.grad])
        torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(pools: Pools, backend: str) -> None:
    pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(
        compiled, backend, "auto", ("layer", "pair"), timeout_s=180
    )


# Faults


def disagree(rank: int, what: str) -> str:
    """Domain 1 is in another call than domain 0."""
    odd = rank >= 2
    x, ids = torch.ones(4, 8), torch.arange(8).view(4, 2)
    comm = fc.Communicator.of(timeout_s=20)
    with pytest.raises(fc.FusedcommError) as caught:
        if what == "k":
            fc.dispatch(x, ids[:, : 1 if odd else 2], None, 8)
        elif what == "plan":
            plans = [fc.dispatch(x, ids, None, 8), fc.dispatch(x, ids.flip(1), None, 8)]
            fc.dispatch(x, plan=plans[odd])
        elif what == "hidden":
            d = fc.dispatch(x, ids, None, 8)
            fc.combine(torch.ones(len(d.x), 3 if odd else 5), d)
        elif what == "gradients":
            weights = torch.ones(4, 2, requires_grad=not odd)
            d = fc.dispatch(x.requires_grad_(), ids, weights, 8)
            fc.combine(d.x, d).sum().backward()
        comm.barrier()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("what", ["k", "plan", "hidden", "gradients"])
def test_domains_that_disagree_are_told(pools: Pools, what: str) -> None:
    pool = pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    for said in pool.run(disagree, what, timeout_s=40):
        assert said.startswith("MismatchError: domains disagree"), said
    pool.restart()


def too_much(rank: int) -> None:
    """A capacity that is too small is an error on every rank, and does no harm."""
    x, ids = torch.ones(4, 8), torch.full((4, 2), 5)
    for _ in range(2):
        with pytest.raises(fc.CapacityError, match="rank 2 would receive 32 rows"):
            fc.dispatch(x, ids, None, 8, capacity=31)
        assert len(fc.dispatch(x, ids, None, 8, capacity=32).x) == 32


def test_too_little_room(pools: Pools) -> None:
    pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(too_much)


def die_in_a_call(rank: int, victim: int, event: str, nth: int) -> Any:
    comm = fc.Communicator.of(timeout_s=20)
    assert comm.inside is not None
    place = comm.inside.rank
    case = Case("moe_ffn", (9, 5), engine="auto")
    problem = Problem.of(case, 4)
    call(case, problem, rank, 4)
    comm.barrier()

    def calls() -> None:
        with disturb(place, event, die, nth=nth) if rank == victim else nullcontext():
            for _ in range(3):
                call(case, problem, rank, 4)

    return see(comm, calls)


@pytest.mark.parametrize(
    ("victim", "event", "nth"), [(0, "begin", 2), (3, "signal", 3), (1, "consumed", 0)]
)
def test_a_death_is_noticed_in_every_domain(
    pools: Pools, victim: int, event: str, nth: int
) -> None:
    pool = pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO)
    outcomes = pool.outcomes(die_in_a_call, victim, event, nth, timeout_s=40)
    assert outcomes[victim].fate != "returned", "nobody died"
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.fate == "returned", outcome
            assert outcome.value.error in ("PeerLostError", "AbortedError"), outcome


def refused(rank: int) -> None:
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1 before Python starts"):
        fc.dispatch(
            torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64), None, 4, engine="triton"
        )


def test_what_cannot_be_served_is_refused(pools: Pools) -> None:
    pools(4, FUSEDCOMM_DOMAINS=TWO_OF_TWO).run(refused)


def unequal(rank: int) -> None:
    """Domains of several sizes are served by torch.distributed alone, with a warning."""
    x, ids = torch.randn(5, 4), torch.arange(10).view(5, 2) % 4
    with pytest.warns(UserWarning, match="form no domains of one size"):
        d = fc.dispatch(x, ids, None, 4)
    torch.testing.assert_close(fc.combine(d.x, d), 2 * x)
    with pytest.raises(ValueError, match="form no domains of one size"):
        fc.dispatch(x, ids, None, 4, engine="host")


def test_domains_of_unequal_size(pools: Pools) -> None:
    pools(3, FUSEDCOMM_DOMAINS="0,1;2").run(unequal)
