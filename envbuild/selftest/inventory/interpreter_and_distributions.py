"""Describes the interpreter, its installed distributions with their requirements, and the package `apex`.

This module also reads the driver's version and the names of the GPUs.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from pathlib import Path
from typing import Any

from envbuild.selftest.inventory import distribution_records
from envbuild.selftest.nvidia import nvidia_driver_query

# Parts of NVIDIA's apex. They distinguish it from the `apex` on the package index, which is a toolkit for websites.
_APEX_PARTS = ("normalization", "optimizers", "multi_tensor_apply", "amp", "contrib", "transformer")
_APEX_COMPILED = ("amp_C", "apex_C", "fused_layer_norm_cuda", "fused_weight_gradient_mlp_cuda", "syncbn")


def distributions() -> list[dict[str, Any]]:
    """Return all distributions on sys.path, in the order in which imports find them.

    If several distributions have the same name, all are returned.
    """
    found = []
    for item in distribution_records.found_distributions():
        folder = os.path.realpath(str(item.locate_file("")))
        try:
            requires = [str(text) for text in item.requires or ()]
        except Exception:  # a damaged METADATA can raise almost any error; the distribution is listed all the same
            requires = []
        name = distribution_records.normalise(str(item.metadata["Name"]))
        found.append({"name": name, "version": str(item.version), "folder": folder, "requires": requires})
    return found


def sites() -> list[str]:
    """Return the folders that imports search for packages, without archives and the standard library's folders."""
    library = os.path.realpath(os.path.dirname(os.__file__))  # noqa: PTH120 - as text, like sys.path
    folders = dict.fromkeys(os.path.realpath(entry) for entry in sys.path if entry and Path(entry).is_dir())
    return [folder for folder in folders if folder != library and not folder.endswith("/lib-dynload")]


def startup_folders() -> list[str]:
    """Return all folders of sys.path, because Python also searches the standard library's folders for sitecustomize."""
    return [entry for entry in sys.path if entry and Path(entry).is_dir()]


def prefixes() -> list[str]:
    """Return the prefixes of conda environments to which this interpreter belongs; an empty list without conda."""
    return [prefix for prefix in dict.fromkeys((sys.prefix, sys.base_prefix)) if Path(prefix, "conda-meta").is_dir()]


def python() -> dict[str, Any]:
    """Describe the interpreter, with its environment markers (PEP 508)."""
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "prefix": sys.prefix,
        "markers": {
            "implementation_name": sys.implementation.name,
            "implementation_version": platform.python_version(),
            "os_name": os.name,
            "platform_machine": platform.machine(),
            "platform_python_implementation": platform.python_implementation(),
            "platform_release": platform.release(),
            "platform_system": platform.system(),
            "platform_version": platform.version(),
            "python_full_version": platform.python_version(),
            "python_version": ".".join(platform.python_version_tuple()[:2]),
            "sys_platform": sys.platform,
        },
    }


def has(module: str) -> bool:
    """Return whether an import would find this top-level module, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # find_spec raises ValueError for an imported module that has no spec
        return module in sys.modules


def apex() -> dict[str, Any] | None:
    """Describe the package that `import apex` would load, from its files; None if there is no such package."""
    try:
        spec = importlib.util.find_spec("apex")
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    parts = [part for part in _APEX_PARTS if any((folder / part).is_dir() for folder in folders)]
    return {
        "path": str(spec.origin or next(iter(folders), "")),
        "parts": parts,
        "compiled": [name for name in _APEX_COMPILED if has(name)],
    }


def driver_and_gpus() -> dict[str, Any]:
    """Return the GPUs and the driver version of this machine, which the kernel module lists in /proc/driver/nvidia."""
    cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    names = [line.partition(":")[2].strip() for card in cards for line in _lines(card) if line.startswith("Model:")]
    return {"gpus": [name for name in names if name], "driver": nvidia_driver_query.kernel_module_version()}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
