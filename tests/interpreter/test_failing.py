"""What the first and the last launch of a call do when an earlier call has failed."""

from __future__ import annotations

import torch


def _launch(rank: int) -> dict[str, list]:
    """Two ranks' words in one process: rank 1 has failed, rank 0 hears of it."""
    from fusedcomm.engines.triton.interpreter import install
    from fusedcomm.kernels import signals

    install()
    words = torch.zeros(2, 512, dtype=torch.int32)
    bases = torch.tensor([part.data_ptr() for part in words], dtype=torch.int64)
    failed = 96
    places = {"epoch_word": 0, "consumed_word": 32, "failed_word": failed}
    records = torch.zeros(2, signals.RECORD_WORDS, dtype=torch.int32)
    hosts = torch.zeros(2, signals.RECORD_WORDS, dtype=torch.int32)
    records[1, :6] = torch.tensor([1, signals.READY.value, 0, 4, 9, 8])
    common = {"bases": bases, "world_size": 2, **places}
    found: dict[str, list] = {}
    signals.begin[(1,)](rank=1, limit=10, record=records[1], **common)
    found["epochs after begin"] = words[:, 0].tolist()
    found["failed after begin"] = words[:, failed].tolist()
    for number in range(2):
        signals.end[(1,)](
            rank=number, op=6 + number, record=records[number], host_record=hosts[number], **common
        )
    found["record"], found["hosts"] = records[0].tolist(), hosts.tolist()
    # A later call changes nothing, and does not write over what is reported.
    signals.begin[(1,)](rank=0, limit=10, record=records[0], **common)
    signals.end[(1,)](rank=0, op=9, record=records[0], host_record=hosts[0], **common)
    found["later"] = hosts[0].tolist()
    found["epochs"] = words[:, 0].tolist()
    return found


def test_peers_hear_of_a_failure(pools):
    found = pools(1, TRITON_INTERPRET="1").run(_launch)[0]
    assert found["epochs after begin"] == [0, 0]  # no new epoch, so no copy raises a new flag
    assert found["failed after begin"] == [1, 0]
    ready, told = 2, 3  # kinds
    assert found["record"] == [1, told, -1, -1, 1, 1, 0, 0]
    assert found["hosts"] == [[1, told, -1, -1, 1, 1, 6, 0], [1, ready, 0, 4, 9, 8, 7, 0]]
    assert found["later"] == found["hosts"][0]
    assert found["epochs"] == [0, 0]


def _address(rank: int) -> list[int]:
    from tests.interpreter import arithmetic_kernels as kernels

    bases, out = torch.tensor([64, 128], dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    kernels.address_kernel[(1,)](bases, 1 << 30, 7, (1 << 30) + 16, out)
    return out.tolist()


def test_regions_are_addressed_in_64_bits(pools):
    """Seven regions of a GiB are more than 32 bits hold."""
    found = pools(1, TRITON_INTERPRET="1").run(_address)[0]
    offset = (1 << 30) + 7 * ((1 << 30) + 16)
    assert found == [64 + offset, 128 + offset]
