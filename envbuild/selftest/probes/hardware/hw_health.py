"""hw.health: what the driver knows of a GPU's faults, asked of NVML.

What comes about while a probe runs, this one included, the harness adds to that probe's result (gpu_telemetry.py).
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import ProbeFailure, Skip
from envbuild.selftest.nvidia.gpu_telemetry import DRAIN, Gpus, Window, telemetry_faults
from envbuild.selftest.nvidia.nvml_ctypes import NvmlRefused, NvmlUnavailable

WORK = 4096  # of the products in between
SECONDS = 0.5  # of them, on every GPU at once
MEMORY = ("corrected", "uncorrected", "ever", "pending", "failed")  # what NVML may report of a GPU's memory


def hw_health(context: Context) -> None:
    """hw.health: no uncorrected memory errors, and no memory that waits to be replaced, after products on every GPU.

    Errors since the driver was loaded count; Xid errors of before are in the host's log only. Where torch sees no GPU,
    the driver is asked all the same. A GPU without ECC is judged by what comes about while it works.
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
    """Multiply on each GPU that torch sees; how many there are."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    matrices = [torch.rand((WORK, WORK), device=f"cuda:{index}").to(torch.float16) for index in range(count)]
    end = time.monotonic() + SECONDS
    while matrices and time.monotonic() < end:
        for a in matrices:
            torch.mm(a, a)
        for index in range(count):
            torch.cuda.synchronize(index)
    return count
