"""The kinds of value that profiles and locks have: each bounded, for either may be hostile."""

from __future__ import annotations

from typing import Annotated

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints

from envbuild.plan import addresses, unrelated

PLATFORM = "linux/amd64"
PRINTABLE = r"^[^\x00-\x1f\x7f\x85\u2028\u2029]*$"


def _version(text: str) -> str:
    try:
        return str(Version(text))
    except InvalidVersion:
        raise ValueError(f"{text!r} is not a version (write it in full, as in 2.13.0)") from None


def _requirement(text: str) -> str:
    meant = unrelated.refused(text)
    if meant:
        raise ValueError(meant)
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        raise ValueError(f"{text!r} is not a requirement (as in numpy>=2 or numpy==2.4.6)") from None
    if requirement.url:
        raise ValueError("an address cannot be locked: name a package that the index has")
    return str(requirement)


def _platform(text: str) -> str:
    if text != PLATFORM:
        raise ValueError(f"platform {text!r} is not supported: {PLATFORM} is")
    return text


Platform = Annotated[str, AfterValidator(_platform)]
Text = Annotated[str, StringConstraints(max_length=2000, pattern=PRINTABLE)]
Release = Annotated[str, StringConstraints(max_length=60, pattern=PRINTABLE), AfterValidator(_version)]
PackageSpec = Annotated[str, StringConstraints(max_length=300, pattern=PRINTABLE), AfterValidator(_requirement)]
# Debian policy 5.6.1: lower case letters, digits and + - . , at least two characters.
DebianPackage = Annotated[str, StringConstraints(max_length=100, pattern=r"^[a-z0-9][a-z0-9+.-]+$")]
# The distribution's reference grammar, with a digest.
ImageReference = Annotated[
    str, StringConstraints(max_length=400, pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._:/-]*@sha256:[0-9a-f]{64}$")
]
VariableName = Annotated[str, StringConstraints(max_length=100, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
GpuId = Annotated[str, StringConstraints(max_length=60, pattern=r"^[a-z0-9][a-z0-9.-]*$")]
LibraryName = Annotated[str, StringConstraints(max_length=60, pattern=r"^[a-z0-9][a-z0-9.-]*$")]
ProbeName = Annotated[str, StringConstraints(max_length=60, pattern=r"^[a-z0-9]+(\.[a-z0-9_]+)?$")]


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ArchiveFile(Model):
    """A tar or Debian package by its sha256. Where it lies is not locked: `url`, or the site's place for archives."""

    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    url: (
        Annotated[
            str,
            StringConstraints(max_length=1000, pattern=r"^(https?|file)://[!-~]+$"),
            AfterValidator(addresses.checked),
        ]
        | None
    ) = None
