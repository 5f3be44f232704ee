"""Architectures of device code: lists of them as torch's builds take them, and which cards they serve. Pure."""

from __future__ import annotations

import re

from envbuild.selftest.inventory.gpu_architectures import serves as serves

_CAPABILITY = re.compile(r"([0-9]{1,2})\.([0-9])([af]?)(\+PTX)?")


def capabilities(listed: str) -> tuple[str, ...]:
    """The compute capabilities in a TORCH_CUDA_ARCH_LIST: ("8.0", "9.0") of "8.0;9.0a+PTX".

    Raises ValueError for what is none.
    """
    parts = [part for part in re.split("[; ,]+", listed) if part]
    found = [_CAPABILITY.fullmatch(part) for part in parts]
    wrong = [part for part, match in zip(parts, found, strict=True) if not match]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no compute capability, as in 9.0")
    return tuple(dict.fromkeys(f"{match[1]}.{match[2]}" for match in found if match))
