"""Types for an archive: as a profile requests it, and as a lock records it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from envbuild.util import package_data
from envbuild.util.errors import Fault

# The script that inspects an archive on the host, and extracts it in the build.
UNPACKER = package_data.DOCKERFILES / "unpack"
TOOLKIT, COMPAT = "cuda-toolkit", "cuda-compat"
# Target folder of each kind. NVIDIA's container toolkit checks the folder of COMPAT whenever a container starts.
FOLDERS = {TOOLKIT: "/usr/local/cuda", COMPAT: "/usr/local/cuda/compat"}


@dataclass(frozen=True)
class ArchiveRequest:
    """An archive as a profile requests it. `fits`: specifier that the version in the archive must match; `at`: the
    archive's position in the profile."""

    name: str
    sha256: str
    url: str | None
    fits: str
    at: Fault

    @property
    def named(self) -> Fault:
        """The archive's line in the profile, for a failure that the profile did not cause."""
        return replace(self.at, message="the archive is named here")


@dataclass(frozen=True)
class Archive:
    """A locked archive file. `version`: that of the toolkit, or of the driver whose libraries the archive contains."""

    name: str
    version: str
    sha256: str
    bytes: int
