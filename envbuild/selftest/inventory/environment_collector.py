"""Collects what this environment really contains: libraries that are found or loaded, distributions, torch, and
compiled extensions. The result is one document, written as a frame.

The collector only reports, and the host judges the document. It needs no GPU. torch and third-party libraries are
loaded in separate processes, so that a crash is reported and does not end the audit.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from envbuild.selftest.__main__ import BAD_JOB, OK, take
from envbuild.selftest.harness import forked_work
from envbuild.selftest.harness.frame_and_message_streams import FrameWriter
from envbuild.selftest.inventory import (
    compiled_extension_list_and_load_test,
    elf_reader,
    installed_file_comparison,
    interpreter_and_distributions,
    loaded_library_versions,
    mapped_library_origins,
    startup_code_suppression,
    startup_files,
)
from envbuild.selftest.inventory.cuda_library_finder import SITE, Search, library_of_file, own_digits, search_libraries
from envbuild.selftest.inventory.mapped_library_origins import Inventory

VERSION = 1
_NONCE = re.compile(r"[0-9a-f]{32}")
# Importing torch usually takes 2 to 8 s. Once, on 4 cores with a load average of 20, it took more than 60 s.
_IMPORT_SECONDS, _LOAD_SECONDS = 300.0, 10.0
_MOST_COPIES, _MOST_IDENTIFIED = 400, 12
_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP")
_ARCHITECTURES = re.compile(rb"(?:(?:sm|compute)_[0-9]{2,3}[af]? ){1,40}(?:sm|compute)_[0-9]{2,3}[af]?(?=\0)")


def main(job: Any, out: int = 1) -> int:
    """Write the document about this interpreter's environment as a frame with the job's nonce; return the exit
    status."""
    nonce = job_nonce(job)
    if nonce is None:
        return BAD_JOB
    startup_code_suppression.extend_path(variables=True)
    startup_code_suppression.disable_backends()
    FrameWriter(take(out), nonce)(printable_document(collect(job.get("wheels") or {})))
    return OK


def job_nonce(job: Any) -> str | None:
    """Return the nonce of a job. For an invalid job, print to stderr what is expected, and return None."""
    nonce = job.get("nonce") if isinstance(job, dict) else None
    if isinstance(nonce, str) and _NONCE.fullmatch(nonce) and job.get("version") == VERSION:
        return nonce
    print("invalid job: expected version 1 and a nonce of 32 hexadecimal digits", file=sys.stderr)
    return None


def collect(wheels: installed_file_comparison.Wheels = MappingProxyType({})) -> dict[str, Any]:
    """Build the document. `wheels`: the sha256 of the files in each wheel whose contents are known.

    The installed files are read before torch is imported, because the import runs code of packages.
    """
    begin = time.monotonic()
    sites = interpreter_and_distributions.sites()
    held = installed_file_comparison.compare_files([site for site in sites if site.endswith("/site-packages")], wheels)
    started = startup_files.find_startup_files(interpreter_and_distributions.startup_folders(), held.owners)
    compared = time.monotonic()
    importing = _import_torch()
    found = search_libraries(sites, interpreter_and_distributions.prefixes(), os.environ)
    searched = time.monotonic()
    libraries = mapped_library_origins.take_inventory(sorted(found.copies)[:_MOST_COPIES], hashed=held.hashes)
    hashed = time.monotonic()
    ending = importing.finish(_IMPORT_SECONDS) if isinstance(importing, forked_work.ForkedWork) else importing
    imported = time.monotonic()
    loaded = [str(path) for path in ending.reported.get("mapped", ())] if ending else []
    unseen = [path for path in loaded if path not in found.copies]
    later = mapped_library_origins.take_inventory(unseen)
    versions = dict(ending.reported.get("reported", {})) if ending else {}
    copies = _copies([libraries, later], found, loaded, versions)
    copied = time.monotonic()
    compiled, left_out = compiled_extension_list_and_load_test.extension_rows(
        has_torch=bool(ending and "version" in ending.reported)
    )
    return {
        "kind": "holdings",
        "python": interpreter_and_distributions.python(),
        "distributions": interpreter_and_distributions.distributions(),
        "startup": started,
        "altered": held.altered,
        "unrecorded": held.unrecorded,
        "preferred": held.preferred,
        "unchecked": held.unchecked,
        "torch": _torch(ending),
        "libraries": copies,
        "order": _order(copies),
        "extensions": compiled,
        "apex": interpreter_and_distributions.apex(),
        "variables": {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)},
        "compat": sorted(found.compat),
        "machine": interpreter_and_distributions.driver_and_gpus(),
        "cut": found.cut or left_out or held.cut or len(found.copies) > _MOST_COPIES,
        "seconds": {
            "files": compared - begin,
            "search": searched - compared,
            "checksums": hashed - searched,
            "waiting for torch": imported - hashed,
            "torch": ending.seconds if ending else 0.0,
            "extensions": time.monotonic() - copied,
            "all": time.monotonic() - begin,
        },
    }


def _import_torch() -> forked_work.ForkedWork | forked_work.ForkEnding | None:
    if not interpreter_and_distributions.has("torch"):
        return None
    try:
        return forked_work.ForkedWork(loaded_library_versions.torch)
    except OSError as error:
        return forked_work.ForkEnding(failure=f"no process could be started: {error}")


def _torch(ending: forked_work.ForkEnding | None) -> dict[str, Any] | None:
    if ending is None:
        return None
    reported = ending.reported
    return {
        "version": reported.get("version"),
        "cuda": reported.get("cuda"),
        "hip": reported.get("hip"),
        "path": reported.get("path"),
        "imported": "version" in reported,
        "architectures": (reported.get("architectures") or _architectures_on_disk()).split(),
        "failure": ending.failure,
    }


def _architectures_on_disk() -> str:
    """Return the list of architectures that is stored in a library of torch. It is used if torch cannot be imported."""
    for site in interpreter_and_distributions.sites():
        for name in ("libtorch_python.so", "libtorch_cuda.so"):
            try:
                with Path(site, "torch", "lib", name).open("rb") as file:
                    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError):  # ValueError: an empty file
                continue
            with view:
                match = _ARCHITECTURES.search(view)
                if match:
                    return match[0].decode("ascii")
    return ""


def _copies(
    taken: Iterable[Inventory], found: Search, loaded: Iterable[str], reported: Mapping[str, str]
) -> list[dict[str, Any]]:
    rows = []
    mapped, asked = frozenset(loaded), 0
    for library in (library for part in taken for library in part.libraries):
        path, kind = library.path, library_of_file(library.name)
        # A library in torch's wheel does not have the version of the wheel; one in NVIDIA's wheels does.
        own = library.record and library.owner.startswith("nvidia-")
        version = library.version if own else own_digits(path)
        says = reported.get(path)
        if version is None and says is None and kind in loaded_library_versions.ASKED and asked < _MOST_IDENTIFIED:
            asked += 1
            says = (
                forked_work.run_forked(loaded_library_versions.identify(path), _LOAD_SECONDS)
                .reported.get("reported", {})
                .get(path)
            )
        about = elf_reader.read(path) or elf_reader.Elf()
        rows.append(
            {
                **library.document(),
                "library": kind,
                "version": version or says,
                "reported": says,
                "loaded": path in mapped,
                "ways": sorted(found.copies.get(path, ())),
                "soname": about.soname,
                "build_id": about.build_id,
                "rpath": about.rpath,
                "runpath": about.runpath,
            }
        )
    return rows


def _order(copies: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Find out which libcublasLt a program gets if it loads libcublas first; None if there is no libcublas.

    The tested libcublas is the one that torch loads, or else one in the environment.
    """
    of_kind = [copy for copy in copies if copy["library"] == "cublas" and (copy["loaded"] or SITE in copy["ways"])]
    if not of_kind:
        return None
    cublas = str(max(of_kind, key=lambda copy: bool(copy["loaded"]))["path"])
    neighbours = sorted(Path(cublas).parent.glob("libcublasLt*.so*"))
    lt = os.path.realpath(neighbours[0]) if neighbours else None
    ending = forked_work.run_forked(loaded_library_versions.cublas_first(cublas, lt), _LOAD_SECONDS)
    return {
        "cublas": cublas,
        "cublaslt": lt,
        "alone": ending.reported.get("alone", []),
        "both": ending.reported.get("both", []),
        "failure": ending.failure,
    }


def printable_document(value: Any) -> Any:
    """Return the document with all non-printable characters escaped, because paths may contain terminal sequences."""
    if isinstance(value, str):
        return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in value)
    if isinstance(value, Mapping):
        return {printable_document(key): printable_document(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [printable_document(item) for item in value]
    return value
