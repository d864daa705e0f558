"""Trains a small byte-level decoder with mixtures of experts on real text, its experts over ranks.

    python examples/train_moe.py                       # 2 ranks, started here
    python examples/train_moe.py --ep 4 --steps 400    # another number; --ep 1 is the plain model
    python examples/train_moe.py --resume              # goes on where it stopped, with any --ep
    torchrun --nproc-per-node 2 examples/train_moe.py

Every rank has its own part of each batch, the whole of attention, norms and embeddings, and some of
every layer's experts: tokens travel to their experts and back. As the gradients are those of all
ranks' tokens, the losses of a run do not depend on the number of ranks (but for rounding).

Writes to --out: checkpoint.pt (of the whole model, so that it can be cut anew) and training.png:
the loss, and how evenly the router spreads the tokens. See what --balance 0 does to that.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fusedcomm as fc
from fusedcomm.ranks import launch

ROOT = Path(__file__).parents[1]
BYTES = 256
CHECKPOINT = "checkpoint.pt"


class Block(nn.Module):
    """Attention within a sequence, then a mixture of experts over all sequences of all ranks."""

    def __init__(self, hidden: int, heads: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.moe_norm = nn.RMSNorm(hidden)
        self.moe = fc.nn.MoE(hidden, hidden, experts, top_k, shared_ffn=hidden)

    def forward(self, x: Tensor) -> tuple[Tensor, fc.nn.Routing]:
        """``[sequences, length, hidden]`` to the same, and where its tokens went."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y, routing = self.moe(self.moe_norm(x), return_routing=True)
        return x + y, routing


class Decoder(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, args.hidden)
        self.positions = nn.Embedding(args.length, args.hidden)
        self.blocks = nn.ModuleList(
            Block(args.hidden, args.heads, args.experts, args.top_k) for _ in range(args.layers)
        )
        self.norm = nn.RMSNorm(args.hidden)
        self.head = nn.Linear(args.hidden, BYTES, bias=False)

    def forward(self, text: Tensor) -> tuple[Tensor, list[fc.nn.Routing]]:
        x = self.bytes(text) + self.positions.weight[: text.shape[1]]
        routings = []
        for block in self.blocks:
            x, routing = block(x)
            routings.append(routing)
        return self.head(self.norm(x)), routings


