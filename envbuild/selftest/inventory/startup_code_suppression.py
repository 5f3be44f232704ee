"""Prevents packages from running code when Python starts or torch is imported.

This module extends sys.path without running the import lines of `.pth` files, and disables the entry points of
torch.backends.
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
    """Disable the entry points of torch.backends, which `import torch` would run, in this process and its children."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def extend_path(variables: bool) -> None:
    """Add the package folders to sys.path if Python was started with -S, without running code of packages.

    With `variables`, also add the other folders that Python adds without -S: those in PYTHONPATH, the user's package
    folder, and the folders and archives that `.pth` files name. Import lines of `.pth` files never run.
    """
    if not sys.flags.no_site:
        return
    inner, outer = _virtual_environment()
    if inner:
        sys.prefix = sys.exec_prefix = inner  # before Python 3.14, the module site does this, which -S disables
    added = site.getsitepackages([inner]) if inner else []
    if outer or not inner:
        if variables and not os.environ.get("PYTHONNOUSERSITE"):
            added.append(site.getusersitepackages())
        added += site.getsitepackages(outer or None)
    if variables:  # in the same order as Python: each folder is followed by the entries of its `.pth` files
        added = [entry for folder in dict.fromkeys(added) for entry in (folder, *_named(Path(folder)))]
        named = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(entry).is_absolute()]
        added = [*named, *added]
    added = [entry for entry in dict.fromkeys(added) if Path(entry).exists()]
    sys.path[:] = [entry for entry in sys.path if entry not in added] + added
    site.setquit()


def _virtual_environment() -> tuple[str, list[str]]:
    """Return the folder of the virtual environment, or "" without one.

    The second result is the base installation, in a list, if the virtual environment also uses its packages, else [].
    """
    folder = Path(sys.executable).absolute().parent
    for prefix in (folder.parent, folder):  # Python looks for pyvenv.cfg in this order
        with contextlib.suppress(OSError):
            said = (prefix / "pyvenv.cfg").read_text(encoding="utf-8", errors="replace").lower().splitlines()
            values = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in said)}
            return str(prefix), [sys.base_prefix] if values.get("include-system-site-packages") == "true" else []
    return "", []


def _named(folder: Path) -> Iterator[str]:
    """Yield the paths that the `.pth` files in a folder add to sys.path."""
    for path in sorted(folder.glob("*.pth")):
        with contextlib.suppress(OSError):
            yield from (str(folder / line.rstrip()) for line in pth_lines(path.read_bytes()) if not runs(line))
