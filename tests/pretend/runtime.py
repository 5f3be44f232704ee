"""torch.cuda, autocast and cuDNN's version on the simulated GPU; `install` replaces torch's."""

from __future__ import annotations

import contextlib
import os
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # a dispatch mode imports it at its first call: once here, instead of in every forked process
import torch.nn.functional as F

from . import graphs, jit, nccl, sdpa, tensors
from .gpus import Gpu
from .tensors import Pretended

CUDNN = 91900
UUID = "11111111-2222-3333-4444-555555555555"
OLD_AUTOCAST = "PRETEND_OLD_AUTOCAST"  # variable: autocast refuses bfloat16 below 8.0, as torch did before 2.4
FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_permuted", "empty_strided", "eye", "full",
    "full_like", "linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm", "scalar_tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
# Functions that are computed on the host: see tensors.on_host.
ON_HOST: tuple[tuple[Any, str], ...] = (
    (torch.linalg, "pinv"), (torch.linalg, "matrix_rank"),
    (torch, "prod"), (torch, "cumprod"), (torch, "cummax"), (torch, "cummin"),
)  # fmt: skip
_Autocast = torch.autocast


class Autocast(_Autocast):
    """Replaces autocast("cuda") by the host's autocast, which has the same casts for products and norms."""

    def __init__(
        self, device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, **options: Any
    ) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
            old = OLD_AUTOCAST in os.environ and tensors.here.gpu.capability < (8, 0)
            if enabled and old and dtype == torch.bfloat16:
                raise RuntimeError("Current CUDA Device does not support bfloat16. Please switch dtype to float16.")
        super().__init__(device_type, dtype=dtype, enabled=enabled, **options)


class Event:
    """An event. Work is complete when its call returns, so an event is a time on the host's clock."""

    def __init__(self, **_: Any) -> None:
        self._at = 0.0

    def record(self, *_: Any) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other._at - self._at)

    def synchronize(self) -> None:
        pass


class Stream:
    """A stream. Work is complete when its call returns, so all streams are equal."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    wait_stream = record_event = wait_event = __exit__


def _no_grad(mode: bool = True) -> Any:
    """Replaces inference_mode."""
    return torch.no_grad() if mode else contextlib.nullcontext()


_HOST_UPDATE = torch._amp_update_scale_


@tensors.simulated
def _update_scale(scale: Any, tracker: Any, found_inf: Any, *factors: Any) -> Any:
    """GradScaler's update of its scale. Its operation changes two tensors, which the dispatcher cannot return."""
    _HOST_UPDATE(*(getattr(one, "held", one) for one in (scale, tracker, found_inf)), *factors)
    return scale


def install(gpu: Gpu) -> None:
    """Simulate this GPU in this process, and in all processes forked from it."""
    here = tensors.here = Pretended(gpu)
    memory = here.memory
    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.sms,
        total_memory=memory.size,
        uuid=UUID,
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_name": lambda device=None: gpu.name,
        "get_device_properties": lambda device=None: properties,
        "get_arch_list": lambda: list(gpu.architectures),
        "mem_get_info": lambda device=None: (memory.free, memory.size),
        "memory_allocated": lambda device=None: memory.used,
        "max_memory_allocated": lambda device=None: memory.peak,
        "reset_peak_memory_stats": lambda device=None: memory.reset_peak(),
        "is_bf16_supported": lambda including_emulation=True: including_emulation or gpu.capability >= (8, 0),
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "Stream": Stream,
        "stream": contextlib.nullcontext,
        "Event": Event,
        "CUDAGraph": graphs.Graph,
        "graph": graphs.capture,
    }
    starting = ("_lazy_init", "init", "set_device", "synchronize", "empty_cache")
    for name, answer in {**answers, **dict.fromkeys(starting, lambda *_, **__: memory.start())}.items():
        setattr(torch.cuda, name, answer)
    torch.version.cuda = gpu.cuda
    torch.backends.cudnn.version = lambda: CUDNN  # type: ignore[assignment]
    torch.autocast = Autocast  # type: ignore[misc]
    torch._fused_sdp_choice = sdpa.choice  # type: ignore[assignment]
    F.scaled_dot_product_attention = sdpa.attention
    for name in FACTORIES:
        setattr(torch, name, tensors.factory(getattr(torch, name)))
    for owner, name in ON_HOST:
        setattr(owner, name, tensors.on_host(getattr(owner, name)))
    torch.tensor = tensors.tensor  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor.clone()  # type: ignore[assignment]
    torch.inference_mode = _no_grad  # type: ignore[misc,assignment]  # a GpuTensor has no views in it
    torch._amp_update_scale_ = _update_scale  # type: ignore[assignment]
    torch.Tensor.to = tensors.to  # type: ignore[assignment]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensors.to(tensor, tensors.DEVICE)  # type: ignore[assignment]
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    nccl.install()
    jit.install()
