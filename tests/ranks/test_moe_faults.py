"""The mixture of experts when ranks disagree, die, or are asked for what cannot be."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import fusedcomm as fc
from fusedcomm.testing import disturb
from tests.conftest import Pools
from tests.ranks.fault_calls import (
    LIMIT_S,
    Record,
    Seen,
    assert_lost,
    before,
    die,
    see,
    survivors,
)
from tests.ranks.test_mismatch import views_of

E, H, F = 6, 8, 4


def layer(comm: fc.Communicator, *, backward: bool = False, **changes: Any) -> torch.Tensor:
    """A call of moe_ffn in which y = 2 x; ``changes`` replace its arguments."""
    given: dict[str, Any] = {"tokens": 5, "k": 2, "dtype": torch.float32, "hidden": H}
    given |= {name: changes.pop(name) for name in list(changes) if name in given}
    tokens, k, hidden = given["tokens"], given["k"], given["hidden"]
    options: dict[str, Any] = {"num_experts": E, "activation": "relu2"} | changes
    experts = options["num_experts"]
    own = options.get("placement") or [e // -(-experts // comm.world_size) for e in range(experts)]
    local = own.count(comm.rank)
    x = torch.full((tokens, hidden), 1.0, dtype=given["dtype"]).requires_grad_(backward)
    ids = (torch.arange(tokens * k) % experts).view(tokens, k)
    weights = options.pop("weights", torch.full((tokens, k), 2.0 / k))
    width = F if options["activation"] == "relu2" else 2 * F
    w13 = torch.full((local, width, hidden), 1.0 / hidden, dtype=given["dtype"])
    w2 = torch.full((local, hidden, F), 1.0 / F, dtype=given["dtype"])
    y = fc.moe_ffn(x, ids, weights, w13.requires_grad_(backward), w2, group=comm, **options)
    if backward:
        y.sum().backward()
    return y


def pair(comm: fc.Communicator, **changes: Any) -> None:
    x = torch.ones(changes.pop("tokens", 5), H)
    ids = torch.arange(2 * len(x)).view(-1, 2) % E
    d = fc.dispatch(x, ids, changes.pop("weights", None), E, group=comm, **changes)
    fc.combine(d.x, d)


def replayed(comm: fc.Communicator, turn: int) -> None:
    """Two plans, and one of them again."""
    plans = [
        fc.dispatch(torch.ones(4, H), torch.full((4, 1), e), None, E, group=comm) for e in (0, 1)
    ]
    fc.dispatch(torch.ones(4, H), plan=plans[turn])


def combined(comm: fc.Communicator, hidden: int) -> None:
    d = fc.dispatch(torch.ones(4, H), torch.zeros(4, 1, dtype=torch.int8), None, E, group=comm)
    fc.combine(torch.ones(len(d.x), hidden), d)


def works(comm: fc.Communicator) -> None:
    assert bool((layer(comm) == 2.0).all())
    assert bool((layer(comm, tokens=0, backward=True) == 2.0).all())


#: what rank 1 does, what the others do, and words of the two views
CASES: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any], str, str]] = {
    "other k": (layer, {"k": 3}, layer, {}, "top-3", "top-2"),
    "other number of experts": (layer, {"num_experts": 7}, layer, {}, "7 experts", "6 experts"),
    "other hidden size": (layer, {"hidden": 16}, layer, {}, "[16]", "[8]"),
    "other dtype": (layer, {"dtype": torch.bfloat16}, layer, {}, "bfloat16", "float32"),
    "other alignment": (layer, {"align": 2}, layer, {}, "align 2", "align 1"),
    "capacity on one rank": (layer, {"capacity": 99}, layer, {}, "capacity 99", "capacity None"),
    "other max_tokens": (
        layer, {"max_tokens": 9}, layer, {"max_tokens": 8}, "max_tokens 9", "max_tokens 8",
    ),
    "other overflow": (layer, {"overflow": "drop"}, layer, {}, "overflow drop", "overflow error"),
    "other activation": (layer, {"activation": "swiglu"}, layer, {}, "swiglu", "relu2"),
    "other placement": (layer, {"placement": [0] * E}, layer, {}, "placed 0 0", "in blocks"),
    "dispatch for moe_ffn": (pair, {}, layer, {}, "dispatch", "moe_ffn"),
    "weights on one rank": (
        pair, {"weights": torch.ones(5, 2)}, pair, {}, "weighted", "combine",
    ),
    "another plan replayed": (
        replayed, {"turn": 1}, replayed, {"turn": 0}, "routing", "routing",
    ),
    "rows of another size come back": (
        combined, {"hidden": 4}, combined, {"hidden": 5}, "[4]", "[5]",
    ),
    "backward on one rank": (
        layer, {"backward": True}, layer, {}, "moe_ffn_backward", "barrier",
    ),
}  # fmt: skip


def disagree(rank: int, name: str, engine: str, warm: bool) -> Seen:
    odd, odd_options, other, other_options, _, _ = CASES[name]
    with fc.Communicator.of(timeout_s=30) as comm:
        if warm:
            layer(comm, tokens=300, k=6, hidden=64, backward=True)  # nothing need grow after that
        comm.barrier()
        start = time.monotonic_ns()

        def work() -> None:
            more = {} if odd in (replayed, combined) else {"engine": engine}
            function, options = (odd, odd_options) if rank == 1 else (other, other_options)
            function(comm, **options, **more)
            comm.barrier()

        seen = see(comm, work)
    with fc.Communicator.of() as comm:
        works(comm)
    return replace(seen, at_ns=seen.at_ns - start)


SETTINGS = [(name, *rest) for name in CASES for rest in (("host", False, 3), ("host", True, 2))]
SETTINGS += [(name, "plain", True, 2) for name in list(CASES)[::4]]


@pytest.mark.parametrize(("name", "engine", "warm", "world_size"), SETTINGS)
def test_disagreement_names_both_views(
    pools: Pools, record_property: Record, name: str, engine: str, warm: bool, world_size: int
) -> None:
    *_, odd_words, other_words = CASES[name]
    results = pools(world_size).run(disagree, name, engine, warm, timeout_s=40)
    for rank, seen in enumerate(results):
        assert seen.error == "MismatchError", (rank, seen)
        views = views_of(seen.message)
        assert len(views) == 2 and 1 in views, seen.message
        odd = views.pop(1)
        (view,) = views.values()
        assert odd != view and odd_words in odd and other_words in view, seen.message
        assert seen.after.startswith("ClosedError") and seen.message in seen.after
    took = max(seen.at_ns for seen in results) / 1e9
    record_property("noticed_s", round(took, 3))
    assert took < LIMIT_S


def die_at(rank: int, event: str, nth: int, victim: int, backward: bool) -> Seen:
    """A good call; then some more, in which the victim dies at the event's nth occurrence."""
    comm = fc.Communicator.of()
    layer(comm, backward=True)

    def calls() -> None:
        with disturb(victim, event, die, nth=nth):
            for _ in range(3):
                y = layer(comm, backward=backward)
                assert bool((y == 2.0).all())

    return see(comm, calls)


