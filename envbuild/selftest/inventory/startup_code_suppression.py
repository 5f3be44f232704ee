"""Prevents packages from running code at startup: sets sys.path without running imports in `.pth` files, and disables
the entry points of torch.backends.
"""

from __future__ import annotations

import contextlib
import os
import site
import sys
from collections.abc import Iterator
from pathlib import Path

from envbuild.selftest.inventory.startup_files import pth_lines, runs


def disable_backends() -> None:
    """Keep `import torch`, in this process and its children, from running the entry points of torch.backends."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def extend_path(variables: bool) -> None:
    """Add the package folders to sys.path of a Python started with -S, without running code of packages.

    `variables`: also add what a normally started Python adds: the folders of PYTHONPATH, the user's packages, and the
    folders and archives (but never the imports) in `.pth` files.
    """
    if not sys.flags.no_site:
        return
    inner, outer = _virtual_environment()
    if inner:
        sys.prefix = sys.exec_prefix = inner  # before Python 3.14 the module site does this
    added = site.getsitepackages([inner]) if inner else []
    if outer or not inner:
        if variables and not os.environ.get("PYTHONNOUSERSITE"):
            added.append(site.getusersitepackages())
        added += site.getsitepackages(outer or None)
    if variables:  # in the order of Python: a folder, then those that its `.pth` files add
        added = [entry for folder in dict.fromkeys(added) for entry in (folder, *_named(Path(folder)))]
        named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(entry).is_absolute()]
        added = [*named, *added]
    added = [entry for entry in dict.fromkeys(added) if Path(entry).exists()]
    sys.path[:] = [entry for entry in sys.path if entry not in added] + added
    site.setquit()


def _virtual_environment() -> tuple[str, list[str]]:
    """The virtual environment's folder ("" without one), and the installation whose packages it also uses."""
    folder = Path(sys.executable).absolute().parent
    for prefix in (folder.parent, folder):  # in the order of Python
        with contextlib.suppress(OSError):
            said = (prefix / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace").lower().splitlines()
            values = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in said)}
            return str(prefix), [sys.base_prefix] if values.get("include-system-site-packages") == "true" else []
    return "", []


def _named(folder: Path) -> Iterator[str]:
    """The folders and archives that a folder's `.pth` files add."""
    for path in sorted(folder.glob("*.pth")):
        with contextlib.suppress(OSError):
            yield from (str(folder / line.rstrip()) for line in pth_lines(path.read_bytes()) if not runs(line))
