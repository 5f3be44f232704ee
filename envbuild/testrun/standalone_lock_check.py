"""Compares an environment with a profile's lock in under two seconds, without importing torch.

`envbuild export check` copies this module's source into the exported script, with the self-test, whose ELF reader it
uses. It needs Python 3.9 or newer. It checks versions, whether the library files in each RECORD exist, whether the
loader would take different copies, the driver, and the GPU model. It runs no GPU kernel.
"""

from __future__ import annotations

import csv
import ctypes
import os
import platform
import re
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypedDict

from envbuild.selftest.inventory import elf_reader
from envbuild.selftest.inventory.distribution_records import found_distributions, normalise, recorded_libraries
from envbuild.selftest.nvidia import nvidia_driver_query, nvml_ctypes

_FAILED = 5
_MOST_LINES = 12
_TORCH_LIBRARY = "torch/lib/libtorch_cuda.so"
_RANKS = ("RANK", "SLURM_PROCID")

Fault = tuple[str, str]
"""A problem, and how to fix it."""


class ExpectedEnvironment(TypedDict, total=False):
    """What the lock and the profile expect, as in a job document."""

    distributions: Mapping[str, str]
    python: str
    gpus: Sequence[str]
    driver: Mapping[str, str]


class CheckJob(TypedDict):
    """The part of a job document that this module uses."""

    device: str
    expect: ExpectedEnvironment


class CheckDocument(TypedDict):
    """The part of an exported check's document that this module uses."""

    profile: str
    job: CheckJob


def check_startup(document: CheckDocument) -> tuple[int, str]:
    """Return the exit status and the text to print: 0 and one line, or 5 and the faults with their fixes."""
    begin = time.monotonic()
    rank = next((os.environ[name] for name in _RANKS if os.environ.get(name, "").isdecimal()), None)
    place = "" if rank is None else f", rank {rank} on {socket.gethostname()}"
    who = f"envbuild check: {document['profile']}{place}"
    job = document["job"]
    expect = job["expect"]
    locked = {normalise(name): version for name, version in expect["distributions"].items()}
    libraries: dict[str, str] = {}
    faults: list[Fault] = []
    if job["device"] == "cuda":
        faults += gpu_faults(expect.get("gpus") or (), expect.get("driver") or {})
    try:
        faults += list(environment_faults(locked, expect.get("python"), libraries))
    except (OSError, ValueError) as error:
        faults.append((f"the installed packages cannot be read: {error}", "install them again in a new environment"))
    if faults:
        return _FAILED, "\n".join([f"{who}: does not match the lock", *report_lines(faults), ""])
    counts = f"{len(locked)} versions, {len(libraries)} libraries"
    return 0, f"{who}: {counts} match the lock; no probes ran; {time.monotonic() - begin:.1f} s\n"


def report_lines(faults: list[Fault]) -> Iterator[str]:
    """The lines to print for the faults: first the faults, then each fix once. Unprintable characters are escaped."""
    return map(_printable, _lines(faults))


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


def _lines(faults: list[Fault]) -> Iterator[str]:
    for number, (fault, _) in enumerate(faults):
        if number == _MOST_LINES:
            yield f"  and {len(faults) - _MOST_LINES} more"
            break
        yield f"  {fault}"
    for remedy in dict.fromkeys(remedy for _, remedy in faults):
        yield f"  fix: {remedy}"


def environment_faults(locked: Mapping[str, str], python: str | None, libraries: dict[str, str]) -> Iterator[Fault]:
    """Yield, in this order: differing versions of Python, torch and CUDA libraries; damaged RECORDs; faults of library
    files; other differing versions, which may be many. Adds the real path of each library to `libraries`, under its
    path in RECORD."""
    found: dict[str, metadata.Distribution] = {}
    for item in found_distributions():
        found.setdefault(normalise(item.metadata["Name"]), item)
    owners: dict[str, str] = {}
    versions = list(version_faults(locked, {name: item.version for name, item in found.items()}, python))
    yield from filter(_is_of_cuda, versions)
    for name in sorted(found.keys() & locked.keys()):
        try:
            if not _is_readable(found[name].read_text("RECORD") or ""):
                raise ValueError("a line is too long or contains a null character")
            recorded = {path: real for path, real, _ in recorded_libraries(found[name])}
            libraries.update(recorded)
            owners.update(dict.fromkeys(recorded, f"{name}=={locked[name]}"))
        except (OSError, ValueError) as error:
            yield f"the RECORD of {name} is damaged: {error}", _install_again(f"{name}=={locked[name]}")
    yield from loader_faults(libraries, owners, os.environ)
    yield from (fault for fault in versions if not _is_of_cuda(fault))


def _is_of_cuda(fault: Fault) -> bool:
    """Whether a fault is a differing version of Python, torch or a CUDA library."""
    name = fault[0].partition(" ")[0]
    return name == "Python" or not _place(name)[0]


def _is_readable(record: str) -> bool:
    """Whether the csv module of every supported Python version can read each line."""
    return "\0" not in record and all(len(line) <= csv.field_size_limit() for line in record.splitlines())


def _pip(*words: str) -> str:
    """Return a shell command that runs this interpreter's pip."""
    return " ".join(map(shlex.quote, (sys.executable or "python", "-m", "pip", *words)))


def _install_again(requirement: str) -> str:
    return _pip("install", "--force-reinstall", "--no-deps", requirement)


