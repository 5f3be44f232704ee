"""Files that decide which libraries a process loads: the system's own, and the dynamic loader's configuration. Pure."""

from __future__ import annotations

import posixpath
import re
import struct
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import PurePosixPath

# The dynamic loader searches these folders and their subfolders for the architecture by default, but no other
# subfolders.
_LIBRARIES = ("lib", "lib64", "usr/lib", "usr/lib64", "usr/local/lib")
_DEFAULT = frozenset(f"{folder}{triple}" for folder in _LIBRARIES for triple in ("", "/x86_64-linux-gnu"))
# The loader, the C library, the run-time libraries of C++, those that Debian's python3 and the modules of its standard
# library link (_ctypes: libffi), and the NVIDIA driver's, which the host provides; by the name that is loaded or by the
# name of the actual file. The libraries that only NCCL or the module nis loads are not included (libibverbs, libnuma,
# libtirpc): `apt-get install` adds them for other programs.
_SYSTEM = re.compile(
    r"ld-linux.*\.so.*|lib(c|m|dl|rt|pthread|util|resolv|nss_(dns|files)|stdc\+\+|gcc_s|z|expat)\.so\.\d.*"
    r"|lib(ffi|crypto|ssl|zstd|bz2|lzma|sqlite3|uuid|crypt|readline|tinfo|ncursesw|panelw|mpdec)\.so\.\d.*"
    r"|lib(cuda|nvidia-[\w-]+)\.so\.\d.*"
    r"|(ld|libc|libm|libdl|librt|libpthread|libutil|libresolv|libnss_dns|libnss_files|libdb)-[\d.]+\.so"
)
_MOST, _SHOWN = 20_000, 10  # entries of a cache (normally a few hundred); changes of a file that are listed
_CACHE = b"glibc-ld.so.cache1.1"
_HEAD, _ENTRY = struct.Struct("<20s2I20x"), struct.Struct("<i2I12x")  # sysdeps/generic/dl-cache.h of glibc


def is_system_library(path: PurePosixPath) -> bool:
    """Whether Python or a library loads this file as the C library, the loader or another system library."""
    below = any(path.is_relative_to(folder) for folder in _LIBRARIES)
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return below and not installed and _SYSTEM.fullmatch(path.name) is not None


def of_loader(path: str, content: bytes | None, names: Collection[str], locked: Collection[str]) -> Iterator[str]:
    """Yield what a configuration file of the dynamic loader changes; `content` None: a link, or a file too large to
    read.

    `names`: libraries that may only come from the default folders and the `locked` ones, like the system's libraries.
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
        yield from (f"the dynamic loader gets the folder {word}" for word in islice(_foreign(content, locked), _SHOWN))


def _foreign(conf: bytes, locked: Collection[str]) -> Iterator[str]:
    """Yield the folders in a file of ld.so.conf.d that are not default ones, subfolders of these, or `locked`."""
    for line in conf.decode(errors="replace").splitlines():
        text = line.partition("#")[0].strip()
        for word in re.split(r"[ \t,:]+", text) if text not in ("", "include /etc/ld.so.conf.d/*.conf") else ():
            folder = PurePosixPath(posixpath.normpath(word).lstrip("/"))
            if not word.startswith("/") or not any(map(folder.is_relative_to, (*_LIBRARIES, *locked))):
                yield word


def _redirected(cache: bytes, names: Collection[str], locked: Collection[str]) -> Iterator[str]:
    """Yield the entries of ld.so.cache that lead to a file with a different name, or from one of these libraries to a
    file outside the allowed folders. Only glibc's format since 2.32 is read."""
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
