"""Parses lists of device-code architectures in torch's format, and decides whether they support a GPU. Pure."""

from __future__ import annotations

import re

from envbuild.selftest.inventory.device_code_compatibility import serves as serves

_CAPABILITY = re.compile(r"([0-9]{1,2})\.([0-9])([af]?)(\+PTX)?")


def capabilities(listed: str) -> tuple[str, ...]:
    """Return the compute capabilities in a TORCH_CUDA_ARCH_LIST: ("8.0", "9.0") for "8.0;9.0a+PTX".

    Raises ValueError if a part is not a compute capability.
    """
    parts = [part for part in re.split("[; ,]+", listed) if part]
    found = [_CAPABILITY.fullmatch(part) for part in parts]
    wrong = [part for part, match in zip(parts, found, strict=True) if not match]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not a compute capability such as 9.0")
    return tuple(dict.fromkeys(f"{match[1]}.{match[2]}" for match in found if match))
