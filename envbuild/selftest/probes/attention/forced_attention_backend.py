"""Select one of torch's attention backends, and recognise torch's errors about an unsupported backend."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from envbuild.selftest.harness.probe_context import is_unsupported
from envbuild.selftest.harness.probe_outcome_and_figures import Skip

_FLAGS = {"math": "enable_math", "flash": "enable_flash", "efficient": "enable_mem_efficient"}  # used before torch 2.3
_BACKENDS = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
# On Hopper and Blackwell torch prefers cuDNN's attention unless this variable is 1 (found in libtorch_cuda of torch
# 2.11.0).
DEPRIORITIZED = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
# Parts of torch's messages. "to have the same dtype": in torch 2.0, autocast on the CPU ignores attention.
# "enable_gqa": torch before 2.5 lacks this argument.
_NO_KERNEL = (
    "No available kernel",
    "No viable backend",
    "No execution plans",
    "to have the same dtype",
    "unexpected keyword argument 'enable_gqa'",
)


@contextlib.contextmanager
def only(backend: str) -> Iterator[None]:
    """Allow only this backend. Raises Skip if this torch version has no such backend, or cannot select it."""
    attention = getattr(torch.nn, "attention", None)
    if attention is not None:
        member = getattr(attention.SDPBackend, _BACKENDS[backend], None)
        if member is None:
            raise Skip(f"torch {torch.__version__} has no {backend} attention")
        with attention.sdpa_kernel([member]):
            yield
        return
    if backend not in _FLAGS:
        raise Skip(f"torch {torch.__version__} has no {backend} attention")
    with torch.backends.cuda.sdp_kernel(**{flag: name == backend for name, flag in _FLAGS.items()}):
        yield


def skip_deprioritized_cudnn() -> None:
    """Raise Skip if an environment variable keeps torch from choosing cuDNN's attention."""
    if cudnn_is_deprioritized():
        raise Skip(f"{DEPRIORITIZED}=1 is set: torch uses cuDNN's attention only where a program asks for it")


def cudnn_is_deprioritized() -> bool:
    return os.environ.get(DEPRIORITIZED) == "1"


def is_refused(error: Exception) -> bool:
    return is_unsupported(error) or any(words in str(error) for words in _NO_KERNEL)
