"""What one rank of the demo does, from its shard of the weights to its timeline."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import fusedcomm as fc
from fusedcomm.cli.demo.llama import Llama, LlamaConfig, Replicated, TokenShards
from fusedcomm.cli.demo.sharding import shard
from fusedcomm.cli.demo.timing import Timing, time_projections
from fusedcomm.ranks import Emit
from fusedcomm.schedule import shard_bounds
from fusedcomm.trace import Trace


@dataclass(frozen=True)
class Job:
    """What the parent asks of every rank.

    ``file`` is torch.save's of ``{"weights": …, "logits": …}``: the whole model, and the unsharded
    model's logits of ``text`` [len(text), vocabulary]. The ranks delete it once all have opened it.
    ``timed`` asks for times of the projections, which the interpreter's would say nothing about.
    """

    config: LlamaConfig
    file: Path
    prompt: list[int]
    tokens: int
    end: int | None
    text: list[int]
    engine: str
    trace_file: Path
    picture: Path | None
    timed: bool = True


@dataclass(frozen=True)
class Outcome:
    """What a rank found. ``error`` is ‖difference‖ / ‖logits‖ of the whole vocabulary."""

    tokens: list[int]
    error: float
    timings: list[Timing]


def work(rank: int, emit: Emit, job: Job) -> Outcome:
    """Runs the demo's model on this rank.

    Emits ``("stage", what)``, and in the stages ``("token", id)``, ``("error", relative)`` and
    ``("step", done, total)``.
    """
    with torch.inference_mode():
        world_size = dist.get_world_size()
        whole = torch.load(job.file, mmap=True, weights_only=True)
        dist.barrier()
        if rank == 0:
            os.unlink(job.file)  # what is mapped stays readable
        model = Llama(job.config, shard(whole["weights"], job.config, world_size, rank))

        emit(("stage", "generate"))
        tokens = _generate(model, job, rank, emit)

        emit(("stage", "prefill"))
        layout = TokenShards(len(job.text), job.engine)
        mine = slice(*shard_bounds(len(job.text), world_size)[rank])
        ids = torch.tensor(job.text)[mine]
        logits = model.forward(ids, layout, model.cache(len(job.text)), len(job.text))
        columns = slice(*shard_bounds(job.config.vocabulary, world_size)[rank])
        error = _relative_error(logits, whole["logits"][:, columns])

        emit(("error", error))
        timings: list[Timing] = []
        if job.timed:
            emit(("stage", "time"))
            timings = time_projections(model, len(job.text), job.engine, emit)

        emit(("stage", "trace"))
        with fc.trace() as trace:
            model.forward(ids, layout, model.cache(len(job.text)), len(job.text))
        trace = trace.gather()
        if rank == 0:
            trace.save(job.trace_file)
            if job.picture is not None:
                layer = job.config.layers // 2
                title = f"Prefill of {len(job.text)} tokens on {world_size} ranks"
                title += f"; enlarged: layer {layer + 1} of {job.config.layers}"
                trace.plot(job.picture, title=title, zoom=_window(trace, layer))
        return Outcome(tokens, error, timings)


def _generate(model: Llama, job: Job, rank: int, emit: Emit) -> list[int]:
    """Greedy tokens: the prompt as token shards, then one replicated token at a time."""
    world_size = dist.get_world_size()
    prompt = torch.tensor(job.prompt)
    cache = model.cache(len(job.prompt) + job.tokens)
    layout = TokenShards(len(prompt), job.engine)
    mine = slice(*shard_bounds(len(prompt), world_size)[rank])
    logits = model.forward(prompt[mine], layout, cache, len(prompt))
    offset, _ = shard_bounds(job.config.vocabulary, world_size)[rank]
    tokens: list[int] = []
    while True:
        token = _argmax(logits[-1], offset)
        tokens.append(token)
        if rank == 0:
            emit(("token", token))
        if token == job.end or len(tokens) == job.tokens:
            return tokens
        logits = model.forward(torch.tensor([token]), Replicated(job.engine), cache, 1)


def _argmax(logits: Tensor, offset: int) -> int:
    """Index of the largest of all ranks' logits; the lowest of equal ones. Collective."""
    best, index = logits.max(dim=0)
    mine = torch.stack((best.double(), index + offset))
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return int(max(every, key=lambda pair: pair[0].item())[1])  # the first rank of equal ones


def _relative_error(logits: Tensor, expected: Tensor) -> float:
    """‖logits - expected‖ / ‖expected‖ over all ranks' columns. Collective."""
    sums = torch.stack(
        [(logits - expected).double().square().sum(), expected.double().square().sum()]
    )
    dist.all_reduce(sums)
    difference, norm = sums.sqrt().tolist()
    return difference / norm


def _window(trace: Trace, layer: int) -> tuple[float, float]:
    """From when to when the ranks were in a layer, in ms from the trace's first event."""
    events = [event for event in trace.events if event.info.get("layer") == layer]
    origin = min(event.start_ns for event in trace.events)
    start = min(event.start_ns for event in events) - origin
    return start / 1e6, (max(event.end_ns for event in events) - origin) / 1e6
