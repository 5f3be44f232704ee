"""An archive as a profile names it, and as it is locked."""

from __future__ import annotations

from dataclasses import dataclass, replace

from envbuild.util import package_data
from envbuild.util.errors import Fault

# Looks through an archive on the host, and takes it apart in the build.
UNPACKER = package_data.DOCKERFILES / "unpack"
TOOLKIT, COMPAT = "cuda-toolkit", "cuda-compat"
# Where each is unpacked. NVIDIA's container toolkit looks for the second whenever a container starts.
FOLDERS = {TOOLKIT: "/usr/local/cuda", COMPAT: "/usr/local/cuda/compat"}


@dataclass(frozen=True)
class ArchiveRequest:
    """An archive as a profile names it. `fits` is a specifier for the version found in it; `at`: where it is named."""

    name: str
    sha256: str
    url: str | None
    fits: str
    at: Fault

    @property
    def named(self) -> Fault:
        """Its line, for a failure that is not the profile's."""
        return replace(self.at, message="it is named here")


@dataclass(frozen=True)
class Archive:
    """A file as it is locked. `version`: of the driver whose libraries it holds, or of the toolkit."""

    name: str
    version: str
    sha256: str
    bytes: int
