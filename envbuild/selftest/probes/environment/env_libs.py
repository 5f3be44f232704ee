"""env.libs: when torch is called, the libraries that are loaded into the process are those of the locked
distributions."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.inventory import distribution_records, mapped_library_origins
from envbuild.selftest.inventory.mapped_library_origins import Inventory


def env_libs(context: Context) -> None:
    """env.libs: versions are as locked, and each library has one copy, identical to its distribution's RECORD.

    The loaded libraries are also reported before the first torch call, because that call may kill the process.
    """
    context.step("libraries mapped by the import")
    before = mapped_library_origins.mapped()
    first = mapped_library_origins.take_inventory(before)
    context.send_environment(_document(first))
    _exercise(context)
    context.step("libraries mapped after real calls")
    after = mapped_library_origins.mapped()
    taken = mapped_library_origins.more(first, after)
    context.send_environment(_document(taken))
    context.traits["mapped_by_calls"] = [path for path in after if path not in before]
    for fault in version_mismatches(context.job, taken.distributions):
        context.fail("version", fault)
    for fault in mapped_library_origins.library_faults(taken):
        context.fail("mismatch", fault)


def _exercise(context: Context) -> None:
    """Run calls that load libraries on first use: cuBLAS, cuBLASLt (a half-precision bias), cuDNN (a convolution)."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones((64, 64), dtype=dtype, device=context.device)
        with context.step(f"matmul {dtype} 64x64x64"):
            torch.mm(x, x)
        with context.step(f"linear {dtype} 64x64x64 bias"):
            F.linear(x, x, x[0])
    image = torch.ones((1, 8, 16, 16), device=context.device)
    with context.step("conv2d 8x8x3x3"):
        F.conv2d(image, torch.ones((8, 8, 3, 3), device=context.device))


def version_mismatches(job: JobDocument, distributions: Mapping[str, str]) -> list[str]:
    """Return a sentence for each version that differs from the locked one. This needs no device. `distributions`: the
    installed distributions and their versions."""
    wrong = []
    python = platform.python_version()
    if job.python and not (python + ".").startswith(job.python + "."):
        wrong.append(f"Python is {python}, but {job.python} is locked")
    for name, version in sorted(job.distributions.items()):
        installed = distributions.get(distribution_records.normalise(name))
        if installed != version:
            wrong.append("{} is {}, but {} is locked".format(name, installed or "absent", version))
    recorded, imported = distributions.get("torch"), str(torch.__version__)
    # The metadata of PyPI's CUDA wheels says 2.3.1, while torch.__version__ says 2.3.1+cu121.
    if recorded and imported != recorded and imported.partition("+")[0] != recorded:
        wrong.append(f"`torch.__version__` is {imported}, but the installed distribution is {recorded}")
    return wrong


def _document(taken: Inventory) -> dict[str, Any]:
    return {
        "libraries": [item.document() for item in taken.libraries if not item.is_pythons_own],
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "distributions": dict(taken.distributions),
    }
