"""Reads the driver and the GPUs through NVML (NVIDIA's nvidia-ml-py). A value that a GPU does not report is None."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pynvml

from envbuild.doctor.machine_readings import DriverReading, Ecc, GpuReading, Holder, Mig, clean

MAX_CARDS, MAX_HOLDERS = 64, 50
# Errors that concern only the requested value: it is not supported, not permitted, not found, or unknown to this
# version of NVML.
_ORDINARY = (
    pynvml.NVML_ERROR_NOT_SUPPORTED,
    pynvml.NVML_ERROR_NO_PERMISSION,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
    pynvml.NVML_ERROR_NOT_FOUND,
    pynvml.NVML_ERROR_INVALID_ARGUMENT,
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
)
_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT: "default",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "exclusive thread",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive process",
}
_FABRIC = {
    pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED: "none",
    pynvml.NVML_GPU_FABRIC_STATE_NOT_STARTED: "not started",
    pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS: "in progress",
    pynvml.NVML_GPU_FABRIC_STATE_COMPLETED: "completed",
}


def read(root: Path = Path("/")) -> DriverReading:
    """Reads the driver and the GPUs. Never raises: `fault` is the reason if NVML cannot be used, and `lost` has an
    error for each GPU that does not answer."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return DriverReading(fault=_text(error))
    try:
        return _read(root)
    except pynvml.NVMLError as error:
        return DriverReading(fault=_text(error))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _read(root: Path) -> DriverReading:
    version, number = _ask(pynvml.nvmlSystemGetDriverVersion), _ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
    cards, lost = [], []
    for index in range(min(_ask(pynvml.nvmlDeviceGetCount) or 0, MAX_CARDS)):
        try:
            cards.append(_card(index, root))
        except pynvml.NVMLError as error:
            lost.append(f"GPU {index}: {_text(error)}")
    cuda = f"{number // 1000}.{number % 1000 // 10}" if number else None
    return DriverReading(clean(version) if version else None, cuda, tuple(cards), tuple(lost))


def _card(index: int, root: Path) -> GpuReading:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    capability = _ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    mode = _ask(pynvml.nvmlDeviceGetComputeMode, handle)
    return GpuReading(
        index=index,
        name=clean(_ask(pynvml.nvmlDeviceGetName, handle) or "unknown"),
        uuid=clean(_ask(pynvml.nvmlDeviceGetUUID, handle) or ""),
        bus_id=clean(_ask(_bus_id, handle) or ""),
        compute_capability=".".join(map(str, capability)) if capability else "",
        memory_total=int(memory.total) if memory else None,
        memory_free=int(memory.free) if memory else None,
        mig=_mig(handle),
        ecc=_ecc(handle),
        compute_mode=_MODES.get(mode, f"mode {mode}") if mode is not None else None,
        fabric=_fabric(handle),
        holders=tuple(_holders(handle, root)),
    )


def _bus_id(handle: Any) -> str:
    return str(pynvml.nvmlDeviceGetPciInfo(handle).busId)


def _mig(handle: Any) -> Mig | None:
    modes = _ask(pynvml.nvmlDeviceGetMigMode, handle)
    if modes is None:
        return None
    current, pending = (mode == pynvml.NVML_DEVICE_MIG_ENABLE for mode in modes)
    most = _ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0 if current else 0
    found = [_ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index) for index in range(min(most, MAX_CARDS))]
    return Mig(current, pending, sum(slice_ is not None for slice_ in found))


def _ecc(handle: Any) -> Ecc:
    modes = _ask(pynvml.nvmlDeviceGetEccMode, handle)
    kind, counter = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    uncorrected = _ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, kind, counter)
    rows = _ask(pynvml.nvmlDeviceGetRemappedRows, handle)  # since Ampere; older GPUs retire pages
    _, _, pending, failed = rows or (0, 0, _ask(pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle), 0)
    return Ecc(bool(modes[0]) if modes else None, uncorrected, bool(pending), bool(failed))


def _fabric(handle: Any) -> str | None:
    info = pynvml.c_nvmlGpuFabricInfo_v2_t()
    if _ask(pynvml.nvmlDeviceGetGpuFabricInfoV, handle, ctypes.byref(info)) is None:
        return None
    state = _FABRIC.get(info.state, f"state {info.state}")
    if state == "completed" and info.status != pynvml.NVML_SUCCESS:
        return _text(pynvml.NVMLError(info.status))
    return state


def _holders(handle: Any, root: Path) -> Iterator[Holder]:
    """Yields the processes that compute or draw on a GPU. A process that does both is yielded once, with the memory
    that NVML lists for it among the computing processes."""
    held: dict[int, int | None] = {}
    for function in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _ask(function, handle) or ():
            held.setdefault(process.pid, process.usedGpuMemory)
    for pid, memory in list(held.items())[:MAX_HOLDERS]:
        try:
            name = (root / "proc" / str(pid) / "comm").read_text(encoding="utf-8", errors="replace")
        except OSError:  # the process is in another container, or has ended
            name = ""
        yield Holder(pid, clean(name, 40), memory)


def _ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of NVML. Returns None if the GPU or the driver does not support or does not permit it, or if
    the answer is not text. Raises NVMLError for other errors."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _ORDINARY:
            return None
        raise
    except UnicodeDecodeError:
        return None


def _text(error: Any) -> str:
    return clean(str(error))
