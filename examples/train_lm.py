"""Train a small byte-level language model over a mesh of ranks, data times tensor parallel.

    python examples/train_lm.py --tp 2                       # 2 processes on this machine's CPU
    python examples/train_lm.py --tp 2 --dp 2 --text my.txt  # 4 processes, a text of your own
    python examples/train_lm.py --tp 3 --resume              # go on from the last checkpoint
    torchrun --nproc-per-node 4 examples/train_lm.py --tp 2 --dp 2

The model (``byte_decoder.py``) is plain PyTorch. One call cuts it over the tensor ranks; FSDP2
shards what is left over the data ranks; the loss is computed without gathering the logits. Every
combination of ranks sees the same batches, so that all train to the same weights within rounding.
Writes a loss curve, the losses as JSON and checkpoints into ``--out``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from byte_decoder import ByteDecoder, Shape
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import fusedcomm as fc

TEXT = Path(fc.__file__).parent / "cli/demo/alice.txt"


@dataclass(frozen=True)
class Settings:
    """What to train, and over how many ranks."""

    tp: int = 1
    dp: int = 1
    steps: int = 200
    batch: int = 8  # sequences a step, of all data ranks together
    sequence: int = 128
    learning_rate: float = 1e-3
    warmup: int = 20
    text: Path = TEXT
    out: Path = Path("out/train_lm")
    checkpoint_every: int = 50  # steps; 0: none
    resume: bool = False
    bf16: bool = False
    seed: int = 0
    shape: Shape = field(default_factory=Shape)


@dataclass(frozen=True)
class Progress:
    """What rank 0 reports after a step."""

    step: int
    loss: float
    tokens_per_s: float


def read_batch(text: Tensor, settings: Settings, step: int) -> Tensor:
    """The ids ``[batch, sequence + 1]`` of a step; the same whatever the ranks are."""
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - settings.sequence, (settings.batch, 1), generator=generator)
    return text[starts + torch.arange(settings.sequence + 1)].long()


def make_model(settings: Settings, mesh: DeviceMesh) -> Any:
    """The model, cut over the mesh. Every rank draws the same weights and keeps its part."""
    torch.manual_seed(settings.seed)
    model = ByteDecoder(settings.shape)
    fc.parallelize(model, mesh["tp"], logits="local")
    if settings.dp > 1:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def train(rank: int, emit: Callable[[Progress], None], settings: Settings) -> dict[str, Any]:
    """One rank's whole run; ``torch.distributed`` is initialised.

    Returns:
        Rank 0: the losses of all steps and, in ``state``, the whole model's weights.
    """
    mesh = init_device_mesh("cpu", (settings.dp, settings.tp), mesh_dim_names=("dp", "tp"))
    data_rank = mesh["dp"].get_local_rank()
    text = torch.frombuffer(bytearray(settings.text.read_bytes()), dtype=torch.uint8)
    model = make_model(settings, mesh)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    losses = load(settings, model, optimizer) if settings.resume else []
    for step in range(len(losses), settings.steps):
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(1.0, (step + 1) / settings.warmup)
        ids = read_batch(text, settings, step).chunk(settings.dp)[data_rank]
        with torch.autocast("cpu", torch.bfloat16) if settings.bf16 else contextlib.nullcontext():
            logits = model(ids[:, :-1])  # [batch / dp, sequence, this rank's bytes]
        loss = model.lm_head.loss(logits, ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fc.all_reduce(loss.detach(), op="avg", group=mesh["dp"])))
        if rank == 0:
            tokens = settings.batch * settings.sequence
            emit(Progress(step + 1, losses[-1], tokens / (time.perf_counter() - start)))
        if settings.checkpoint_every and (step + 1) % settings.checkpoint_every == 0:
            save(settings, model, optimizer, losses)
    state = fc.nn.full_state_dict(model)
    return {"losses": losses, "state": state} if rank == 0 else {}


def save(settings: Settings, model: Any, optimizer: Any, losses: list[float]) -> None:
    """A checkpoint of all ranks, for any number of them; collective."""
    weights, moments = get_state_dict(model, optimizer)
    history = torch.tensor(losses, dtype=torch.float64)
    folder = settings.out / f"step-{len(losses):06d}"
    dcp.save({"model": weights, "optimizer": moments, "losses": history}, checkpoint_id=folder)


def load(settings: Settings, model: Any, optimizer: Any) -> list[float]:
    """Go on from the last checkpoint, whatever ranks wrote it; collective. Returns its losses."""
    folders = sorted(settings.out.glob("step-*"))
    if not folders:
        raise FileNotFoundError(f"--resume: there is no checkpoint in {settings.out}")
    weights, moments = get_state_dict(model, optimizer)
    history = torch.zeros(int(folders[-1].name.removeprefix("step-")), dtype=torch.float64)
    state = {"model": weights, "optimizer": moments, "losses": history}
    dcp.load(state, checkpoint_id=folders[-1])
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return history.tolist()


# The command


class Display:
    """Progress as it comes: a bar where rich is installed, else a line now and then."""

    def __init__(self, settings: Settings) -> None:
        self.steps = settings.steps
        try:
            from rich.progress import Progress as Bar
        except ImportError:
            self.bar = None
            return
        self.bar = Bar(*Bar.get_default_columns(), "{task.fields[note]}")
        self.task = self.bar.add_task("training", total=self.steps, note="")
        self.bar.start()

    def show(self, progress: Progress) -> None:
        note = f"loss {progress.loss:.3f}, {progress.tokens_per_s:,.0f} bytes/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=progress.step, note=note)
        elif progress.step % 10 == 0 or progress.step == self.steps:
            print(f"step {progress.step} of {self.steps}: {note}", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def report(settings: Settings, losses: list[float]) -> None:
    """Write the losses and their curve."""
    settings.out.mkdir(parents=True, exist_ok=True)
    name = f"tp{settings.tp}-dp{settings.dp}"
    (settings.out / f"losses-{name}.json").write_text(json.dumps(losses))
    fall = 1 - losses[-1] / losses[0]
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} ({fall:.0%} less) in {len(losses)} steps")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("matplotlib is not installed: no picture")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color="#4477aa")
    axes.set(
        xlabel="step", ylabel="cross entropy (nats a byte)", title=f"{settings.text.name}, {name}"
    )
    axes.grid(alpha=0.3)
    picture = settings.out / f"loss-{name}.png"
    figure.savefig(picture, dpi=120)
    print(f"loss curve: {picture}")


def parse() -> Settings:
    default = Settings()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument("--dp", type=int, default=1, help="ranks that share each batch")
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--batch", type=int, default=default.batch, help="sequences a step")
    parser.add_argument("--sequence", type=int, default=default.sequence, help="bytes")
    parser.add_argument("--learning-rate", type=float, default=default.learning_rate)
    parser.add_argument("--text", type=Path, default=default.text, help="any file")
    parser.add_argument("--out", type=Path, default=default.out)
    parser.add_argument("--checkpoint-every", type=int, default=default.checkpoint_every)
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in --out")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--seed", type=int, default=default.seed)
    for name in ("hidden", "ffn", "layers", "heads"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default.shape, name))
    given = vars(parser.parse_args())
    shape = Shape(**{name: given.pop(name) for name in ("hidden", "ffn", "layers", "heads")})
    settings = Settings(shape=shape, **given)
    if settings.batch % settings.dp:
        parser.error(f"--batch {settings.batch} cannot be divided by --dp {settings.dp}")
    if shape.hidden % (2 * shape.heads):
        parser.error(f"--hidden {shape.hidden} must be a multiple of 2 x --heads {shape.heads}")
    if settings.text.stat().st_size <= settings.sequence:
        parser.error(f"{settings.text} has no more than --sequence {settings.sequence} bytes")
    return settings


def main() -> None:
    settings = parse()
    world_size = settings.tp * settings.dp
    display = None
    try:
        if "RANK" in os.environ:  # torchrun started this rank
            dist.init_process_group("gloo")
            if dist.get_world_size() != world_size:
                raise SystemExit(
                    f"--tp times --dp is {world_size}, but {dist.get_world_size()} ranks run"
                )
            rank = dist.get_rank()
            display = Display(settings) if rank == 0 else None
            found = train(rank, display.show if display else lambda _: None, settings)
            dist.destroy_process_group()
        else:
            from fusedcomm.ranks import launch

            display = Display(settings)
            shown = display.show
            found = launch(
                train, world_size, settings, on_event=lambda _, progress: shown(progress)
            )[0]
    finally:
        if display is not None:
            display.close()
    if found:
        report(settings, found["losses"])


if __name__ == "__main__":
    main()
