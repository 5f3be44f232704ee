"""Compares the assumptions of the child image check about Debian with the Debian of this machine."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from envbuild.attest import child_layer_check, dynamic_loader_config_check

PYTHON = Path("/usr/bin/python3")
# The modules of the standard library that torch, or an ordinary program with it, imports and that link a library.
_MAPPED = """
import bz2, ctypes, curses, curses.panel, dbm.ndbm, decimal, hashlib, lzma, pwd, pyexpat, readline, socket, sqlite3
import ssl, uuid, zlib
pwd.getpwuid(0)
print(*{line.split()[-1] for line in open("/proc/self/maps") if ".so" in line and "/lib-dynload/" not in line})
"""


def debian() -> None:
    """Skip the test on another system."""
    if sys.platform != "linux" or platform.freedesktop_os_release().get("ID") != "debian":
        pytest.skip("this machine is not Debian")


def test_the_folder_links_are_those_of_debian() -> None:
    debian()
    if not Path("/bin").is_symlink():
        pytest.skip("/bin of this machine is a folder")
    kept = [path for folder in ("/", "/usr/bin") for path in Path(folder).iterdir() if path.is_symlink()]
    system = {str(path.resolve()) for path in map(Path, ("/usr", "/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib64"))}
    found = {str(path).lstrip("/"): str(path.readlink()).lstrip("/") for path in kept if str(path.resolve()) in system}
    assert {"bin", "sbin", "lib", "lib64"} <= set(found)
    assert found.items() <= child_layer_check._LINKS.items()


def test_the_libraries_that_debians_python_loads_are_system_libraries() -> None:
    debian()
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is missing")
    if not str(PYTHON.resolve()).startswith("/usr/bin/"):
        pytest.skip(f"{PYTHON} is not Debian's")
    done = subprocess.run([PYTHON, "-I", "-S", "-c", _MAPPED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = [PurePosixPath(path.lstrip("/")) for path in done.stdout.split()]
    assert any(path.name.startswith("libffi.so") for path in loaded)
    assert [str(path) for path in loaded if not dynamic_loader_config_check.is_system_library(path)] == []


@pytest.mark.parametrize("name", ["libibverbs.so.1", "libnuma.so.1", "libssl.so", "libcurl.so.4", "libcrypto.a"])
def test_other_libraries_are_not_system_libraries(name: str) -> None:
    assert not dynamic_loader_config_check.is_system_library(PurePosixPath("usr/lib/x86_64-linux-gnu") / name)
