"""Compares an environment with a profile's lock in under two seconds, without importing torch.

`envbuild export check` puts the source of this module into its script, next to the self-test, whose ELF reader it uses.
It needs Python 3.9. It compares versions, the library files in each RECORD, the copies that the loader would take
instead, the driver and the GPU model. It computes nothing.
"""

from __future__ import annotations

import csv
import ctypes
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TypedDict

from envbuild.selftest.inventory import elf_reader
from envbuild.selftest.nvidia import libcuda

_FAILED = 5
_MOST_LINES = 12
_TORCH_LIBRARY = "torch/lib/libtorch_cuda.so"
_RANKS = ("RANK", "SLURM_PROCID")

Fault = tuple[str, str]
"""What is wrong, and its remedy."""


class ExpectedEnvironment(TypedDict, total=False):
    """What the lock and the profile expect, as in a job document."""

    distributions: Mapping[str, str]
    python: str
    gpus: Sequence[str]
    driver: Mapping[str, str]


class CheckJob(TypedDict):
    """The part of a job document that is used here."""

    device: str
    expect: ExpectedEnvironment


class CheckDocument(TypedDict):
    """The part of an exported check's document that is used here."""

    profile: str
    job: CheckJob


def check_startup(document: CheckDocument) -> tuple[int, str]:
    """The exit status, and the text: 0 and one line, or 5 and the faults with their remedies."""
    begin = time.monotonic()
    rank = next((os.environ[name] for name in _RANKS if os.environ.get(name, "").isdecimal()), None)
    place = "" if rank is None else f", rank {rank} on {socket.gethostname()}"
    who = f"envbuild check: {document['profile']}{place}"
    job = document["job"]
    expect = job["expect"]
    found: dict[str, metadata.Distribution] = {}
    for item in metadata.distributions():
        if item.metadata["Name"]:
            found.setdefault(_normalised(item.metadata["Name"]), item)
    locked = {_normalised(name): version for name, version in expect["distributions"].items()}
    libraries = {path: real for name in locked if name in found for path, real in _libraries(found[name])}
    faults = [
        *version_faults(locked, {name: item.version for name, item in found.items()}, expect.get("python")),
        *loader_faults(libraries, os.environ),
    ]
    if job["device"] == "cuda":
        faults += gpu_faults(expect.get("gpus") or (), expect.get("driver") or {})
    if faults:
        return _FAILED, "\n".join([f"{who}: not as it should be", *report_lines(faults), ""])
    counts = f"{len(locked)} versions, {len(libraries)} libraries"
    return 0, f"{who}: {counts} as locked, no probes, {time.monotonic() - begin:.1f} s\n"


def report_lines(faults: list[Fault]) -> Iterator[str]:
    """The faults, and each remedy once."""
    for number, (fault, _) in enumerate(faults):
        if number == _MOST_LINES:
            yield f"  and {len(faults) - _MOST_LINES} more"
            break
        yield f"  {fault}"
    for remedy in dict.fromkeys(remedy for _, remedy in faults):
        yield f"  remedy: {remedy}"


def version_faults(locked: Mapping[str, str], installed: Mapping[str, str], python: str | None) -> Iterator[Fault]:
    """Versions that differ from the locked ones; the remedy installs all of them."""
    own = platform.python_version()
    if python and not f"{own}.".startswith(f"{python}."):
        yield f"Python is {own}, locked is {python}", f"start it with Python {python}"
    differing = [name for name in sorted(locked) if installed.get(name) != locked[name]]
    remedy = f"{sys.executable} -m pip install --no-deps {' '.join(f'{name}=={locked[name]}' for name in differing)}"
    for name in differing:
        yield f"{name} is {installed.get(name, 'absent')}, locked is {locked[name]}", remedy


def loader_faults(libraries: Mapping[str, str], variables: Mapping[str, str]) -> Iterator[Fault]:
    """Missing library files, and copies that LD_PRELOAD or LD_LIBRARY_PATH bring in their place. `libraries`: the real
    path by the path in RECORD."""
    owned = {Path(path).name: real for path, real in libraries.items()}
    for path, real in libraries.items():
        if not Path(real).is_file():
            yield f"{path} is missing", "install again: pip install --force-reinstall --no-deps, for what contains it"
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
        folder = next((folder for folder in folders if (folder / name).is_file()), None)
        if folder and name in owned and os.path.realpath(folder / name) != owned[name]:
            yield (
                f"LD_LIBRARY_PATH loads {folder / name} instead of {owned[name]}",
                (f"remove {folder} from LD_LIBRARY_PATH"),
            )


def gpu_faults(models: Sequence[str], drivers: Mapping[str, str]) -> Iterator[Fault]:
    """An unusable or too old driver, or no GPU of these models. With several models in a machine, one suffices."""
    try:
        driver, names = _read_gpus()
        library = libcuda.file_version(libcuda.CudaDriver().path)
    except (OSError, AttributeError) as error:
        yield f"no usable GPU: {error}", "check that nvidia-smi works, and that the GPUs are visible here"
        return
    yield from driver_faults(driver, library, drivers)
    if models and not set(names) & set(models):
        yield f"the GPU is {', '.join(sorted(set(names))) or 'missing'}", f"run on one of: {', '.join(models)}"


def driver_faults(host: str, library: str | None, minimum: Mapping[str, str]) -> Iterator[Fault]:
    """A driver that is older than CUDA's or the profile's minimum, as in the probe env.driver.

    The newer of `host` and `library` (the release of the libcuda that the loader takes) must reach CUDA's minimum,
    because forward-compatibility libraries also satisfy it. The profile's minimum applies to the host.
    """
    newest = max(host, library or host, key=_release)
    too_old = {
        needed: found
        for found, needed in ((newest, minimum.get("cuda")), (host, minimum.get("profile")))
        if needed and _release(found) < _release(needed)
    }
    for needed in sorted(too_old, key=_release)[-1:]:
        yield f"the driver is {too_old[needed]}, {needed} or newer is needed", f"install driver {needed} or newer"


def _read_gpus() -> tuple[str, list[str]]:
    """The driver's version and the model of each GPU, from NVML. Raises OSError or AttributeError if it is unusable."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    code = library.nvmlInit_v2()
    if code:
        raise OSError(f"nvmlInit fails with error {code}")
    text, count = ctypes.create_string_buffer(96), ctypes.c_uint()
    library.nvmlSystemGetDriverVersion(text, 96)
    driver = text.value.decode("ascii", "replace")
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    names = []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
            library.nvmlDeviceGetName(handle, text, 96)
            names.append(text.value.decode("ascii", "replace"))
    return driver, names


def _libraries(distribution: metadata.Distribution) -> Iterator[tuple[str, str]]:
    """(path in RECORD, real path) of each shared library of a distribution."""
    lines = (distribution.read_text("RECORD") or "").splitlines()
    for row in csv.reader(line for line in lines if ".so" in line):
        if row and ".so" in Path(row[0]).name:
            yield row[0], os.path.realpath(str(distribution.locate_file(row[0])))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _release(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]
