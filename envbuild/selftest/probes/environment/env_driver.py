"""env.driver: the driver supports this CUDA version. The check does not use torch, which would only report a missing
GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import ProbeFailure, Skip
from envbuild.selftest.nvidia import nvidia_driver_query, nvml_ctypes
from envbuild.selftest.nvidia.nvidia_driver_query import CudaDriver

Release = tuple[int, ...]


@dataclass(frozen=True)
class DriverVersions:
    """Versions of the driver: of its kernel module, of its libcuda, and the newest CUDA version that this libcuda
    supports.

    The versions of the kernel module and of libcuda differ if forward-compatibility libraries precede the driver's own.
    """

    module: str | None
    library: str | None
    newest_cuda: tuple[int, int] | None


def env_driver(context: Context) -> None:
    """env.driver: the driver exists, starts, and is new enough for this CUDA and the profile."""
    context.step("libcuda and the kernel module")
    module = nvidia_driver_query.kernel_module_version() or _version_from_nvml()
    try:
        found = CudaDriver()
    except OSError as error:
        if module is None:
            raise Skip(f"no NVIDIA driver found: {error}") from None
        raise ProbeFailure(
            "mismatch",
            f"the host has driver {module}, but its {nvidia_driver_query.LIBRARY} cannot be loaded here ({error}): "
            "start the container with its GPUs, and with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ) from None
    versions = DriverVersions(module, nvidia_driver_query.file_version(found.path), found.newest_cuda())
    newest = ".".join(map(str, versions.newest_cuda)) if versions.newest_cuda else None
    context.traits.update(module=module, libcuda=found.path, newest_cuda=newest, cuda=torch.version.cuda)
    for fault in driver_faults(versions, torch.version.cuda, context.job.driver):
        context.fail("version", fault)
    context.step("cuInit")
    code = found.start()
    context.traits["cuInit"] = code
    if code == nvidia_driver_query.NO_DEVICE and not context.faults:
        raise Skip("the driver reports no GPU to this process: was the container started with one?")
    if code:
        context.fail("exception", f"cuInit: error {code}, {found.name_of(code)}")


def driver_faults(found: DriverVersions, cuda: str | None, minimum: Mapping[str, str]) -> Iterator[str]:
    """Yield a fault if the driver is too old for torch's CUDA version (`cuda`, such as "12.1") or for a minimum in the
    job document (`minimum`).

    Forward-compatibility libraries also satisfy CUDA's minimum; the profile's minimum applies to the host.
    """
    least, declared = minimum.get("cuda"), minimum.get("profile")
    newest = max(filter(None, (found.module, found.library)), key=release, default=None)
    if cuda and least and newest and release(newest) < release(least):
        yield (
            f"driver {newest} is older than {least}, which CUDA {cuda} needs: upgrade the driver, or put CUDA's "
            "forward-compatibility libraries into the image (datacentre GPUs only)"
        )
    if declared and found.module and release(found.module) < release(declared):
        yield f"driver {found.module} is older than {declared}, which the profile declares: upgrade the driver"
    if cuda and found.newest_cuda and found.newest_cuda[0] < release(cuda)[0]:
        major, minor = found.newest_cuda
        yield f"libcuda supports CUDA {major}.{minor} at most, but torch is built for {cuda}: upgrade the driver"


def release(text: str) -> Release:
    """Parse a version of numbers and dots for comparison."""
    return tuple(int(part) for part in text.split("."))


def _version_from_nvml() -> str | None:
    with contextlib.suppress(nvml_ctypes.NvmlUnavailable, nvml_ctypes.NvmlRefused):
        return nvml_ctypes.Nvml().driver()
    return None
