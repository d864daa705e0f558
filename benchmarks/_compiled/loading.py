"""The device code and its tile sizes, loaded by path: the package's own import needs torch."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

#: The folder with kernels/ in it: of the repository, or, installed, of the package itself.
ROOT = Path(__file__).resolve().parents[2]


def kernels(module: str) -> ModuleType:
    """A module of ``kernels/``, such as "tiles"; one with dots in its name is any other."""
    if "." in module:
        return importlib.import_module(module)
    package = "_compiled_kernels"
    if package not in sys.modules:
        _load(package, ROOT / "kernels" / "__init__.py", is_package=True)
    return importlib.import_module(f"{package}.{module}")


def config() -> ModuleType:
    """``fusedcomm.engines.triton.config``."""
    name = "_compiled_config"
    if name not in sys.modules:
        package = ROOT / "fusedcomm" if (ROOT / "fusedcomm").is_dir() else ROOT
        _load(name, package / "engines" / "triton" / "config.py")
    return sys.modules[name]


def _load(name: str, file: Path, is_package: bool = False) -> None:
    folders = [str(file.parent)] if is_package else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
