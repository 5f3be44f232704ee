"""The documents of the commands below `export`."""

from dataclasses import dataclass

from envbuild.util.json_output_types import Digest


@dataclass(frozen=True)
class ExportedFile:
    """The document of `export check`, `selftest`, and the files for package managers and containers. `selftest`: the id
    of this envbuild's self-test; `digest`: of the file."""

    profile: str | None
    lock: Digest | None
    selftest: str
    file: str
    digest: Digest


@dataclass(frozen=True)
class CiJob:
    """The document of `export ci`. `text`: the job; `file`: what it was written to."""

    profile: str
    system: str
    repository: str
    file: str | None
    text: str
