"""The simulated GPUs: names, compute capabilities and memory as in envbuild's facts (a test compares them with the
facts)."""

from __future__ import annotations

from dataclasses import dataclass

GPU = "PRETEND_GPU"  # variable: one of GPUS

# torch's wheels for CUDA 13.0 and 12.6, as torch.cuda.get_arch_list() names what they have code for.
_CUDA_13 = ("13.0", ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"))
_CUDA_12 = ("12.6", ("sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"))


@dataclass(frozen=True)
class Gpu:
    """A simulated GPU. `gigabytes`: of 10^9 bytes, as sold; `sms`: streaming multiprocessors."""

    name: str
    capability: tuple[int, int]
    gigabytes: int
    sms: int

    @property
    def memory(self) -> int:
        """The bytes that a process may use: somewhat less than the nominal size, because of ECC and the driver."""
        return int(0.96 * self.gigabytes * 10**9)

    @property
    def cuda(self) -> str:
        """The CUDA version of a torch that has code for the GPU: 13.0 has none for 7.0."""
        return self._build[0]

    @property
    def architectures(self) -> tuple[str, ...]:
        return self._build[1]

    @property
    def _build(self) -> tuple[str, tuple[str, ...]]:
        return _CUDA_13 if self.capability >= (7, 5) else _CUDA_12


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80, 132),
    "h200": Gpu("NVIDIA H200", (9, 0), 141, 132),
    "a100": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 80, 108),
    "v100": Gpu("Tesla V100-SXM2-16GB", (7, 0), 16, 80),
    "t4": Gpu("Tesla T4", (7, 5), 16, 40),
    "rtx4090": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 24, 128),
    "rtx5090": Gpu("NVIDIA GeForce RTX 5090", (12, 0), 32, 170),
    "b200": Gpu("NVIDIA B200", (10, 0), 180, 148),
}