@pytest.mark.parametrize("nth", [0, 2, 5])
@pytest.mark.parametrize("event", ["begin", "write", "signal", "wait", "read", "consumed"])
def test_death_within_a_call(pools: Pools, record_property: Record, event: str, nth: int) -> None:
    outcomes = pools(3).outcomes(die_at, event, nth, 1, nth > 1, timeout_s=30)
    assert_lost(survivors(outcomes, 1, record_property), 1, "rank 1 died")


def die_between(rank: int, engine: str, victim: int, step: str) -> Seen:
    """The victim dies between dispatch and combine, or as its experts begin."""
    comm = fc.Communicator.of()
    layer(comm, engine=engine)
    if rank == victim and step == "experts":
        from fusedcomm.engines.experts import Experts

        before(Experts, "project_up", die)

    def calls() -> None:
        d = fc.dispatch(torch.ones(3, H), torch.arange(3).view(3, 1), None, E, engine=engine)
        if rank == victim and step == "combine":
            die()
        for _ in range(2):
            fc.combine(d.x, d)
            layer(comm, engine=engine)

    return see(comm, calls)


@pytest.mark.parametrize("engine", ["host", "plain"])
@pytest.mark.parametrize("step", ["combine", "experts"])
def test_death_between_dispatch_and_combine(
    pools: Pools, record_property: Record, step: str, engine: str
) -> None:
    outcomes = pools(2).outcomes(die_between, engine, 1, step, timeout_s=30)
    assert_lost(survivors(outcomes, 1, record_property), 1, "rank 1")


# Wrong arguments

_X, _IDS, _W = torch.ones(5, H), torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2)
_W13, _W2 = torch.ones(E, 2 * F, H), torch.ones(E, H, F)

