"""Reads a package's compiled file without loading it: its module name, whether it links torch, and its device code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from envbuild.selftest.inventory import elf_reader, fatbin_reader

# The suffixes of importlib.machinery.EXTENSION_SUFFIXES, for any CPython: .cpython-311-x86_64-linux-gnu.so, .abi3.so,
# .so
_MODULE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\.(cpython-[0-9]+t?|abi3)(?:-[A-Za-z0-9_-]+)?)?\.so")
_PART = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_LIBRARY = re.compile(r"lib[^/]*\.so[0-9.]*")
_TORCH = re.compile(r"lib(torch|c10)[A-Za-z0-9_]*\.so")


@dataclass(frozen=True)
class Compiled:
    """A compiled file.

    `module`: the name to import it by, None for a library; `abi`: the Python it is for, such as cpython-311 or abi3,
    None for any. `architectures` (see fatbin_reader) is None without device code. `damaged`: not an ELF file, or
    invalid device code.
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
    """Whether the file name is that of a shared library."""
    return re.search(r"\.so(\.[0-9]+)*$", path) is not None


def module_of(path: str) -> tuple[str | None, str | None]:
    """(module, abi) of a file, from its path below site-packages; (None, None) for a library."""
    *folders, name = path.split("/")
    match = _MODULE.fullmatch(name)
    if not match or _LIBRARY.fullmatch(name) or not all(map(_PART.fullmatch, folders)):
        return None, None
    return ".".join((*folders, match[1])), match[2]


def read(file: str, path: str) -> Compiled:
    """Read the file `file`, which imports find at `path` below site-packages."""
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
