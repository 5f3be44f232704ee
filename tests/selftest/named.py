"""The advisories for which a test shows that `envbuild test` names them, and the failure in that test. All other
advisories with a probe are listed in docs/unproved.md (tests/unit/test_unproved.py). Imports no torch."""

from typing import Any, NamedTuple

# Wrong kernels (seeds, standins.py): the advisories whose signature a seed matches; no other seed matches any.
NAMED: dict[str, list[str]] = {
    "gemm.crash:divides": ["cublas-hopper-fpe"],
    "attention.flash:attention_nan": ["half-attention-nan"],
    "attention.math:overflow": ["half-attention-nan"],
    "gemm.accumulator:half_accumulation": ["fp16-reduced-precision-reduction"],
    "gemm.accumulator:ones": ["fp16-reduced-precision-reduction"],
    "gemm.accuracy:half_accumulation": ["fp16-reduced-precision-reduction"],
    "tf32.mode:tf32": ["tf32-default"],
    "tf32.mode:conv": ["tf32-default"],
    "attention.cudnn:masked": ["cudnn-sdpa-bwd-nan-hopper"],
    "attention.cudnn:one_query": ["cudnn-sdpa-bwd-9.26"],
    "attention.cudnn:exploding": ["cudnn-sdpa-2.5.0"],
    "attention.cudnn:no_plan": ["cudnn-sdpa-b300-noplan"],
    "conv:without_library": ["volta-dropped"],
    "conv:sublibrary": ["cudnn-sublibrary-mismatch"],
    "compile.triton:ptxas": ["triton-ptxas-unknown-arch"],
    "compile.triton:bf16": ["bf16-pre-ampere"],
    "init.alloc:no_handle": ["cublas-not-initialized"],
    "init.alloc:crowded": ["cublas-not-initialized"],
    "norm.apex:refuses": ["apex-t5-mixed-dtype"],
}

# GPUs simulated by the CPU (hardware.py): env.arch.
ARCH: dict[str, list[str]] = {
    "blackwell": ["no-kernel-image-blackwell"],
    "volta": ["volta-dropped"],
    "ptx": ["no-kernel-image-blackwell"],
}
# Drivers simulated by stubs (hardware.py): env.driver.
DRIVER: dict[str, list[str]] = {
    "compat": ["driver-too-old-cu13"],
    "unready": ["error-802-fabricmanager"],
    "geforce": ["error-804-forward-compat"],
}


class World(NamedTuple):
    """A failure of NCCL between two GPUs: NCCL's version, the kind of failure, the step of dist.staged that fails, the
    environment variable that avoids it, the compute capabilities of the GPUs, and their common name."""

    nccl: str
    failure: str
    step: str
    workaround: str | None = None
    capabilities: tuple[str, str] = ("9.0", "9.0")
    card: str = "NVIDIA H100 80GB HBM3"


# Worlds with simulated ranks, judged by the real dist.staged; NCCL itself has never run.
WORLDS: dict[str, World] = {
    "nccl-2.18.1": World("2.18.1", "mismatch", "all_reduce fp32 1001"),
    "nccl-unequal-cards": World("2.20.5", "hang", "all_reduce fp32 1001", capabilities=("8.0", "9.0")),
    "nccl-bf16-misaligned-h100": World("2.21.5", "exception", "all_reduce bf16 1001", "NCCL_NVLS_ENABLE=0"),
    "nccl-abort-hang": World("2.21.5", "hang", "leave"),
    "nccl-2.27-fp8-symmetric": World("2.27.3", "exception", "init"),
    "nccl-2.28.3-2.29.2": World("2.29.2", "hang", "all_reduce fp32 1001"),
    "nccl-4090-p2p": World("2.26.5", "hang", "init", "NCCL_P2P_DISABLE=1", ("8.9", "8.9"), "NVIDIA GeForce RTX 4090"),
}

# Results as a probe reports them, for failures that a CPU cannot simulate.
RECORDED: dict[str, dict[str, Any]] = {
    "conv3d-bf16": {
        "probe": "conv",
        "failure": "bound",
        "at": "bf16 conv3d 1x32x5x18x20 filters 48x32x3x3x3 integer",
        "traits": {"torch": "2.8.0+cu128", "cudnn": 91002},
    },
}

# Reported by the audit (tests/unit/audit/test_environment_audit.py); env.libs names the misplaced library.
CUBLASLT_SHADOW, NVJITLINK_SHADOW = "cublaslt-shadow-runpath", "nvjitlink-shadow"

SHOWN: frozenset[str] = frozenset(
    [name for names in (*NAMED.values(), *ARCH.values(), *DRIVER.values()) for name in names]
    + [*WORLDS, *RECORDED, CUBLASLT_SHADOW, NVJITLINK_SHADOW]
)
