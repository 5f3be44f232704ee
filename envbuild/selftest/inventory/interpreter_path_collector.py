"""Collects the folders and paths that determine which files this interpreter imports and loads.

The result is one document, written as a frame. This module computes no checksums and imports no package, because the
host reads the files itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

from envbuild.selftest.__main__ import BAD_JOB, OK, take
from envbuild.selftest.harness.frame_and_message_streams import FrameWriter
from envbuild.selftest.inventory import interpreter_and_distributions, mapped_library_origins, startup_code_suppression
from envbuild.selftest.inventory.cuda_library_finder import Bounds, ld_folders, search_libraries
from envbuild.selftest.inventory.environment_collector import job_nonce

_SEARCH = Bounds(seconds=60.0)
# The folder lib/ of these prefixes contains the libraries of the whole system, of which only CUDA's are collected.
_SYSTEM_PREFIXES = ("/", "/usr", "/usr/local")


def main(job: Any, out: int = 1) -> int:
    """Write the document about this interpreter as a frame with the job's nonce, and return the exit status."""
    nonce = job_nonce(job)
    if nonce is None:
        return BAD_JOB
    startup_code_suppression.extend_path(variables=True)
    FrameWriter(take(out), nonce)(describe_interpreter(sys.path[1:]))  # sys.path[0] is the self-test
    return OK


def describe_interpreter(path: list[str]) -> dict[str, Any]:
    """Build the document. `path`: the entries of sys.path to report."""
    library = os.path.realpath(os.path.dirname(os.__file__))  # noqa: PTH120 - as text, like sys.path
    entries = dict.fromkeys(os.path.realpath(entry) for entry in path if Path(entry).is_absolute())
    inner = [entry for entry in entries if entry != library and not entry.startswith(f"{library}/lib-dynload")]
    with contextlib.suppress(OSError):
        ctypes.CDLL("libstdc++.so.6")
    mapped = {Path(name).name: os.path.realpath(name) for name in mapped_library_origins.mapped()}
    prefixes = list(dict.fromkeys(os.path.realpath(prefix) for prefix in (sys.prefix, sys.base_prefix)))
    found = search_libraries(
        interpreter_and_distributions.sites(), interpreter_and_distributions.prefixes(), os.environ, _SEARCH
    )
    library_path = [*map(os.path.realpath, ld_folders(os.environ.get("LD_LIBRARY_PATH", "")))]
    machine = interpreter_and_distributions.driver_and_gpus()
    return {
        "kind": "interpreter",
        "version": f"{platform.python_implementation()} {platform.python_version()}",
        "executable": os.path.realpath(sys.executable),
        "prefixes": prefixes,
        "standard_library": library,
        "path": [entry for entry in inner if os.path.exists(entry)],  # noqa: PTH110 - as text, like sys.path
        "loader_folders": [
            *(f"{prefix}/lib" for prefix in prefixes if prefix not in _SYSTEM_PREFIXES),
            *library_path,
        ],
        "library_path": library_path,
        "preloaded": [
            os.path.realpath(entry) if "/" in entry else entry
            for entry in re.split(r"[ :]", os.environ.get("LD_PRELOAD", ""))
            if entry
        ],
        "cuda_libraries": sorted({*found.copies, *map(os.path.realpath, found.compat)}),
        "libc": next((mapped[name] for name in mapped if name.startswith(("libc.so", "ld-musl"))), None),
        "libstdcxx": next((mapped[name] for name in mapped if name.startswith("libstdc++.so")), None),
        "libpython": next((mapped[name] for name in mapped if name.startswith("libpython3")), None),
        "driver": machine["driver"],
        "gpus": machine["gpus"],
        "cut": found.cut,
    }
