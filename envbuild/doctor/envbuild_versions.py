"""Lists the installed versions of envbuild and its packages for `envbuild --version --json` and `doctor --json`."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from envbuild.facts import fact_file_reader
from envbuild.testrun.selftest_job import selftest_id
from envbuild.util.json_output_types import Digest


@dataclass(frozen=True)
class Versions:
    """The document of `--version`. `packages`: those that envbuild needs, null if not installed. `facts`, `selftest`:
    digests of the facts and of the self-test's code. The document contains no paths, and no names of people or
    machines."""

    envbuild: str
    python: str
    system: str
    facts: Digest
    selftest: str
    packages: Mapping[str, str | None]


def document() -> Versions:
    return Versions(
        envbuild=metadata.version("envbuild"),
        python=platform.python_version(),
        system=platform.platform(),
        facts=f"sha256:{fact_file_reader.facts_digest()}",
        selftest=selftest_id(),
        packages={name: _version(name) for name in sorted(_needed())},
    )


def _needed() -> set[str]:
    wanted = map(Requirement, metadata.requires("envbuild") or ())
    return {one.name for one in wanted if not one.marker or one.marker.evaluate({"extra": ""})}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
