"""hw.health: the GPU faults that the driver has recorded, read from NVML.

The harness adds faults that occur while any probe runs, including this one, to that probe's result (gpu_telemetry.py).
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import ProbeFailure, Skip
from envbuild.selftest.nvidia.gpu_telemetry import DRAIN, Gpus, Window
from envbuild.selftest.nvidia.gpu_telemetry_verdict import telemetry_faults
from envbuild.selftest.nvidia.nvml_ctypes import NvmlRefused, NvmlUnavailable

WORK = 4096  # rows and columns of the matrices that are multiplied between the two readings
SECONDS = 0.5  # duration of the products, on all GPUs at once
MEMORY = ("corrected", "uncorrected", "ever", "pending", "failed")  # NVML's counts of memory errors


def hw_health(context: Context) -> None:
    """hw.health: no uncorrected memory errors, and no memory that waits to be replaced, after products on every GPU.

    Memory errors since the driver was loaded count. Xid errors from before the probe are not available: they are only
    in the host's log. The driver is queried even if torch sees no GPU. A GPU without ECC is checked only for errors
    that occur during the products.
    """
    try:
        context.step("health before")
        gpus = Gpus()
        before = gpus.numbers()
        context.traits["nvml_unanswered"] = dict(gpus.nvml.unanswered)
        known = [name for numbers in before.values() for name in MEMORY if name in numbers]
        if not known and (gpus.nvml.unanswered or not gpus.has_events):
            raise Skip("NVML reports neither memory errors nor Xid errors of this GPU")
        context.step("products on every GPU")
        context.traits["worked"] = _work()
        context.step("health after")
        after = gpus.numbers()
        context.traits["gpus"] = {
            bus_id: [{name: moment[bus_id].get(name) for name in MEMORY} for moment in (before, after)]
            for bus_id in before
        }
        for bus_id, numbers in after.items():
            for fault in telemetry_faults(replace(Window.at(numbers), first={}), "since the driver was loaded"):
                context.fail("hardware", f"GPU {bus_id}: {fault}")
    except NvmlUnavailable as error:
        raise Skip(str(error)) from None
    except NvmlRefused as error:
        raise ProbeFailure("hardware", f"{error}: {DRAIN}") from None


def _work() -> int:
    """Multiply on each GPU that torch sees; returns the number of GPUs."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    matrices = [torch.rand((WORK, WORK), device=f"cuda:{index}").to(torch.float16) for index in range(count)]
    end = time.monotonic() + SECONDS
    while matrices and time.monotonic() < end:
        for a in matrices:
            torch.mm(a, a)
        for index in range(count):
            torch.cuda.synchronize(index)
    return count
