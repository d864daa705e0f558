"""Values pass between a pool and its ranks by value, whatever memory they lay in."""

from __future__ import annotations

import pickle
import socket

import pytest
import torch

from fusedcomm.ranks.wire import Channel, dumps


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6).reshape(2, 3).t(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.tensor(True),
        torch.empty(0, 4),
        torch.ones(1).expand(5),
        torch.tensor([1.0, 2.0], requires_grad=True),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}",
)
def test_tensors_keep_values_type_and_shape(tensor: torch.Tensor) -> None:
    copy = pickle.loads(dumps({"a": [tensor]}))["a"][0]
    assert (copy.dtype, copy.shape, copy.requires_grad) == (
        tensor.dtype,
        tensor.shape,
        tensor.requires_grad,
    )
    assert torch.equal(copy, tensor)


def test_a_view_does_not_bring_its_storage() -> None:
    assert len(dumps(torch.zeros(1_000_000)[:2])) < 10_000


def test_graphs_stay_behind() -> None:
    x = torch.ones(2, requires_grad=True)
    copy = pickle.loads(dumps(2 * x))
    assert not copy.requires_grad and copy.grad_fn is None


def test_modules_keep_their_parameters() -> None:
    layer = torch.nn.Linear(2, 3)
    copy = pickle.loads(dumps(layer))
    assert isinstance(copy.weight, torch.nn.Parameter)
    assert torch.equal(copy.weight, layer.weight)


def test_messages_keep_their_bounds() -> None:
    a, b = (Channel(end) for end in socket.socketpair())
    assert not b.readable()
    for message in (b"", b"one", b"two" * 1000):
        a.send(message)
    assert b.readable()
    assert [b.receive() for _ in range(3)] == [b"", b"one", b"two" * 1000]
    a.close()
    with pytest.raises(EOFError):
        b.receive()
    with pytest.raises(ConnectionError):
        b.send(b"x")
    b.close()


def test_an_end_in_the_middle_of_a_message_is_an_end() -> None:
    ours, theirs = socket.socketpair()
    ours.send(b"\x10\0\0\0\0\0\0\0part")
    ours.close()
    channel = Channel(theirs)
    with pytest.raises(EOFError):
        channel.receive()
    channel.close()
