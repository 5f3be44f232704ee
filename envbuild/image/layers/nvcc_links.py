"""The links below CUDA_HOME that linkers look for, and that the wheels of nvcc do not have."""

from __future__ import annotations

from collections.abc import Collection


def missing_links(names: Collection[str]) -> dict[str, str]:
    """Return link -> target for the folder of CUDA's libraries. `names`: what is in it. A linker looks for
    libcudart.so, and wheels have only libcudart.so.13."""
    found: dict[str, str] = {}
    for name in sorted(names):
        plain = f"{name.partition('.so.')[0]}.so"
        if name.startswith("lib") and ".so." in name and plain not in names:
            found.setdefault(plain, name)
    return found
