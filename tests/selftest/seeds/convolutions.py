"""Convolutions that are wrong, and a right one by another way."""

from typing import Any

import torch
import torch.nn.functional as F

from .making import BRAIN, HALF, Kernel, named, seeded, tf32, wrong_element


def half_convolution(kernel: Kernel) -> Kernel:
    """float16 convolutions summed in float16, four channels at a time."""

    def seeded(x: torch.Tensor, w: torch.Tensor, bias: None, *rest: Any) -> torch.Tensor:
        if x.dtype != torch.float16 or rest[-1] != 1:
            return kernel(x, w, bias, *rest)
        parts = [kernel(x[:, c : c + 4].float(), w[:, c : c + 4].float(), bias, *rest) for c in range(0, x.shape[1], 4)]
        total = torch.zeros_like(parts[0])
        for part in parts:
            total = (total + part).half().float()
        return total.half()

    return seeded


def fourier(kernel: Kernel) -> Kernel:
    """A right convolution of one dimension by way of float32 Fourier transforms: not exact on integers."""

    def seeded(
        x: torch.Tensor, w: torch.Tensor, bias: None, stride: int, padding: int, dilation: int, groups: int
    ) -> Any:
        length = x.shape[2] + 2 * padding
        spread = torch.zeros((*w.shape[:2], (w.shape[2] - 1) * dilation + 1), device=w.device)
        spread[..., ::dilation] = w.float()
        images = torch.fft.rfft(F.pad(x.float(), (padding, padding)), length)
        filters = torch.fft.rfft(spread, length).conj()
        whole = torch.fft.irfft(torch.einsum("nif,oif->nof", images, filters), length)
        return whole[..., : length - spread.shape[2] + 1].to(x.dtype)

    return seeded


def library_says(status: str) -> Kernel:
    """A convolution that cuDNN refuses in these words."""

    def seeded(*args: Any) -> torch.Tensor:
        raise RuntimeError(f"cuDNN error: CUDNN_STATUS_{status}")

    return seeded


PROBES = (
    seeded("conv", F, "conv3d", named("element", lambda k: wrong_element(k, BRAIN, (0, 47, 4, 17, 19)))),
    seeded("conv", F, "conv2d", half_convolution),
    seeded("conv", F, "conv2d", named("nan", lambda k: wrong_element(k, HALF, (0, 63, 17, 18), float("nan")))),
    seeded("conv", F, "conv2d", named("edge", lambda k: lambda x, w, b, s, p, *r: k(x.roll(1, 2), w, b, s, p, *r))),
    seeded("conv", F, "conv1d", named("tf32", lambda k: tf32(k))),
    seeded("conv", F, "conv1d", named("without_library", lambda k: library_says("NOT_SUPPORTED_ARCH_MISMATCH"))),
    seeded("conv", F, "conv1d", named("sublibrary", lambda k: library_says("SUBLIBRARY_VERSION_MISMATCH"))),
    seeded("conv", F, "conv1d", fourier),
)
