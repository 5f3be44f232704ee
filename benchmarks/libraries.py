"""Finds shared libraries that an image contains more than once, also in lower layers. A pull transfers the hidden
copies too, although nothing uses them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_LIBRARY = re.compile(r"lib[A-Za-z_]+\.so(\.[0-9]+)*")
_PACKAGED = "site-packages/nvidia"


def twice(inspected: dict[str, Any]) -> tuple[int, int]:
    """Return the number and the bytes of superfluous copies of libraries from NVIDIA's wheels. `inspected`: the
    engine's description of an image, whose layers must be folders (overlay2)."""
    data = inspected["GraphDriver"]["Data"]
    folders = [data["UpperDir"], *filter(None, data.get("LowerDir", "").split(":"))]
    seen: set[str] = set()
    count = size = 0
    for folder in reversed(folders):  # from the lowest up
        for above, _, names in os.walk(folder):
            if _PACKAGED not in above:
                continue
            for name in filter(_LIBRARY.fullmatch, names):
                file = Path(above) / name
                if file.is_symlink() or not file.is_file() or not file.stat().st_size:
                    continue  # a whiteout is a device, not a file
                if name in seen:
                    count, size = count + 1, size + file.stat().st_size
                seen.add(name)
    return count, size
