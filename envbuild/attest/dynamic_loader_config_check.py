"""Recognises system libraries, and checks configuration files of the dynamic loader. Pure."""

from __future__ import annotations

import posixpath
import re
import struct
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import PurePosixPath

# By default, the dynamic loader searches these folders and their subfolders named after the architecture. It also
# searches their subfolders in glibc-hwcaps, which are not in _DEFAULT: a cache entry that leads there is reported.
_LIBRARIES = ("lib", "lib64", "usr/lib", "usr/lib64", "usr/local/lib")
_DEFAULT = frozenset(f"{folder}{triple}" for folder in _LIBRARIES for triple in ("", "/x86_64-linux-gnu"))
# File names of system libraries: the dynamic loader, the C library, the C++ run-time libraries, the libraries to which
# Debian's python3 and its standard library are linked (libffi for _ctypes), and the libraries of the NVIDIA driver,
# which the host provides. Both the name that programs load and the name of the actual file match. libibverbs and
# libnuma, which only NCCL loads, and libtirpc, which only Python's module nis loads, do not match: `apt-get install`
# adds them for other programs.
_SYSTEM = re.compile(
    r"ld-linux.*\.so.*|lib(c|m|dl|rt|pthread|util|resolv|nss_(dns|files)|stdc\+\+|gcc_s|z|expat)\.so\.\d.*"
    r"|lib(ffi|crypto|ssl|zstd|bz2|lzma|sqlite3|uuid|crypt|readline|tinfo|ncursesw|panelw|mpdec)\.so\.\d.*"
    r"|lib(cuda|nvidia-[\w-]+)\.so\.\d.*"
    r"|(ld|libc|libm|libdl|librt|libpthread|libutil|libresolv|libnss_dns|libnss_files|libdb)-[\d.]+\.so"
)
# The maximum number of entries in a cache (normally a few hundred), and of reported changes per file.
_MOST, _SHOWN = 20_000, 10
_CACHE = b"glibc-ld.so.cache1.1"
_HEAD, _ENTRY = struct.Struct("<20s2I20x"), struct.Struct("<i2I12x")  # sysdeps/generic/dl-cache.h of glibc


def is_system_library(path: PurePosixPath) -> bool:
    """Whether this file would be loaded as a system library, such as the C library or the dynamic loader."""
    below = any(path.is_relative_to(folder) for folder in _LIBRARIES)
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return below and not installed and _SYSTEM.fullmatch(path.name) is not None


def of_loader(path: str, content: bytes | None, names: Collection[str], locked: Collection[str]) -> Iterator[str]:
    """Yield the changes that a configuration file of the dynamic loader makes; nothing for any other file.

    `content`: None for a link, and for a file too large to read. `names`: libraries that must come from a default or a
    locked folder, as system libraries must. `locked`: the folders of locked archives.
    """
    if path == "etc/ld.so.preload":
        yield "libraries are preloaded"
    elif path != "etc/ld.so.cache" and path != "etc/ld.so.conf" and not path.startswith("etc/ld.so.conf.d/"):
        return
    elif content is None:
        yield "a file of the dynamic loader cannot be read"
    elif path == "etc/ld.so.cache":
        yield from islice(_redirected(content, names, locked), _SHOWN)
    else:
        yield from (f"the dynamic loader also searches {word}" for word in islice(_foreign(content, locked), _SHOWN))


def _foreign(conf: bytes, locked: Collection[str]) -> Iterator[str]:
    """Yield the words of ld.so.conf, or of a file of ld.so.conf.d, that do not name a default or `locked` folder or a
    subfolder of one. The usual include of ld.so.conf.d is left out."""
    for line in conf.decode(errors="replace").splitlines():
        text = line.partition("#")[0].strip()
        for word in re.split(r"[ \t,:]+", text) if text not in ("", "include /etc/ld.so.conf.d/*.conf") else ():
            folder = PurePosixPath(posixpath.normpath(word).lstrip("/"))
            if not word.startswith("/") or not any(map(folder.is_relative_to, (*_LIBRARIES, *locked))):
                yield word


def _redirected(cache: bytes, names: Collection[str], locked: Collection[str]) -> Iterator[str]:
    """Yield the entries of ld.so.cache that map a name to a file with a different name. Also yield those that map a
    system library or one of `names` to a file outside the default and `locked` folders.

    Only the format that glibc writes since 2.32 is read.
    """
    try:
        magic, count, _ = _HEAD.unpack_from(cache)
        if magic != _CACHE or count > _MOST:
            raise ValueError("unknown format")
        for index in range(count):
            _, key, value = _ENTRY.unpack_from(cache, _HEAD.size + index * _ENTRY.size)
            name, path = (cache[at : cache.index(b"\0", at, at + 4096)].decode() for at in (key, value))
            folder, file = posixpath.split(path.lstrip("/"))
            counts = name in names or _SYSTEM.fullmatch(name) is not None
            if file != name or (counts and folder not in _DEFAULT and folder not in locked):
                yield f"ld.so.cache maps {name} to {path}"
    except (struct.error, ValueError):
        yield "ld.so.cache cannot be read"
