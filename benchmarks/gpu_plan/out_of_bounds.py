"""A probe whose Triton kernel writes past the end of its tensor. compute-sanitizer must report this.

The probe runs in the harness like every probe, so it also shows that compute-sanitizer reports errors in forked
processes.
"""

from __future__ import annotations

import torch

from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context

COUNT, BLOCK = 896, 1024


def out_of_bounds(context: Context) -> None:
    """control.out_of_bounds: writes 128 elements past the end of a tensor of 896."""
    from gpu_plan.overrun import overrun

    y = torch.zeros(COUNT, device=context.device)
    context.step("a kernel that writes past its end")
    overrun[(1,)](y, BLOCK)
    torch.cuda.synchronize()


PROBES = (Probe("control.out_of_bounds", "quick", "cuda", 120, out_of_bounds),)