class Trainer:
    """The training of one rank, in step with the others."""

    def __init__(self, args: argparse.Namespace, rank: int, world_size: int) -> None:
        self.args, self.rank, self.world_size = args, rank, world_size
        self.text = torch.tensor(list(args.text.read_bytes()))
        torch.manual_seed(args.seed)  # every rank draws the whole model and keeps its part
        self.model = Decoder(args)
        # What every rank has whole sees only this rank's tokens; fc.nn.MoE sees to its own parts.
        fc.parallel.sync_replicated(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95))
        self.losses: list[float] = []
        self.loads: list[Tensor] = []  # of every step, [layers, experts]
        self.file = args.out / CHECKPOINT

    def batch(self, step: int) -> Tensor:
        """This rank's sequences of a batch that depends on the step alone."""
        generator = torch.Generator().manual_seed(self.args.seed * 1_000_003 + step)
        last = len(self.text) - self.args.length
        starts = torch.randint(0, last, (self.args.batch, 1), generator=generator)
        own = starts.tensor_split(self.world_size)[self.rank]
        return self.text[own + torch.arange(self.args.length + 1)]

    def step(self) -> float:
        """One step; returns the loss over the whole batch, in nats per byte."""
        args = self.args
        text = self.batch(len(self.losses))
        logits, routings = self.model(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="sum")
        loss = loss / (args.batch * args.length)
        # Each of these is, averaged over ranks, that of all tokens; and gradients add up.
        balance = sum(fc.nn.load_balancing_loss(routing) for routing in routings)
        (loss + args.balance * balance / args.layers / self.world_size).backward()
        self.clip(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        counts = [fc.nn.expert_counts(routing.ids, args.experts) for routing in routings]
        self.loads.append(torch.stack(counts) / (args.batch * args.length * args.top_k))
        self.losses.append(fc.all_reduce(loss.detach().reshape(1)).item())
        return self.losses[-1]

    def clip(self, limit: float) -> None:
        """Scale all gradients so that their norm, over all ranks' experts, is at most ``limit``."""
        squares = torch.zeros(2)
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            squares[int(".experts." in name)] += parameter.grad.square().sum()
        norm = (squares[0] + fc.all_reduce(squares[1:])[0]).sqrt().item()
        if norm > limit:
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(limit / norm)

    def state(self) -> dict[str, Any]:
        """All that is needed to go on, of the whole model; collective."""
        return {
            "model": fc.nn.full_state_dict(self.model),
            **{key: self._averages(key) for key in ("exp_avg", "exp_avg_sq")},
            "losses": self.losses,
            "loads": self.loads,
        }

    def _averages(self, key: str) -> dict[str, Tensor]:
        """AdamW's running averages are cut as the parameters are: they take their place."""
        held = {name: value.clone() for name, value in self.model.state_dict().items()}
        states = {
            name: self.optimizer.state[parameter][key]
            for name, parameter in self.model.named_parameters()
        }
        self.model.load_state_dict(states)
        full = fc.nn.full_state_dict(self.model)
        self.model.load_state_dict(held)
        return full

    def save(self) -> None:
        state = self.state()
        if self.rank == 0:
            partial = self.file.with_suffix(".partial")
            torch.save(state, partial)
            os.replace(partial, self.file)  # never half a checkpoint

    def load(self) -> None:
        """Take this rank's part of a checkpoint of any number of ranks."""
        state = torch.load(self.file, weights_only=True)
        self.losses, self.loads = state["losses"], state["loads"]
        for key in ("exp_avg", "exp_avg_sq", "model"):  # the model itself last: it stays
            fc.nn.load_full_state_dict(self.model, state[key])
            if key != "model":
                for parameter in self.model.parameters():
                    held = self.optimizer.state[parameter]
                    held[key] = parameter.detach().clone()
                    held["step"] = torch.tensor(float(len(self.losses)))

    @torch.no_grad()
    def continued(self, prompt: bytes, length: int) -> bytes:
        """The text that the model finds most likely; collective, though all find the same."""
        text = torch.tensor([list(prompt)])
        for _ in range(length):
            logits, _ = self.model(text[:, -self.args.length :])
            text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
        return bytes(text[0].tolist())


def train(rank: int, emit: Any, args: argparse.Namespace) -> None:
    """What every rank does; it tells the parent how far it is."""
    trainer = Trainer(args, rank, dist.get_world_size())
    if args.resume:
        trainer.load()
    start, begun = len(trainer.losses), time.perf_counter()
    for step in range(start + 1, args.steps + 1):
        loss = trainer.step()
        per_step = (time.perf_counter() - begun) / (step - start)
        emit((step, loss, trainer.loads[-1].max().item() * args.experts, per_step))
        if step % args.save_every == 0 or step == args.steps:
            trainer.save()
    sample = trainer.continued(bytes(trainer.text[:40].tolist()), 80)
    if rank == 0:
        picture = plot(args, trainer.losses, torch.stack(trainer.loads))
        emit(f"{sample.decode(errors='replace')!r}\n{trainer.file}\n{picture}")


def plot(args: argparse.Namespace, losses: list[float], loads_SLE: Tensor) -> Path:
    """The loss, and the share of each expert in each layer's tokens, over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1 + args.layers, sharex=True, figsize=(8, 2.4 + 1.6 * args.layers), layout="constrained"
    )
    steps = len(losses)
    axes[0].plot(range(1, steps + 1), losses)
    axes[0].set(ylabel="loss [nats/byte]", title=f"{args.text.name}, {args.experts} experts")
    for layer, axis in enumerate(axes[1:]):
        relative = loads_SLE[:, layer].T * args.experts  # 1 where tokens are spread evenly
        image = axis.imshow(
            relative,
            aspect="auto",
            interpolation="nearest",
            cmap="RdBu_r",
            vmin=0,
            vmax=2,
            extent=(0.5, steps + 0.5, args.experts - 0.5, -0.5),
        )
        axis.set(ylabel=f"layer {layer}\nexpert", yticks=range(args.experts))
    axes[-1].set_xlabel("step")
    bar = figure.colorbar(image, ax=axes[1:], extend="max")
    bar.set_label("load of an expert / mean load")
    picture = args.out / "training.png"
    figure.savefig(picture, dpi=110)
    plt.close(figure)
    return picture


class Progress:
    """Shows what rank 0 tells: a line that changes on a terminal, one now and then elsewhere."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.terminal = sys.stdout.isatty()

    def __call__(self, rank: int, event: Any) -> None:
        if rank != 0:
            return
        if isinstance(event, str):
            print(event, flush=True)
            return
        step, loss, load, per_step = event
        last = step == self.steps
        if not self.terminal and step % max(1, self.steps // 10) and not last:
            return
        print(
            f"{'█' * (20 * step // self.steps):░<20} {step}/{self.steps}  loss {loss:.4f}  "
            f"most loaded expert {load:.2f} × mean  {per_step * 1e3:.0f} ms/step  ",
            end="\r" if self.terminal and not last else "\n",
            flush=True,
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--ep", type=int, default=2, metavar="N", help="ranks, started here (2)")
    add("--text", type=Path, default=ROOT / "fusedcomm/cli/demo/alice.txt", metavar="FILE")
    add("--out", type=Path, default=Path("out/train_moe"), metavar="DIR")
    add("--steps", type=int, default=200, metavar="N", help="in all, resumed ones included (200)")
    add("--resume", action="store_true", help="go on from the checkpoint in --out")
    add("--save-every", type=int, default=100, metavar="N")
    add("--balance", type=float, default=0.01, help="weight of the load-balancing loss (0.01)")
    add("--batch", type=int, default=16, metavar="N", help="sequences, over all ranks (16)")
    add("--length", type=int, default=64, metavar="N", help="bytes of a sequence (64)")
    add("--lr", type=float, default=3e-3)
    add("--seed", type=int, default=0)
    for name, size in (("hidden", 96), ("heads", 4), ("layers", 2), ("experts", 8), ("top-k", 2)):
        add(f"--{name}", type=int, default=size, metavar="N", help=f"({size})")
    args = parser.parse_args()
    if not args.text.is_file() or args.text.stat().st_size <= args.length:
        parser.error(f"--text {args.text}: not a file, or no longer than a sequence")
    if args.resume and not (args.out / CHECKPOINT).exists():
        parser.error(f"--resume: there is no {CHECKPOINT} in {args.out}")
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = arguments()
    if "RANK" not in os.environ:
        launch(train, args.ep, args, on_event=Progress(args.steps))
        return
    dist.init_process_group("gloo")  # torchrun started this rank
    rank, progress = dist.get_rank(), Progress(args.steps)
    train(rank, lambda event: progress(rank, event), args)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
