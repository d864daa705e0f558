"""Segments of shared memory: what they are made of, and what is left when one cannot be had."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fusedcomm.errors import SharedMemoryError
from fusedcomm.symmetric.shm import Segment


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """What all other tests imported is left out of the collections here, which it would slow."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def maps() -> int:
    gc.collect()  # those that other tests left
    return Path("/proc/self/maps").read_text().count("memfd:fusedcomm")


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


@contextmanager
def limit(kind: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 1 << 20])
def test_two_mappings_of_one_memory(size: int) -> None:
    before = descriptors(), maps()
    own = Segment.create("test", size)
    theirs = Segment.attach(os.dup(own.descriptor), own.size)
    own.release_descriptor()
    own.release_descriptor()
    assert descriptors() == before[0]  # a mapping holds none
    assert maps() == before[1] + 2
    assert own.size == theirs.size >= size
    assert not own.tensor(0, (own.size,), torch.uint8).any()
    own.words[3] = -5
    assert theirs.words[3] == -5
    theirs.tensor(8, (2, 3), torch.bfloat16).fill_(2.5)
    assert own.tensor(8, (6,), torch.bfloat16).tolist() == [2.5] * 6
    assert own.bytes[20:24] == b"\0\0\0\0"
    assert own.address == own.tensor(0, (1,), torch.uint8).data_ptr() != theirs.address
    del own, theirs
    assert maps() == before[1]


def test_a_tensor_keeps_the_memory() -> None:
    before = maps()
    segment = Segment.create("test", 4096)
    segment.release_descriptor()
    tensor, words = segment.tensor(128, (3,), torch.float32), segment.words
    del segment
    tensor.fill_(3.0)
    assert words[32:35].tobytes() == torch.full((3,), 3.0).numpy().tobytes()
    del words
    assert tensor.tolist() == [3.0] * 3
    del tensor
    assert maps() == before


@pytest.mark.parametrize("shape", [(0,), (0, 7), (7, 0), (3, 0, 2)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    segment = Segment.create("test", 4096)
    segment.release_descriptor()
    for offset in (0, 8, 4096):
        assert segment.tensor(offset, shape, torch.float64).shape == shape


@pytest.mark.parametrize("size", [1 << 20, 1 << 62])
def test_memory_that_is_not_to_be_had(size: int) -> None:
    before = descriptors(), maps()
    with (
        limit(resource.RLIMIT_FSIZE, 1 << 16),
        pytest.raises(SharedMemoryError, match=f"cannot get {size} bytes .* for test") as caught,
    ):
        Segment.create("test", size)
    assert isinstance(caught.value, MemoryError)
    assert (descriptors(), maps()) == before


@pytest.mark.parametrize("spare", [0, 1])
def test_descriptors_that_are_not_to_be_had(spare: int) -> None:
    before = descriptors(), maps()
    free = os.dup(0)
    os.close(free)
    fillers = [os.open("/dev/null", os.O_RDONLY) for _ in range(300)]  # no gaps below the limit
    free = fillers[-1] + 1
    with (
        limit(resource.RLIMIT_NOFILE, free + spare),
        pytest.raises(SharedMemoryError, match="for test"),
    ):
        Segment.create("test", 4096)
    for filler in fillers:
        os.close(filler)
    assert (descriptors(), maps()) == before


def test_a_segment_that_cannot_be_mapped() -> None:
    before = maps()
    reader, writer = os.pipe()
    os.close(writer)
    with pytest.raises(SharedMemoryError, match="cannot map 4096 bytes of a peer's"):
        Segment.attach(reader, 4096)
    with pytest.raises(OSError):
        os.fstat(reader)  # it was taken over, and is closed
    assert maps() == before


def test_what_is_made_in_inference_mode_is_no_inference_tensor() -> None:
    with torch.inference_mode():
        segment = Segment.create("test", 4096)
    segment.release_descriptor()
    segment.tensor(0, (4,), torch.float32).copy_(torch.ones(4, requires_grad=True).detach())
    assert segment.tensor(0, (4,), torch.float32).sum() == 4
