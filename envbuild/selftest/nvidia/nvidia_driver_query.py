"""Queries the NVIDIA driver without torch: reads the version of its kernel module, and calls libcuda through ctypes.

The signatures of libcuda's functions are those in NVIDIA's cuda.h.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path

from envbuild.selftest.inventory import mapped_library_origins

LIBRARY = "libcuda.so.1"
MODULE = Path("/proc/driver/nvidia/version")

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE

# "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 ..."
# "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build ..."
_MODULE = re.compile(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)(?:\s|$)", re.MULTILINE)
_FILE = re.compile(r"libcuda\.so\.(\d+\.\d+(?:\.\d+)*)")


def kernel_module_version(file: Path = MODULE) -> str | None:
    """Return the kernel module's version, such as "550.54.15".

    The result is None if the module is not loaded, or if `file` is not visible in this container.
    """
    try:
        found = _MODULE.search(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return found.group(1) if found else None


def file_version(path: str) -> str | None:
    """Return the driver release in the file name of a libcuda; None if the name has none.

    For a forward-compatibility library, this is its own release, and not that of the installed driver.
    """
    found = _FILE.fullmatch(Path(path).name)
    return found.group(1) if found else None


class CudaDriver:
    """Calls functions of libcuda, which the constructor loads.

    The constructor raises OSError if libcuda cannot be loaded. A method raises AttributeError if this libcuda does not
    have a function that it calls.
    """

    def __init__(self, name: str = LIBRARY) -> None:
        self._library = ctypes.CDLL(name)
        self.path = next(
            (path for path in mapped_library_origins.mapped() if Path(path).name.startswith("libcuda.so")), name
        )

    def newest_cuda(self) -> tuple[int, int] | None:
        """Return the newest CUDA version that the driver supports, such as (12, 4); None if the driver returns an
        error."""
        value = ctypes.c_int()
        if self._library.cuDriverGetVersion(ctypes.byref(value)) != 0:
            return None
        return value.value // 1000, value.value % 1000 // 10

    def start(self) -> int:
        """Call cuInit and return its CUresult, 0 for success. The driver reads its environment variables in this
        call."""
        return int(self._library.cuInit(0))

    def name_of(self, code: int) -> str:
        """Return the name of a CUresult, such as "CUDA_ERROR_NO_DEVICE" for 100."""
        name = ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        return (name.value or b"an unknown error").decode("ascii", "replace")

    def bus_ids(self) -> Iterator[str]:
        """Yield the PCI bus id of each GPU that this process may use, in CUDA's order. Call start() first."""
        count = ctypes.c_int()
        self._library.cuDeviceGetCount(ctypes.byref(count))
        for ordinal in range(count.value):
            device, text = ctypes.c_int(), ctypes.create_string_buffer(32)
            if self._library.cuDeviceGet(ctypes.byref(device), ordinal) == 0:
                self._library.cuDeviceGetPCIBusId(text, len(text), device)
                yield text.value.decode("ascii", "replace")
