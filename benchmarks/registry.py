"""A registry for the benchmark. A push is measured by the growth of the registry's folder."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from e2e.openregistry import OpenRegistry, program


class Registry(OpenRegistry):
    """`folder` contains the data, and the registry's program if it is not installed and `known` does not give it."""

    def __init__(self, folder: Path, known: Path | None = None) -> None:
        found = known or program(folder / "package")
        if found is None:
            raise SystemExit("docker-registry is not installed, and can only be fetched on Debian")
        super().__init__(folder, found)

    def holds(self) -> int:
        """Return the size of everything that was pushed, as stored: compressed, and each blob once."""
        blobs = self.data / "docker" / "registry" / "v2" / "blobs"
        return sum(file.stat().st_size for file in blobs.rglob("data"))
