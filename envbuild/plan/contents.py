"""Which places of an environment a wheel fills, so that one can tell whether something was put over it."""

from __future__ import annotations

import zipfile
from pathlib import Path, PurePosixPath

# Namespaces that many wheels share: the folder below is the wheel's own.
_SHARED = frozenset({"nvidia", "google"})


def roots(wheel: Path) -> tuple[str, ...]:
    """The wheel's own folders and modules, below site-packages, as ("torch", "torch-2.3.1.dist-info").

    What installers do not unpack as it is (scripts, data) is left out.
    """
    with zipfile.ZipFile(wheel) as archive:
        found = {_root(PurePosixPath(name)) for name in archive.namelist() if not name.endswith("/")}
    return tuple(sorted(root for root in found if ".data" not in root))


def _root(path: PurePosixPath) -> str:
    return "/".join(path.parts[: 2 if path.parts[0] in _SHARED else 1])
