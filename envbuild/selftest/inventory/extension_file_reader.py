"""Reads a compiled file of a package without loading it: its module name, whether it links torch, and for which GPU
architectures it has device code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from envbuild.selftest.inventory import elf_reader, fatbin_reader

# Names with a suffix of importlib.machinery.EXTENSION_SUFFIXES of any CPython: .cpython-311-x86_64-linux-gnu.so,
# .abi3.so or .so.
_MODULE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\.(cpython-[0-9]+t?|abi3)(?:-[A-Za-z0-9_-]+)?)?\.so")
_PART = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LIBRARY = re.compile(r"lib[^/]*\.so[0-9.]*")
_TORCH = re.compile(r"lib(torch|c10)[A-Za-z0-9_]*\.so")

LOADED_AFTER = "loaded after "
"""The beginning of the text about an extension that could be loaded only after other libraries of its folder."""


@dataclass(frozen=True)
class Compiled:
    """A compiled file.

    `module`: the name under which it can be imported; None for a library. `abi`: the Python ABI in the file name, such
    as cpython-311 or abi3; None if the name has none. `machine`: ELF's machine number. `architectures`: the
    architectures of its device code (see fatbin_reader); None without device code. `damaged`: whether the file is not
    an ELF file, or its device code is invalid.
    """

    module: str | None = None
    abi: str | None = None
    machine: int = 0
    links_torch: bool = False
    architectures: Sequence[str] | None = None
    damaged: bool = False

    @property
    def is_extension(self) -> bool:
        """Whether the file links torch or contains device code."""
        return self.links_torch or self.architectures is not None


def is_shared(path: str) -> bool:
    """Return whether the path ends like that of a shared library: .so, or .so and version numbers."""
    return re.search(r"\.so(\.[0-9]+)*$", path) is not None


def module_of(path: str) -> tuple[str | None, str | None]:
    """Return (module, abi) of a file, derived from its path relative to site-packages; (None, None) for a library."""
    *folders, name = path.split("/")
    match = _MODULE.fullmatch(name)
    if not match or _LIBRARY.fullmatch(name) or not all(map(_PART.fullmatch, folders)):
        return None, None
    return ".".join((*folders, match[1])), match[2]


def read(file: str, path: str) -> Compiled:
    """Read a compiled file. `file`: the path to open. `path`: the path relative to site-packages."""
    module, abi = module_of(path)
    about, code = elf_reader.read(file), fatbin_reader.read(file)
    if about is None:
        return Compiled(module, abi, damaged=True)
    return Compiled(
        module,
        abi,
        about.machine,
        any(map(_TORCH.match, about.needed)),
        code.architectures if code else None,
        bool(code and code.damaged),
    )
