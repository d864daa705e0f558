# torchrun --nproc-per-node 2 examples/gated_mlp.py
import torch
import torch.distributed as dist

import fusedcomm as fc

dist.init_process_group("gloo")
torch.manual_seed(0)  # every rank draws the whole layer and keeps its shard
mlp = fc.nn.GatedMLP(hidden=512, ffn=2048)  # gate and up cut by rows, down by columns
x = torch.randn(256, 512)  # this rank's tokens
y = mlp(x)  # the gather and the reduce-scatter run beside the products
y.square().mean().backward()  # so do those of the gradients
print(f"rank {dist.get_rank()}: {tuple(y.shape)}, gate {tuple(mlp.gate_proj.weight.grad.shape)}")
dist.destroy_process_group()
