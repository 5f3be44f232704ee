"""Which releases of torchvision and torchaudio belong to a torch release. Pure."""

from __future__ import annotations

from packaging.version import Version

_FREE_TORCHAUDIO = Version("2.11")  # the metadata of this and later releases require no version of torch


def companion_series(name: str, torch: str) -> str:
    """The first two numbers of the releases that belong to a torch 2 release: torchaudio 2.N belongs to torch 2.N,
    torchvision 0.N to torch 2.(N-15)."""
    version = Version(torch)
    return f"0.{version.minor + 15}" if name == "torchvision" else f"{version.major}.{version.minor}"


def missing_bound(name: str, torch: str) -> str:
    """The bound that a resolver needs to choose a release that belongs to a torch 2 release; empty if the metadata of
    all releases of `name` lead to one. The releases of torchaudio that require no torch fit only newer
    releases of torch."""
    series = companion_series(name, torch)
    return f"=={series}.*" if name == "torchaudio" and Version(series) < _FREE_TORCHAUDIO else ""


def companion_requirement(name: str, torch: str) -> str:
    """The requirement for the releases of torchvision or torchaudio that belong to a torch 2 release.

    Without a bound, pip and uv would choose the newest torchaudio for every torch: it requires no version of torch.
    """
    series = companion_series(name, torch)
    if name == "torchaudio" and Version(series) >= _FREE_TORCHAUDIO:
        return f"{name}>={_FREE_TORCHAUDIO}"
    return f"{name}=={series}.*"
