"""Determines which CUDA libraries the loader really uses, and which versions they report.

This module imports torch, reads /proc/self/maps, and calls the version functions of the libraries, which need no GPU.
This must run in a separate process (forked_work.py), because it loads third-party code, which may crash.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Callable

from envbuild.selftest.harness.forked_work import Tell
from envbuild.selftest.inventory import mapped_library_origins
from envbuild.selftest.inventory.cuda_library_finder import library_of_file

# cuDNN loads its sub-libraries when they are first used. Each of these functions checks the version of a sub-library,
# and therefore loads it. They need no GPU.
_CUDNN_PARTS = ("cudnnGraphVersionCheck", "cudnnOpsVersionCheck", "cudnnOpsInferVersionCheck")


def torch(tell: Tell) -> None:
    """Import torch, and report its version, its CUDA version, its architectures, the mapped CUDA libraries and their
    versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("torch")
    tell("path", str(getattr(module, "__file__", None) or ""))
    version = getattr(module, "version", None)
    tell("version", str(getattr(module, "__version__", "")))
    tell("cuda", getattr(version, "cuda", None))
    tell("hip", getattr(version, "hip", None))
    tell("mapped", _copies())
    tell("architectures", _architectures(module))
    tell("reported", reported(_copies()))
    _load_cudnn_parts()
    tell("mapped", _copies())


def _architectures(module: Any) -> str:
    """Return torch's architectures, such as "sm_80 sm_90 compute_90".

    torch.cuda.get_arch_list() is not used, because it returns an empty list without a GPU.
    """
    ask = getattr(getattr(module, "_C", None), "_cuda_getArchFlags", None)
    return str((ask() if ask else None) or "")


def cublas_first(cublas: str, lt: str | None) -> Callable[[Tell], None]:
    """Return a function that loads libcublas, and then libcublasLt by its path `lt`, and reports the mapped libcublasLt
    after each step.

    torch 2.10.0 loads the libraries in this order, and so does a program without torch. When libcublas is loaded, the
    loader searches its libcublasLt first in LD_LIBRARY_PATH, and then in the RUNPATH of libcublas.
    """

    def work(tell: Tell) -> None:
        ctypes.CDLL(cublas)
        tell("alone", [path for path in _copies() if library_of_file(Path(path).name) == "cublasLt"])
        if lt:
            ctypes.CDLL(lt)
        tell("both", [path for path in _copies() if library_of_file(Path(path).name) == "cublasLt"])

    return work


def identify(path: str) -> Callable[[Tell], None]:
    """Return a function that reports the version of one library file.

    For libcublas, the libcublasLt in the same folder is loaded first, because libcublas could otherwise load a
    different one.
    """

    def work(tell: Tell) -> None:
        file = Path(path)
        if library_of_file(file.name) == "cublas":
            for neighbour in sorted(file.parent.glob("libcublasLt*.so*")):
                ctypes.CDLL(str(neighbour))
                break
        tell("reported", reported([path]))

    return work


def _copies() -> list[str]:
    return [path for path in mapped_library_origins.mapped() if library_of_file(Path(path).name)]


def reported(paths: Iterable[str]) -> dict[str, str]:
    """Load the libraries, and return by path the version that each reports.

    Libraries that cannot be loaded, or do not report a version, are left out.
    """
    found: dict[str, str] = {}
    for path in paths:
        ask = ASKED.get(library_of_file(Path(path).name) or "")
        if not ask or not os.path.exists(path):  # noqa: PTH110 - Path.exists raises for a name with a NUL before 3.8
            continue
        try:
            version = ask(ctypes.CDLL(path))
        except (OSError, AttributeError):
            continue
        if version:
            found[path] = version
    return found


def _load_cudnn_parts() -> None:
    for path in _copies():
        if library_of_file(Path(path).name) != "cudnn":
            continue
        library = ctypes.CDLL(path)
        for name in _CUDNN_PARTS:
            check = getattr(library, name, None)
            if check:
                check()


def _property(function: str) -> Callable[[ctypes.CDLL], str]:
    """Return a function that queries the version of a library through `function`, such as cublasGetProperty.

    Properties 0, 1 and 2 are the major version, the minor version and the patch level.
    """

    def ask(library: ctypes.CDLL) -> str:
        parts, value = [], ctypes.c_int(-1)
        for number in range(3):
            if getattr(library, function)(ctypes.c_int(number), ctypes.byref(value)) != 0:
                return ""
            parts.append(str(value.value))
        return ".".join(parts)

    return ask


def _cudnn(library: ctypes.CDLL) -> str:
    """Return cuDNN's version. Its number 8902 is 8.9.2; from cuDNN 9 on, the major version has a larger factor: 91900
    is 9.19.0."""
    library.cudnnGetVersion.restype = ctypes.c_size_t
    number = int(library.cudnnGetVersion())
    weight = 10000 if number >= 90000 else 1000
    return f"{number // weight}.{number % weight // 100}.{number % 100}"


def _nccl(library: ctypes.CDLL) -> str:
    """Return NCCL's version. Its number 22005 is 2.20.5. Until NCCL 2.8, the major version had the factor 1000: 2708 is
    2.7.8."""
    value = ctypes.c_int()
    if library.ncclGetVersion(ctypes.byref(value)) != 0:
        return ""
    number, weight = value.value, 10000 if value.value >= 10000 else 1000
    return f"{number // weight}.{number % weight // 100}.{number % 100}"


def _cudart(library: ctypes.CDLL) -> str:
    value = ctypes.c_int()
    if library.cudaRuntimeGetVersion(ctypes.byref(value)) != 0:
        return ""
    return f"{value.value // 1000}.{value.value % 1000 // 10}"


def _nvjitlink(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_uint(), ctypes.c_uint()
    if library.nvJitLinkVersion(ctypes.byref(major), ctypes.byref(minor)) != 0:
        return ""
    return f"{major.value}.{minor.value}"


ASKED: dict[str, Callable[[ctypes.CDLL], str]] = {
    "cublas": _property("cublasGetProperty"),
    "cublasLt": _property("cublasLtGetProperty"),
    "cudnn": _cudnn,
    "nccl": _nccl,
    "cudart": _cudart,
    "nvJitLink": _nvjitlink,
}
