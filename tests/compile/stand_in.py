"""A stand-in for a GPU: kernels are compiled for it and their launches written down, none is run.

The engine's path for GPU tensors is taken as it is, from the plan to the launches; tensors lie on
the CPU. So arguments, specialisation (an extent of 1 becomes a constant), tile sizes, cooperative
launches and the order of loading and starting are those of a real call.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from fusedcomm.communicator import Communicator
from fusedcomm.communicator.memory import Memory
from fusedcomm.symmetric.devices import Domain

GPU = torch.device("cuda", 0)
PROGRAMS = 132


@dataclass
class Driver:
    """What Triton asks of a driver. ``events``: ("load", kernel), ("launch", kernel, grid)."""

    capability: int
    shared: int
    events: list[tuple[Any, ...]] = field(default_factory=list)
    cooperative: set[str] = field(default_factory=set)

    #: Triton keeps what it has compiled for a device: each stand-in is another one.
    number: int = field(default_factory=itertools.count(1).__next__)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    @property
    def utils(self) -> Any:
        def load(name: str, binary: bytes, shared: int, device: int) -> tuple[int, ...]:
            assert binary[:4] == b"\x7fELF"
            self.events.append(("load", name))
            return 0, 0, 0, 0, 1024

        properties = {"max_shared_mem": self.shared}
        return SimpleNamespace(load_binary=load, get_device_properties=lambda _: properties)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        def launch(x: int, y: int, z: int, *rest: Any) -> None:
            self.events.append(("launch", metadata.name, x))
            if metadata.launch_cooperative_grid:
                self.cooperative.add(metadata.name)

        return launch


def _side(device: torch.device) -> Any:
    """A ``GpuSide`` without a GPU."""
    return SimpleNamespace(
        device=device,
        domain=Domain(None, copies=False),
        programs=PROGRAMS,
        record=torch.zeros(8, dtype=torch.int32),
        host_record=torch.zeros(8, dtype=torch.int32),
        limit=1000,
        seen=set(),
        left=0,
        copy_stream=None,
        op_number=lambda op: 1,
        enter=lambda: None,
    )


@contextlib.contextmanager
def gpu(capability: int, shared: int) -> Iterator[Driver]:
    """Have calls with ``engine="triton"`` on CPU tensors go where those on GPU tensors go."""
    import triton

    from fusedcomm.engines.triton import (
        activations,
        config,
        experts,
        experts_grads,
        gather,
        launch,
        moe,
        routing,
        scatter,
        tensor_parallel,
    )
    from fusedcomm.planning import engine

    driver = Driver(capability, shared)
    side = _side(GPU)
    workspace, launches, tiles = Memory.workspace, launch.launches, config.tiles_of
    reduced, activated = config.reduce_tiles, config.activation_tiles

    def on_gpu(comm: Any, op: str, space: Any, text: str, device: torch.device) -> Any:
        return launches(comm, op, space, text, GPU)

    @contextlib.contextmanager
    def beside_cpu_tensors(*args: Any) -> Iterator[Any]:
        """As on a GPU, but what is allocated for the launches lies where the tensors do."""
        with launches(*args[:4], GPU, *args[5:]) as found:
            for each in (found, *found.beside):
                each.device = torch.device("cpu")
            yield found

    with contextlib.ExitStack() as stack:

        def patch(owner: Any, **changes: Any) -> None:
            stack.enter_context(mock.patch.multiple(owner, **changes))

        patch(torch.cuda, device=lambda _: contextlib.nullcontext())
        patch(torch.cuda, current_device=driver.get_current_device)
        patch(Communicator, gpu=lambda self, device: side)
        patch(Memory, workspace=lambda self, space, device=GPU: workspace(self, space))
        patch(engine, _obstacle=lambda *args: None)
        chip = "sm_100" if capability == 100 else "sm_90"
        patch(config, _shared_bytes=lambda device: shared, _chip=lambda device: chip)
        patch(launch.Launch, counters=lambda self, n: torch.zeros(n, dtype=torch.int32))
        patch(tensor_parallel, launches=on_gpu)
        for module in (moe, routing):
            patch(module, launches=beside_cpu_tensors)
        for module in (experts, experts_grads, gather, scatter, tensor_parallel):
            patch(module, tiles_of=lambda device, *sizes, **more: tiles(GPU, *sizes, **more))
        patch(tensor_parallel, reduce_tiles=lambda device: reduced(GPU))
        patch(activations, activation_tiles=lambda device: activated(GPU))
        patch(launch, _loaded=set())
        before = triton.runtime.driver._active
        triton.runtime.driver.set_active(driver)
        try:
            yield driver
        finally:
            triton.runtime.driver._active = before
