"""The JSON documents of the subcommands of `export`."""

from dataclasses import dataclass

from envbuild.util.json_output_types import Digest


@dataclass(frozen=True)
class ExportedFile:
    """The document of `export check`, `export selftest`, and the exports for package managers and containers.
    `selftest`: the id of this envbuild's self-test. `digest`: the digest of `file`."""

    profile: str | None
    lock: Digest | None
    selftest: str
    file: str
    digest: Digest


@dataclass(frozen=True)
class CiJob:
    """The document of `export ci`. `text`: the job. `file`: the file with the job, null if none was named."""

    profile: str
    system: str
    repository: str
    file: str | None
    text: str
