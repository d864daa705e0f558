"""What ``doctor`` says of machines that this one is not, and that it is content with this one."""

from __future__ import annotations

import json
import resource
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fusedcomm.cli.doctor import engines, gpus, machine
from fusedcomm.cli.doctor.findings import Finding
from fusedcomm.cli.main import main
from fusedcomm.errors import SharedMemoryError
from fusedcomm.topology import nvml
from fusedcomm.topology.declared import VARIABLE
from fusedcomm.topology.links import PCIE, nvlink


def named(findings: list[Finding], name: str) -> Finding:
    (found,) = [finding for finding in findings if finding.name == name]
    return found


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def missing() -> Any:
        raise nvml.NvmlMissingError("the Python package nvidia-ml-py is not installed")

    monkeypatch.setattr(nvml, "read", missing)


def test_a_machine_without_gpu_or_nvml_is_in_good_health(
    no_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--no-ranks"]) == 0
    text = capsys.readouterr().out
    assert "this machine has no GPU that torch can use. That is fine" in text
    assert "NVML" in text and "not there: the Python package nvidia-ml-py is not installed" in text
    assert "engine host: CPU tensors of ranks that share memory" in text
    assert not any(line.startswith("!") for line in text.splitlines())


def test_json_has_every_finding(no_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-ranks", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert {entry["section"] for entry in content} >= {"software", "machine", "GPUs", "settings"}
    (devices,) = [entry for entry in content if entry["name"] == "devices"]
    assert devices["value"] == [] and devices["broken"] is False


def test_what_is_broken_makes_the_exit_code_1(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "0,1;two")
    assert main(["doctor", "--no-ranks"]) == 1
    text = capsys.readouterr().out
    assert f"! {VARIABLE}" in text and "cannot read 'two'" in text


def test_limits_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> Any:
        raise SharedMemoryError("cannot get 1048576 bytes")

    monkeypatch.setattr(machine.Segment, "create", no_memory)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 128))
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    found = machine.examine()
    memory = named(found, "shared memory")
    assert memory.broken and "cgroup" in memory.advice
    assert "ulimit -n" in named(found, "file descriptors").advice
    assert "take turns" in named(found, "cores").advice
    assert named(found, "gloo's network").broken
    assert "no interface nowhere0" in named(found, "gloo's network").advice
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")

    def no_address(_: str) -> str:
        raise OSError("unknown host")

    monkeypatch.setattr(socket, "gethostbyname", no_address)
    assert "GLOO_SOCKET_IFNAME=lo" in named(machine.examine(), "gloo's network").advice


@pytest.mark.parametrize(
    ("given", "asked", "used", "advised"),
    [
        ("always [madvise] never", "", False, True),
        ("always [madvise] never", "1", True, False),
        ("[always] madvise never", "", True, False),
        ("always madvise [never]", "1", False, False),
        (None, "1", False, False),
    ],
)
def test_pages_of_large_tensors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str | None, asked: str, used: bool,
    advised: bool,
) -> None:  # fmt: skip
    setting = tmp_path / "enabled"
    if given is not None:
        setting.write_text(given + "\n")
    monkeypatch.setattr(machine, "_HUGE_PAGES", setting)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", asked)
    found = named(machine.examine(), "large CPU tensors")
    assert found.value is used
    assert ("THP_MEM_ALLOC_ENABLE=1" in found.advice) is advised


def test_a_torch_that_sees_no_gpu_though_the_driver_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu = nvml.Gpu("GPU-0", "NVIDIA H100", 90, "0000:10:00")
    monkeypatch.setattr(nvml, "read", lambda: ([gpu], "570.1"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = gpus.examine()
    assert named(found, "NVIDIA driver").text == "570.1"
    assert "CUDA_VISIBLE_DEVICES= hides them" in named(found, "devices").text
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "built without CUDA" in named(gpus.examine(), "devices").text


def test_links_stand_under_cudas_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's 0 and 1 are the driver's 2 and 0; the driver's 1 is hidden."""
    fast = nvlink(18, 90, switched=True)
    driver = [nvml.Gpu(f"GPU-{i}", "NVIDIA H100", 90, f"0000:1{i}:00") for i in range(3)]
    driver[0].links = {"GPU-1": PCIE, "GPU-2": fast}
    driver[2].links = {"GPU-0": fast, "GPU-1": PCIE}
    driver[1].refused = {"GPU-0": "cannot write: chipset_not_supported"}
    properties = [SimpleNamespace(uuid=uuid, name="NVIDIA H100", major=9, minor=0) for uuid in "20"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device])
    monkeypatch.setattr(nvml, "read", lambda: (driver, "570.1"))
    monkeypatch.setattr(gpus, "check_writes", lambda count: [])
    monkeypatch.setattr(gpus, "_multicast", lambda count: Finding("GPUs", "multicast", "no"))
    found = gpus.examine()
    assert "number 2 of the driver" in named(found, "cuda:0").text
    pairs = [finding for finding in found if " to " in finding.name]
    assert [pair.name for pair in pairs] == ["cuda:0 to cuda:1"]
    assert pairs[0].text == str(fast)
    del driver[2].links["GPU-0"]
    driver[2].refused["GPU-0"] = "cannot read: not_supported"
    pair = named(gpus.examine(), "cuda:0 to cuda:1")
    assert pair.text == "cannot read: not_supported" and "IOMMU" in pair.advice


def test_peer_access_counts_only_when_the_words_arrive() -> None:
    capable = {(0, 1), (1, 0), (1, 2), (2, 1)}
    problems = {(2, 1): "the words did not arrive"}
    found = gpus.check_writes(
        3, lambda a, b: (a, b) in capable, lambda a, b: problems.get((a, b), "")
    )
    right, broken = found
    assert right.value["right"] == 3 and right.value["refused"] == ["0 to 2", "2 to 0"]
    assert broken.broken and "2 to 1: the words did not arrive" in broken.text
    assert len(gpus.check_writes(2, lambda a, b: True, lambda a, b: "")) == 1
    assert gpus.check_writes(1) == []


def test_what_runs_how_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert named(engines.examine(), "GPU ranks that reach each other").value == "triton"


def test_what_runs_how_is_what_the_planner_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = engines.examine()
    assert named(found, "CPU ranks of one machine").value == "host"
    assert named(found, "CPU ranks that share nothing").value == "plain"
    assert "inside each domain" in named(found, "CPU ranks of equal domains").text
    assert "TRITON_INTERPRET=1 before" in named(found, 'engine="triton" on CPU').text
