"""``parallelize_module`` as torch has it, for plans that mean what they say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatch

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel
from torch.distributed.tensor.parallel import ParallelStyle

from fusedcomm.integrations.dtensor.layouts import check_mesh


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle],
    *,
    src_data_rank: int | None = 0,
) -> nn.Module:
    """torch's ``parallelize_module``, which a plan's mistakes do not pass.

    torch skips a key that matches nothing with a warning, and cuts the ties of parameters that two
    modules share without one. A style cannot see either: it is never called, or sees one module.

    Args:
        module: the model, or a part; changed in place.
        device_mesh: of one dimension, as ``mesh["tp"]`` is.
        parallelize_plan: module names, in which each part between dots may be a pattern as in
            ``"layers.*.mlp"``, and their styles, this library's and torch's; or one style.
        src_data_rank: whose values count; see torch. None: every rank's own, with no exchange.

    Returns:
        ``module``.

    Raises:
        ValueError: the mesh has several dimensions, a key matches nothing, or a module of the plan
            shares a parameter with another one.
    """
    check_mesh(device_mesh)
    if isinstance(parallelize_plan, Mapping):
        matched = {key: list(_matching(module, key)) for key in parallelize_plan}
        for key, found in matched.items():
            if not found:
                raise ValueError(f"the plan's key {key!r} matches no module{_nearest(module, key)}")
        _check_ties(module, {path for found in matched.values() for path in found})
        parallelize_plan = dict(parallelize_plan)
    return parallel.parallelize_module(
        module, device_mesh, parallelize_plan, src_data_rank=src_data_rank
    )


def _matching(module: nn.Module, key: str, prefix: str = "") -> Iterator[str]:
    """The paths of the modules that a key means, by torch's rule."""
    if key == "":
        yield prefix
        return
    token, _, rest = key.partition(".")
    for name, child in module.named_children():
        if fnmatch(name, token):
            yield from _matching(child, rest, f"{prefix}.{name}" if prefix else name)


def _nearest(module: nn.Module, key: str) -> str:
    """How far the key leads, for the message."""
    tokens = key.split(".")
    for known in range(len(tokens) - 1, -1, -1):
        paths = list(_matching(module, ".".join(tokens[:known])))
        if paths:
            names = [name for name, _ in module.get_submodule(paths[0]).named_children()]
            where = f"{paths[0]!r} has" if paths[0] else "the module has"
            return f": {where} {', '.join(names) if names else 'no modules inside'}"
    return ""


def _check_ties(module: nn.Module, paths: set[str]) -> None:
    names: dict[int, list[str]] = {}
    for path, inner in module.named_modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{path}.{name}".lstrip("."))
    for tied in names.values():
        if len(tied) > 1 and any(name.rpartition(".")[0] in paths for name in tied):
            raise ValueError(
                f"{' and '.join(tied)} are one parameter. A plan replaces parameters, module by "
                "module, so they would part: give each its own first, or use fc.parallelize"
            )
