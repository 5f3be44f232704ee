"""Calls NVML through ctypes, only the functions that report the health of GPUs.

Signatures and constants are those in NVIDIA's nvml.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

LIBRARY = "libnvidia-ml.so.1"

# nvmlReturn_t
_NOT_SUPPORTED, _NO_PERMISSION, _TIMEOUT = 3, 4, 10
_GPU_AT_FAULT = (8, 11, 14, 15, 16)  # insufficient power, interrupt issue, corrupted infoROM, GPU lost, reset required
_CORRECTED, _UNCORRECTED = 0, 1  # nvmlMemoryErrorType_t
_VOLATILE, _AGGREGATE = 0, 1  # nvmlEccCounterType_t: counts since the driver was loaded; lifetime counts
_XID = 8  # nvmlEventTypeXidCriticalError

# Each row is one measurement: its name, the NVML function, the C type of the output, and the arguments that the
# function takes between the GPU and the output pointer.
_UINT, _ULONGLONG = ctypes.c_uint, ctypes.c_ulonglong
_NUMBERS: tuple[tuple[str, str, Any, tuple[int, ...]], ...] = (
    ("corrected", "nvmlDeviceGetTotalEccErrors", _ULONGLONG, (_CORRECTED, _VOLATILE)),
    ("uncorrected", "nvmlDeviceGetTotalEccErrors", _ULONGLONG, (_UNCORRECTED, _VOLATILE)),
    ("ever", "nvmlDeviceGetTotalEccErrors", _ULONGLONG, (_UNCORRECTED, _AGGREGATE)),
    ("pcie_replays", "nvmlDeviceGetPcieReplayCounter", _UINT, ()),
    ("pcie_generation", "nvmlDeviceGetCurrPcieLinkGeneration", _UINT, ()),
    ("pcie_generation_most", "nvmlDeviceGetMaxPcieLinkGeneration", _UINT, ()),
    ("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth", _UINT, ()),
    ("pcie_width_most", "nvmlDeviceGetMaxPcieLinkWidth", _UINT, ()),
    ("celsius", "nvmlDeviceGetTemperature", _UINT, (0,)),  # NVML_TEMPERATURE_GPU
    ("milliwatts", "nvmlDeviceGetPowerUsage", _UINT, ()),
    ("sm_mhz", "nvmlDeviceGetClockInfo", _UINT, (1,)),  # NVML_CLOCK_SM
    ("memory_mhz", "nvmlDeviceGetClockInfo", _UINT, (2,)),  # NVML_CLOCK_MEM
    ("compute_mode", "nvmlDeviceGetComputeMode", _UINT, ()),
)
# Numbers of the fields NVML_FI_DEV_NVLINK_*_ERROR_COUNT_TOTAL, which count the errors of all NVLink links of a GPU.
NVLINK = {"nvlink_crc_flits": 38, "nvlink_crc_data": 45, "nvlink_replays": 52, "nvlink_recoveries": 59}
# Bits of nvmlClocksEventReasons: the reasons why the clocks are below their maximum.
CLOCK_LIMITS = {
    "idle": 1 << 0,
    "set clocks": 1 << 1,
    "power cap": 1 << 2,
    "hardware slowdown": 1 << 3,
    "sync boost": 1 << 4,
    "software thermal slowdown": 1 << 5,
    "hardware thermal slowdown": 1 << 6,
    "power brake": 1 << 7,
    "display": 1 << 8,
}

# nvmlComputeMode_t
COMPUTE_MODES = {0: "DEFAULT", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}

Handle = ctypes.c_void_p
Events = ctypes.c_void_p


class NvmlUnavailable(Exception):
    """NVML cannot be used on this machine; the message is the reason."""


class NvmlRefused(Exception):
    """An NVML call failed because a GPU is faulty, for example lost."""


class Field(ctypes.Structure):
    """The structure nvmlFieldValue_t. If NVML writes a 32-bit value to `value`, the upper half stays zero."""

    _fields_ = [
        ("number", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("kind", ctypes.c_uint),
        ("code", ctypes.c_uint),
        ("value", ctypes.c_ulonglong),
    ]


class _Event(ctypes.Structure):
    """The structure nvmlEventData_t. For an Xid error, `data` is the number of the error."""

    _fields_ = [
        ("device", ctypes.c_void_p),
        ("kind", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Nvml:
    """Initialises NVML and calls its functions.

    The constructor raises NvmlUnavailable if NVML cannot be used. The methods raise NvmlRefused if NVML reports a
    faulty GPU, and return None for unavailable values or leave them out. `unanswered`: unexpected errors that do not
    mean a faulty GPU, by the name of the NVML function. Some of them are normal in a container.
    """

    def __init__(self, name: str = LIBRARY) -> None:
        self.unanswered: dict[str, str] = {}
        try:
            self._library = ctypes.CDLL(name)
            code = self._library.nvmlInit_v2()
        except (OSError, AttributeError) as error:
            raise NvmlUnavailable(f"{name} cannot be used: {error}") from None
        if code != 0:
            raise NvmlUnavailable(f"nvmlInit failed: {self._text(code)}")

    def driver(self) -> str | None:
        """Return the version of the driver, such as "550.54.15"."""
        text = ctypes.create_string_buffer(80)
        return text.value.decode("ascii", "replace") if self._ask("nvmlSystemGetDriverVersion", text, 80) else None

    def handle(self, bus_id: str) -> Handle | None:
        """Return NVML's handle of the GPU with this PCI bus id, which is in CUDA's format."""
        found = Handle()
        name = ctypes.c_char_p(bus_id.encode("ascii"))
        return found if self._ask("nvmlDeviceGetHandleByPciBusId_v2", name, ctypes.byref(found)) else None

    def numbers(self, gpu: Handle) -> dict[str, int]:
        """Return the current measurements of the GPU by name. Unavailable measurements are left out.

        - Counts since the driver was loaded: "corrected" and "uncorrected" memory errors, "pcie_replays", and the keys
          of NVLINK.
        - Counts since the GPU was produced: uncorrected memory errors ("ever"), and memory rows that were replaced
          ("remapped").
        - 0 or 1: "pending" (faulty memory is waiting to be replaced), "failed" (faulty memory could not be replaced),
        and
          "limited: NAME" for each name in CLOCK_LIMITS.
        - "compute_mode": a key of COMPUTE_MODES.
        - The names of all other measurements contain their unit.
        """
        found = {}
        for name, function, kind, arguments in _NUMBERS:
            value = kind()
            if self._ask(function, gpu, *arguments, ctypes.byref(value)):
                found[name] = int(value.value)
        parts = (self._replacements, self._nvlink, self._clock_limits, self._memory)
        return {**found, **{name: value for part in parts for name, value in part(gpu).items()}}

    def _replacements(self, gpu: Handle) -> dict[str, int]:
        """Return the measurements about replaced memory: memory rows since Ampere, memory pages on older GPUs."""
        corrected, uncorrected, pending, failed = rows = [ctypes.c_uint() for _ in range(4)]
        if self._ask("nvmlDeviceGetRemappedRows", gpu, *map(ctypes.byref, rows)):
            remapped = corrected.value + uncorrected.value
            return {"remapped": remapped, "pending": pending.value, "failed": failed.value}
        asked = self._ask("nvmlDeviceGetRetiredPagesPendingStatus", gpu, ctypes.byref(pending))
        return {"pending": pending.value} if asked else {}

    def _nvlink(self, gpu: Handle) -> dict[str, int]:
        fields = (Field * len(NVLINK))(*(Field(number=number) for number in NVLINK.values()))
        if not self._ask("nvmlDeviceGetFieldValues", gpu, len(fields), fields):
            return {}
        return {name: int(field.value) for name, field in zip(NVLINK, fields) if field.code == 0}

    def _clock_limits(self, gpu: Handle) -> dict[str, int]:
        mask = ctypes.c_ulonglong()
        if not self._ask("nvmlDeviceGetCurrentClocksThrottleReasons", gpu, ctypes.byref(mask)):
            return {}
        return {f"limited: {name}": int(bool(mask.value & bit)) for name, bit in CLOCK_LIMITS.items()}

    def _memory(self, gpu: Handle) -> dict[str, int]:
        sizes = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used
        return {"free_mib": int(sizes[1]) >> 20} if self._ask("nvmlDeviceGetMemoryInfo", gpu, sizes) else {}

    def watch(self, gpus: Sequence[Handle]) -> Events | None:
        """Subscribe to future Xid errors of these GPUs. Earlier errors are only in the host's log.

        The result is None if NVML does not allow that.
        """
        events = Events()
        watched = self._ask("nvmlEventSetCreate", ctypes.byref(events)) and all(
            self._ask("nvmlDeviceRegisterEvents", gpu, ctypes.c_ulonglong(_XID), events) for gpu in gpus
        )
        return events if watched else None

    def xids(self, events: Events) -> list[tuple[int | None, int]]:
        """Return the Xid errors since watch() or the last call as (GPU handle as a number, error number), at most
        100."""
        event = _Event()
        found: list[tuple[int | None, int]] = []
        while len(found) < 100 and self._ask("nvmlEventSetWait_v2", events, ctypes.byref(event), 0):
            found.append((event.device, int(event.data)))
        return found

    def _ask(self, name: str, *arguments: Any) -> bool:
        """Call an NVML function and return whether it succeeded. Raises NvmlRefused if it reports a faulty GPU.

        The result is False if the function fails, or if this NVML does not have it.
        """
        function = getattr(self._library, name, None)
        code = _NOT_SUPPORTED if function is None else int(function(*arguments))
        if code in _GPU_AT_FAULT:
            raise NvmlRefused(f"{name}: {self._text(code)}")
        if code not in (0, _NOT_SUPPORTED, _NO_PERMISSION, _TIMEOUT):
            self.unanswered[name] = self._text(code)
        return code == 0

    def _text(self, code: int) -> str:
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        return (self._library.nvmlErrorString(code) or b"").decode("ascii", "replace") or f"error {code}"
