"""An archive as requested in a profile, and as locked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from envbuild.util import package_data
from envbuild.util.errors import Fault

# Inspects an archive on the host, and extracts it in the build.
UNPACKER = package_data.DOCKERFILES / "unpack"
TOOLKIT, COMPAT = "cuda-toolkit", "cuda-compat"
# Target folder of each kind. NVIDIA's container toolkit checks the folder of COMPAT whenever a container starts.
FOLDERS = {TOOLKIT: "/usr/local/cuda", COMPAT: "/usr/local/cuda/compat"}


@dataclass(frozen=True)
class ArchiveRequest:
    """An archive as a profile requests it. `fits`: specifier for the version found in it; `at`: its position in the
    profile."""

    name: str
    sha256: str
    url: str | None
    fits: str
    at: Fault

    @property
    def named(self) -> Fault:
        """The archive's line in the profile, for a failure that the profile did not cause."""
        return replace(self.at, message="it is named here")


@dataclass(frozen=True)
class Archive:
    """A locked archive file. `version`: of the toolkit, or of the driver whose libraries it contains."""

    name: str
    version: str
    sha256: str
    bytes: int
