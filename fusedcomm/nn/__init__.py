"""Modules."""

from fusedcomm.nn.balance import expert_counts, load_balancing_loss, router_z_loss
from fusedcomm.nn.linear import ColumnParallelLinear, RowParallelLinear
from fusedcomm.nn.mlp import GatedMLP
from fusedcomm.nn.moe import MoE, SharedExpert
from fusedcomm.nn.router import Router, Routing
from fusedcomm.nn.state import full_state_dict, load_full_state_dict
from fusedcomm.nn.vocabulary import VocabParallelEmbedding, VocabParallelHead

__all__ = [
    "ColumnParallelLinear",
    "GatedMLP",
    "MoE",
    "Router",
    "Routing",
    "RowParallelLinear",
    "SharedExpert",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "expert_counts",
    "full_state_dict",
    "load_balancing_loss",
    "load_full_state_dict",
    "router_z_loss",
]
