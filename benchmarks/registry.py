"""The benchmark's own registry; a push is measured by the growth of its folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from e2e.openregistry import OpenRegistry, program


class Registry(OpenRegistry):
    """`folder` contains the program, unless it is installed, and the data."""

    def __init__(self, folder: Path) -> None:
        found = program(folder / "package")
        if found is None:
            raise SystemExit("docker-registry is not installed, and can only be fetched on Debian")
        super().__init__(folder, found)

    def holds(self) -> int:
        """Return the size of everything that was pushed, as it is stored: compressed, each blob once."""
        blobs = self.data / "docker" / "registry" / "v2" / "blobs"
        return sum(file.stat().st_size for file in blobs.rglob("data"))
