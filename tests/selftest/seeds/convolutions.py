"""Wrong convolutions, and a right one by another algorithm."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.convolution import conv

from .making import BRAIN, HALF, Kernel, Wrong, named, seeded, tf32, wrong_element


def half_convolution(kernel: Kernel) -> Kernel:
    """float16 convolutions summed in float16, four channels at a time."""

    def seeded(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, *rest: Any) -> torch.Tensor:
        if x.dtype != torch.float16 or rest[-1] != 1:
            return kernel(x, w, bias, *rest)
        parts = [kernel(x[:, c : c + 4].float(), w[:, c : c + 4].float(), None, *rest) for c in range(0, x.shape[1], 4)]
        total = torch.zeros_like(parts[0]) if bias is None else bias.float().view(-1, *(1,) * (x.dim() - 2))
        for part in parts:
            total = (total + part).half().float()
        return total.half()

    return seeded


def fourier(kernel: Kernel) -> Kernel:
    """A right convolution of one dimension by way of float32 Fourier transforms: not exact on integers."""

    def seeded(
        x: torch.Tensor, w: torch.Tensor, bias: Any, stride: int, padding: int, dilation: int, groups: int
    ) -> Any:
        length = x.shape[2] + 2 * padding
        spread = torch.zeros((*w.shape[:2], (w.shape[2] - 1) * dilation + 1), device=w.device)
        spread[..., ::dilation] = w.float()
        images = torch.fft.rfft(F.pad(x.float(), (padding, padding)), length)
        filters = torch.fft.rfft(spread, length).conj()
        whole = torch.fft.irfft(torch.einsum("nif,oif->nof", images, filters), length)
        found = whole[..., : length - spread.shape[2] + 1 : stride]
        return (found if bias is None else found + bias.float()[:, None]).to(x.dtype)

    return seeded


def lost_image(kernel: Kernel) -> Kernel:
    """The gradient of the weights lacks the last image's part."""

    def seeded(x: torch.Tensor, w: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.cat((kernel(x[:-1], w, *rest), kernel(x[-1:], w.detach(), *rest)))

    return seeded


def lost_row(kernel: Kernel) -> Kernel:
    """The gradient of an input of odd height is 0 in its last row where the stride is 2."""

    def seeded(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, stride: Any, *rest: Any) -> torch.Tensor:
        if x.requires_grad and stride == 2 and x.shape[2] % 2:
            hook: Any = x.register_hook
            hook(lambda grad: torch.cat((grad[:, :, :-1], 0 * grad[:, :, -1:]), dim=2))
        return kernel(x, w, bias, stride, *rest)

    return seeded


def packed(kernel: Kernel) -> Kernel:
    """An input in channels-last layout is read as if the input were contiguous."""
    return lambda x, *rest: kernel(x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride()), *rest)


def other_group(kernel: Kernel) -> Kernel:
    """Each group uses the filters of the group before it, if a group has more than one input channel."""

    def seeded(x: torch.Tensor, w: torch.Tensor, *rest: Any) -> torch.Tensor:
        return kernel(x, w.roll(w.shape[0] // rest[-1], 0) if w.shape[1] > 1 else w, *rest)

    return seeded


def library_says(status: str) -> Kernel:
    """A convolution that cuDNN refuses with this status."""

    def seeded(*args: Any) -> torch.Tensor:
        raise RuntimeError(f"cuDNN error: CUDNN_STATUS_{status}")

    return seeded


def wrong_conv(name: str, wrong: Wrong) -> Probe:
    """Return the probe conv with a wrong function of torch, and with only the cases of this function: a wrong conv2d
    cannot change the results of conv3d."""
    probe = seeded("conv", F, name, wrong)

    def is_case(case: conv.Convolution) -> bool:
        return name == f"conv{'_transpose' if case.transposed else ''}{case.dimensions}d"

    def function(context: Context) -> None:
        module: Any = conv
        module.SMALL, module.TRAINED = (tuple(filter(is_case, cases)) for cases in (conv.SMALL, conv.TRAINED))
        probe.function(context)

    return dataclasses.replace(probe, function=function)


PROBES = (
    wrong_conv("conv3d", named("element", lambda k: wrong_element(k, BRAIN, (0, 47, 4, 17, 19)))),
    wrong_conv("conv2d", half_convolution),
    wrong_conv("conv2d", named("nan", lambda k: wrong_element(k, HALF, (0, 63, 17, 18), float("nan")))),
    wrong_conv("conv2d", named("edge", lambda k: lambda x, w, b, s, p, *r: k(x.roll(1, 2), w, b, s, p, *r))),
    wrong_conv("conv1d", named("tf32", lambda k: tf32(k))),
    wrong_conv("conv1d", named("without_library", lambda k: library_says("NOT_SUPPORTED_ARCH_MISMATCH"))),
    wrong_conv("conv1d", named("sublibrary", lambda k: library_says("SUBLIBRARY_VERSION_MISMATCH"))),
    wrong_conv("conv1d", fourier),
    wrong_conv("conv2d", lost_image),
    wrong_conv("conv2d", lost_row),
    wrong_conv("conv2d", packed),
    wrong_conv("conv2d", other_group),
    wrong_conv("conv_transpose2d", named("unturned", lambda k: lambda x, w, *r: k(x, w.flip(-1), *r))),
)
