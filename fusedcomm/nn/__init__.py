"""Modules."""

from fusedcomm.nn.linear import ColumnParallelLinear, RowParallelLinear
from fusedcomm.nn.mlp import GatedMLP
from fusedcomm.nn.state import full_state_dict, load_full_state_dict

__all__ = [
    "ColumnParallelLinear",
    "GatedMLP",
    "RowParallelLinear",
    "full_state_dict",
    "load_full_state_dict",
]
