"""How GPU tensors cross between domains, with stand-ins for what only a GPU has."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from fusedcomm import crossing
from fusedcomm.between import Between
from fusedcomm.engines.across import levels
from fusedcomm.symmetric.groups import TorchGroup

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Begun:
    """A work that delivers when it is waited for."""

    def __init__(self, deliver: Any) -> None:
        self.deliver, self.over = deliver, False

    def is_completed(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.deliver()


class Net:
    """A carrier that writes down what it is given and sends ``came``."""

    def __init__(self, events: list[str], came: Tensor) -> None:
        self.events, self.came = events, came

    def all_to_all(self, received: Tensor, sent: Tensor, *rows: Any) -> Begun:
        self.events.append(f"sent {sent.tolist()}")
        return Begun(lambda: received.copy_(self.came))

    def broadcast(self, tensor: Tensor, source: int, mine: bool) -> Begun:
        self.events.append(f"sent {tensor.tolist()}" if mine else "receives")
        return Begun(lambda: None if mine else tensor.copy_(self.came))


@pytest.fixture
def events() -> Iterator[list[str]]:
    """What happens, in order; the pinned memory is none, and a stream is waited for by a note."""
    found: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: found.append("the stream is done"))
    with (
        mock.patch.object(crossing, "_pinned", torch.empty_like),
        mock.patch("torch.cuda.current_stream", lambda _: stream),
    ):
        yield found


def test_staged_data_is_sent_when_it_is_there_and_put_in_its_place_in_the_wait(
    events: list[str],
) -> None:
    staged = crossing.Staged(Net(events, torch.tensor([7, 8])))  # type: ignore[arg-type]
    received = torch.zeros(2, dtype=torch.int64)
    work = staged.all_to_all(received, torch.tensor([1, 2]), [1, 1], [1, 1])
    assert events == ["the stream is done", "sent [1, 2]"]
    assert not work.is_completed() and not received.any()
    work.wait()
    assert received.tolist() == [7, 8]


def test_a_staged_broadcast(events: list[str]) -> None:
    staged = crossing.Staged(Net(events, torch.tensor([7])))  # type: ignore[arg-type]
    x = torch.tensor([5])
    staged.broadcast(x, 1, True).wait()
    assert events == ["the stream is done", "sent [5]"] and x.tolist() == [5]
    staged.broadcast(x, 0, False).wait()
    assert events[2:] == ["receives"] and x.tolist() == [7]


def test_nccl_is_waited_for_on_the_stream_and_takes_few_multiprocessors() -> None:
    made: dict[str, Any] = {}

    class Nccl:
        class Options:
            def __init__(self) -> None:
                self.config = SimpleNamespace()

        def __init__(self, store: Any, rank: int, world_size: int, options: Any) -> None:
            made.update(store=store, rank=rank, world_size=world_size, options=options)
            self.work = mock.Mock()
            self.alltoall_base = mock.Mock(return_value=self.work)

    store = dist.HashStore()
    with mock.patch.object(dist, "ProcessGroupNCCL", Nccl, create=True):
        carrier = crossing.nccl(store, 1, 3, 20.0)
    assert (made["store"], made["rank"], made["world_size"]) == (store, 1, 3)
    assert made["options"]._timeout == timedelta(seconds=20)
    assert made["options"].config.max_ctas == crossing.CROSSING_PROGRAMS
    x, y = torch.ones(2), torch.zeros(2)
    work = carrier.all_to_all(y, x, (1, 1), (1, 1))
    carrier.backend.alltoall_base.assert_called_once_with(y, x, [1, 1], [1, 1])
    # The host looks only once, and then waits for nothing but the order of the stream.
    assert work.is_completed() and not carrier.backend.work.wait.called
    work.wait()
    carrier.backend.work.wait.assert_called_once_with()


def between(on_gpus: bool) -> Any:
    found: Any = Between.__new__(Between)
    found.domain, found.domains, found.usable, found._all_know = 0, 2, True, False
    found._on_gpus, found._timeout_s, found._meeting = on_gpus, 20.0, dist.HashStore()
    found._gloo, found._staged, found._nccl = object(), object(), None
    found._store, found._alarm_key = dist.HashStore(), "alarm"
    return found


def test_which_carrier_takes_which_tensors() -> None:
    staged, native = between(False), between(True)
    assert staged._carrier(CPU) is staged._gloo and native._carrier(CPU) is native._gloo
    assert staged._carrier(GPU) is staged._staged
    assert not staged.on_stream(GPU) and not native.on_stream(CPU) and native.on_stream(GPU)
    with mock.patch("fusedcomm.between.nccl") as made:
        assert native._carrier(GPU) is native._carrier(GPU) is made.return_value
    assert made.call_count == 1 and made.call_args.args[1:] == (0, 2, 20.0)
    # After an error the GPU must not go on waiting for what nobody will send.
    native.give_up("an error")
    made.return_value.backend.abort.assert_called_once_with()


def capturing(native: bool, seen: set[str]) -> Any:
    return SimpleNamespace(
        between=between(native),
        gpu=lambda device: SimpleNamespace(seen=seen),
        collective=mock.Mock(side_effect=AssertionError("something was begun")),
    )


@pytest.mark.parametrize(
    ("native", "said"), [(False, "through the host's memory"), (True, "made once before")]
)
def test_a_graph_that_cannot_hold_a_call_is_refused_before_it(native: bool, said: str) -> None:
    comm = capturing(native, {"another call"})
    with (
        mock.patch.object(levels, "is_capturing", lambda: True),
        pytest.raises(ValueError, match=said),
        levels.two_levels(comm, "a call", "op", GPU),
    ):
        pass


def test_a_graph_holds_a_call_that_was_made_before() -> None:
    with (
        mock.patch.object(levels, "is_capturing", lambda: True),
        pytest.raises(AssertionError, match="something was begun"),
        levels.two_levels(capturing(True, {"a call"}), "a call", "op", GPU),
    ):
        pass


def test_some_ranks_of_a_group_have_a_name_for_torch() -> None:
    store = dist.PrefixStore("part", dist.HashStore())
    group = TorchGroup("a group/part", 1, 2, store)
    with pytest.raises((RuntimeError, ValueError)):
        distributed_c10d._resolve_process_group(group._name)  # not before it is needed
    found = distributed_c10d._resolve_process_group(group.name)
    assert (found.rank(), found.size()) == (1, 2)
    assert group.name == group.name == "a group/part"
    group.close()
    with pytest.raises((RuntimeError, ValueError)):
        distributed_c10d._resolve_process_group(group._name)
    again = TorchGroup("a group/part", 0, 2, store)
    assert distributed_c10d._resolve_process_group(again.name).rank() == 0
    again.close()
    again.close()
