"""NVML through ctypes: the few functions that tell a card's health. Signatures as in NVIDIA's nvml.h."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

LIBRARY = "libnvidia-ml.so.1"

# nvmlReturn_t
_NOT_SUPPORTED, _NO_PERMISSION, _TIMEOUT = 3, 4, 10
_CARD_AT_FAULT = (8, 11, 14, 15, 16)  # insufficient power, interrupts, corrupted infoROM, GPU is lost, reset required
_UNCORRECTED = 1  # nvmlMemoryErrorType_t
_VOLATILE, _AGGREGATE = 0, 1  # nvmlEccCounterType_t: since the driver was loaded, and ever
_XID = 8  # nvmlEventTypeXidCriticalError

# nvmlComputeMode_t
COMPUTE_MODES = {0: "DEFAULT", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}

Handle = ctypes.c_void_p
Events = ctypes.c_void_p


class Unavailable(Exception):
    """NVML cannot be used here; the message says why."""


class Refused(Exception):
    """NVML says that the card is at fault, such as that it is lost."""


class Rows(NamedTuple):
    """Of memory rows that went bad: whether a replacement waits for a reset, and whether one failed."""

    pending: bool
    failed: bool


class _Event(ctypes.Structure):
    """nvmlEventData_t; for an Xid, `data` is its number."""

    _fields_ = [
        ("device", ctypes.c_void_p),
        ("kind", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Nvml:
    """NVML, started: raises Unavailable. What a card or a driver does not tell is None; Refused says it is at fault.

    `unanswered`: by function, errors that say nothing of the card; in a container some are ordinary.
    """

    def __init__(self, name: str = LIBRARY) -> None:
        self.unanswered: dict[str, str] = {}
        try:
            self._library = ctypes.CDLL(name)
            code = self._library.nvmlInit_v2()
        except (OSError, AttributeError) as error:
            raise Unavailable(f"{name} cannot be used: {error}") from None
        if code != 0:
            raise Unavailable(f"nvmlInit says {self._text(code)}")

    def driver(self) -> str | None:
        """The driver's version, "550.54.15"."""
        text = ctypes.create_string_buffer(80)
        return text.value.decode("ascii", "replace") if self._ask("nvmlSystemGetDriverVersion", text, 80) else None

    def handle(self, bus_id: str) -> Handle | None:
        """The card at a PCI bus id, as CUDA writes it."""
        found = Handle()
        name = ctypes.c_char_p(bus_id.encode("ascii"))
        return found if self._ask("nvmlDeviceGetHandleByPciBusId_v2", name, ctypes.byref(found)) else None

    def uncorrected(self, card: Handle) -> tuple[int | None, int | None]:
        """How many uncorrected memory errors there were since the driver was loaded, and ever."""
        return self._errors(card, _VOLATILE), self._errors(card, _AGGREGATE)

    def _errors(self, card: Handle, counter: int) -> int | None:
        count = ctypes.c_ulonglong()
        asked = self._ask("nvmlDeviceGetTotalEccErrors", card, _UNCORRECTED, counter, ctypes.byref(count))
        return count.value if asked else None

    def remapping(self, card: Handle) -> Rows | None:
        """From Ampere on."""
        corrected, uncorrected, pending, failed = (ctypes.c_uint() for _ in range(4))
        places = [ctypes.byref(value) for value in (corrected, uncorrected, pending, failed)]
        asked = self._ask("nvmlDeviceGetRemappedRows", card, *places)
        return Rows(bool(pending.value), bool(failed.value)) if asked else None

    def retiring(self, card: Handle) -> bool | None:
        """Before Ampere: whether a page that went bad waits for a reset to be retired."""
        pending = ctypes.c_uint()
        asked = self._ask("nvmlDeviceGetRetiredPagesPendingStatus", card, ctypes.byref(pending))
        return bool(pending.value) if asked else None

    def compute_mode(self, card: Handle) -> str | None:
        """Which processes may use the card: "DEFAULT" is all; else one of COMPUTE_MODES."""
        mode = ctypes.c_int()
        asked = self._ask("nvmlDeviceGetComputeMode", card, ctypes.byref(mode))
        return COMPUTE_MODES.get(mode.value) if asked else None

    def watch(self, cards: Sequence[Handle]) -> Events | None:
        """Have the driver keep these cards' Xid errors from now on; those of before are in the host's log only."""
        events = Events()
        watched = self._ask("nvmlEventSetCreate", ctypes.byref(events)) and all(
            self._ask("nvmlDeviceRegisterEvents", card, ctypes.c_ulonglong(_XID), events) for card in cards
        )
        return events if watched else None

    def xids(self, events: Events) -> list[int]:
        """The numbers of the Xid errors since watch(), a hundred at most."""
        event = _Event()
        found: list[int] = []
        while len(found) < 100 and self._ask("nvmlEventSetWait_v2", events, ctypes.byref(event), 0):
            found.append(int(event.data))
        return found

    def _ask(self, name: str, *arguments: Any) -> bool:
        """Call a function of NVML; False where there is no answer, also where this NVML has no such function."""
        function = getattr(self._library, name, None)
        code = _NOT_SUPPORTED if function is None else int(function(*arguments))
        if code in _CARD_AT_FAULT:
            raise Refused(f"{name}: {self._text(code)}")
        if code not in (0, _NOT_SUPPORTED, _NO_PERMISSION, _TIMEOUT):
            self.unanswered[name] = self._text(code)
        return code == 0

    def _text(self, code: int) -> str:
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        return (self._library.nvmlErrorString(code) or b"").decode("ascii", "replace") or f"error {code}"
