"""Replaces NCCL by gloo, which gets the host tensors that hold the values of the GPU's tensors, and
DistributedDataParallel by a module that averages each gradient."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from envbuild.selftest.distributed import rank_program

from .tensors import GpuTensor

_LOG = "vm:1:1 [0] NCCL INFO NCCL version 2.28.9+cuda13.0\n"  # as NCCL_DEBUG=INFO begins
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "reduce_scatter", "all_to_all"),
    *("send", "recv"),
)


def _held(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_held(item) for item in value]
    return value.held if isinstance(value, GpuTensor) else value


class Parallel(torch.nn.Module):
    """Replaces DistributedDataParallel: all ranks begin with rank 0's weights, and each gradient becomes the mean over
    all ranks."""

    def __init__(self, module: torch.nn.Module, device_ids: list[int] | None = None) -> None:
        super().__init__()
        self.module = module
        for weight in module.parameters():
            dist.broadcast(weight.detach(), 0)
            weight.register_post_accumulate_grad_hook(self._average)

    @staticmethod
    def _average(weight: torch.Tensor) -> None:
        assert weight.grad is not None
        weight.grad.mul_(1 / dist.get_world_size())
        dist.all_reduce(weight.grad)

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


def install() -> None:
    if not dist.is_available():
        return
    start, barrier = dist.init_process_group, dist.barrier

    def init_process_group(backend: str, **options: Any) -> None:
        log = os.environ.get("NCCL_DEBUG_FILE")
        if backend == "nccl" and log:
            Path(log).write_text(_LOG, encoding="utf-8")
        start("gloo", **options)

    for name in _COLLECTIVES:
        real = getattr(dist, name)
        setattr(dist, name, lambda *args, _real=real, **options: _real(*map(_held, args), **options))
    dist.init_process_group = init_process_group
    dist.barrier = lambda **_: barrier()  # type: ignore[assignment]
    distributed: Any = rank_program
    plain = rank_program.DistributedDataParallel
    distributed.DistributedDataParallel = lambda module, device_ids=None, **options: (
        Parallel(module, device_ids) if device_ids else plain(module, **options)
    )