def version_faults(locked: Mapping[str, str], installed: Mapping[str, str], python: str | None) -> Iterator[Fault]:
    """Yield a differing version of Python, then each distribution whose version differs from the locked one, torch and
    CUDA libraries first. The fix of each distribution is one command that installs all of them."""
    own = platform.python_version()
    if python and not f"{own}.".startswith(f"{python}."):
        yield f"Python is {own}, but {python} is locked", f"start the check with Python {python}"
    differing = [name for name in sorted(locked, key=_place) if installed.get(name) != locked[name]]
    remedy = _pip("install", "--no-deps", *(f"{name}=={locked[name]}" for name in differing))
    for name in differing:
        yield f"{name} is {installed.get(name, 'absent')}, but {locked[name]} is locked", remedy


def _place(name: str) -> tuple[bool, str]:
    return not name.startswith(("torch", "nvidia-", "triton")), name


def loader_faults(
    libraries: Mapping[str, str], owners: Mapping[str, str], variables: Mapping[str, str]
) -> Iterator[Fault]:
    """Yield missing library files, and different copies that LD_PRELOAD or LD_LIBRARY_PATH makes the loader take.
    `libraries`: the real path of each library, under its path in RECORD; `owners`: the distribution that contains the
    library, as NAME==VERSION, under the same path."""
    owned = {Path(path).name: real for path, real in libraries.items()}
    for path, real in libraries.items():
        if not _is_file(real):
            yield f"{path} is missing or unreadable", _install_again(owners[path])
    for name in re.split("[: ]", variables.get("LD_PRELOAD", "")):
        expected = owned.get(Path(name).name)
        if expected and os.path.realpath(name) != expected:
            yield f"LD_PRELOAD loads {name} instead of {expected}", f"remove {name} from LD_PRELOAD"
    elf = elf_reader.read(libraries[_TORCH_LIBRARY]) if _TORCH_LIBRARY in libraries else None
    if elf is None or (elf.rpath and not elf.runpath):
        return  # the loader searches RPATH before LD_LIBRARY_PATH
    value = variables.get("LD_LIBRARY_PATH", "")
    folders = [Path(folder or ".") for folder in re.split("[:;]", value)] if value else []
    for name in elf.needed:
        folder = next((folder for folder in folders if _is_file(folder / name)), None)
        if folder and name in owned and os.path.realpath(folder / name) != owned[name]:
            yield (
                f"LD_LIBRARY_PATH loads {folder / name} instead of {owned[name]}",
                (f"remove {folder} from LD_LIBRARY_PATH"),
            )


def _is_file(path: str | Path) -> bool:
    """Whether the path is a file; False without permission to look, where Path.is_file raises PermissionError."""
    return os.path.isfile(path)  # noqa: PTH113


def gpu_faults(models: Sequence[str], drivers: Mapping[str, str]) -> Iterator[Fault]:
    """Yield faults of the driver (unusable or too old), and a fault if the machine has no GPU of these models."""
    try:
        driver, names = _read_gpus()
        library = nvidia_driver_query.file_version(nvidia_driver_query.CudaDriver().path)
    except (OSError, nvml_ctypes.NvmlUnavailable, nvml_ctypes.NvmlRefused) as error:
        yield f"no usable GPU: {error}", "check that nvidia-smi works, and that the GPUs are visible here"
        return
    yield from startup_driver_faults(driver, library, drivers)
    if models and not set(names) & set(models):
        yield f"the GPU is {', '.join(sorted(set(names))) or 'missing'}", f"run on one of: {', '.join(models)}"


def startup_driver_faults(host: str, library: str | None, minimum: Mapping[str, str]) -> Iterator[Fault]:
    """Yield a fault if the driver is older than CUDA's or the profile's minimum, as in the probe env.driver.

    `host`: the driver's version; `library`: the version of the libcuda that the loader takes. The newer of the two must
    reach CUDA's minimum, because a forward-compatibility library suffices for it. `host` must reach the profile's
    minimum.
    """
    newest = max(host, library or host, key=_release)
    too_old = {
        needed: found
        for found, needed in ((newest, minimum.get("cuda")), (host, minimum.get("profile")))
        if needed and _release(found) < _release(needed)
    }
    for needed in sorted(too_old, key=_release)[-1:]:
        yield f"the driver is {too_old[needed]}, {needed} or newer is needed", f"install driver {needed} or newer"


class _Nvml(nvml_ctypes.Nvml):
    """Adds a query for the models of all GPUs to Nvml."""

    def models(self) -> list[str]:
        """The model of each GPU that this process may use. Raises NvmlRefused."""
        count, found = ctypes.c_uint(), []
        self._ask("nvmlDeviceGetCount_v2", ctypes.byref(count))
        for index in range(count.value):
            gpu, text = nvml_ctypes.Handle(), ctypes.create_string_buffer(96)
            if self._ask("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(gpu)) and self._ask(
                "nvmlDeviceGetName", gpu, text, 96
            ):
                found.append(text.value.decode("ascii", "replace"))
        return found


def _read_gpus() -> tuple[str, list[str]]:
    """The driver's version and the model of each GPU, from NVML. Raises NvmlUnavailable, or NvmlRefused."""
    nvml = _Nvml()
    driver, models = nvml.driver(), nvml.models()
    if nvml.unanswered:
        raise nvml_ctypes.NvmlUnavailable(", ".join(f"{name}: {error}" for name, error in nvml.unanswered.items()))
    if not driver or not _release(driver):
        raise nvml_ctypes.NvmlUnavailable("NVML does not report the driver's version")
    return driver, models


def _release(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]