DISPATCH: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "x is a vector": ((_X[0], _IDS, _W, E), {}, r"x must be \[tokens, hidden\].*\[8\]"),
    "x is a list": (([[1.0]], _IDS, _W, E), {}, "x must be a tensor; got list"),
    "x of integers": ((_X.long(), _IDS, _W, E), {}, "x must be float32.*got torch.int64"),
    "no ids": ((_X,), {}, "needs topk_ids and num_experts, or the plan"),
    "no number of experts": ((_X, _IDS, _W), {}, "needs topk_ids and num_experts"),
    "ids of floats": ((_X, _W, _W, E), {}, "integers; got torch.float32"),
    "ids of other tokens": ((_X, _IDS[:4], None, E), {}, r"topk_ids must be \[5, 'k'\]"),
    "no choice": ((_X, _IDS[:, :0], None, E), {}, "k at least 1"),
    "weights of integers": ((_X, _IDS, _IDS, E), {}, "floats, or None; got torch.int64"),
    "weights of another shape": ((_X, _IDS, _W[:, :1], E), {}, r"shape of topk_ids, \[5, 2\]"),
    "no experts": ((_X, _IDS, _W, 0), {}, "num_experts must be positive; got 0"),
    "a number of experts that is none": ((_X, _IDS, _W, 6.0), {}, "num_experts must be an integer"),
    "align of a half": ((_X, _IDS, _W, E), {"align": 1.5}, "align must be an integer; got 1.5"),
    "a capacity of floats": ((_X, _IDS, _W, E), {"capacity": 9.0}, "capacity must be an integer"),
    "a flag for max_tokens": ((_X, _IDS, _W, E), {"max_tokens": True}, "max_tokens must be an int"),
    "align of 0": ((_X, _IDS, _W, E), {"align": 0}, "align must be positive; got 0"),
    "negative capacity": ((_X, _IDS, _W, E), {"capacity": -1}, "capacity must not be negative"),
    "another overflow": ((_X, _IDS, _W, E), {"overflow": "wrap"}, "'error' or 'drop'; got 'wrap'"),
    "too many tokens": ((_X, _IDS, _W, E), {"max_tokens": 4}, "5 tokens, but max_tokens is 4"),
    "a rank that is none": (
        (_X, _IDS, _W, E), {"placement": [0, 0, 0, 0, 0, 9]}, "placement must name a rank",
    ),
    "experts without a rank": ((_X, _IDS, _W, E), {"placement": [0]}, "for each of 6 experts"),
    "another engine": ((_X, _IDS, _W, E), {"engine": "fast"}, "engine must be one of"),
}  # fmt: skip
FFN: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "another activation": ((_W13, _W2), {"activation": "tanh"}, "activation must be one of"),
    "another layout": ((_W13, _W2), {"layout": "up_gate"}, "layout must be one of"),
    "w13 of two dimensions": ((_W13[0], _W2), {}, "w13 must be a tensor of three dimensions"),
    "w13 of no gate": ((_W13[:, :F], _W2), {}, r"w13 must be \[6, 8, 8\].*got \[6, 4, 8\]"),
    "w2 transposed": ((_W13, _W2.mT), {}, "w13 must be"),
    "other experts in w2": ((_W13, _W2[:5]), {}, "w2 has 5 experts, but this rank has 6"),
    "b2 of another shape": ((_W13, _W2), {"b2": torch.ones(E, F)}, r"b2 must be \[6, 8\]"),
    "another dtype": ((_W13.half(), _W2), {}, "w13 is torch.float16, but x is torch.float32"),
    "nothing to call beside": ((_W13, _W2), {"beside": 3}, "beside must be a function; got int"),
    "dropped is a number": ((_W13, _W2), {"dropped": 0}, "dropped must be a tensor.*got int"),
    "dropped of another shape": (
        (_W13, _W2), {"dropped": torch.zeros(1, dtype=torch.int64)}, r"got torch.int64 \[1\]",
    ),
    "dropped of another dtype": (
        (_W13, _W2), {"dropped": torch.zeros(())}, r"int64 of no dimension; got torch.float32 \[\]",
    ),
    "experts of all, said to be more": (
        (_W13, _W2), {"num_experts": 12}, "w13 has 6 experts, but this rank has 12",
    ),
}  # fmt: skip


def refuse(rank: int) -> None:
    comm = fc.Communicator.of()
    for name, (arguments, options, words) in DISPATCH.items():
        with pytest.raises(ValueError, match=words):
            fc.dispatch(*arguments, **options)
            raise AssertionError(f"{name} was accepted")
    for name, (weights, options, words) in FFN.items():
        with pytest.raises(ValueError, match=words):
            fc.moe_ffn(_X, _IDS, _W, *weights, **options)
            raise AssertionError(f"{name} was accepted")
    d = fc.dispatch(_X, _IDS, _W, E)
    with pytest.raises(ValueError, match=r"a row for each of d.x; got \[3, 8\]"):
        fc.combine(_X[:3], d)
    with pytest.raises(ValueError, match="must be what dispatch returned; got Tensor"):
        fc.combine(d.x, _X)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="give x alone with it"):
        fc.dispatch(_X, _IDS, plan=d)
    with pytest.raises(ValueError, match=r"the plan's tokens are \[5\]"):
        fc.dispatch(_X[:4], plan=d)
    works(comm)


def test_wrong_arguments_are_refused(pools: Pools) -> None:
    pools(1).run(refuse)
