"""Value types of profiles and locks. They limit lengths and characters, because both files may be untrusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from envbuild.facts import misleading_packages
from envbuild.registry.image_reference_patterns import BY_DIGEST, BY_DIGEST_OR_TAG, BY_TAG
from envbuild.util import url_redaction

PLATFORM = "linux/amd64"
PRINTABLE = r"^[^\x00-\x1f\x7f\x85\u2028\u2029]*$"


def _version(text: str) -> str:
    try:
        return str(Version(text))
    except InvalidVersion:
        raise ValueError(f"{text!r} is not a version (write it in full, as in 2.13.0)") from None


def requirement_problem(text: str, shown: str) -> str | None:
    """Why a requirement cannot be locked; None if it can. `shown`: how the message refers to the requirement."""
    meant = misleading_packages.refusal_reason(text)
    if meant:
        return meant
    try:
        requirement = Requirement(text)
    except (InvalidRequirement, RecursionError):  # RecursionError: a marker with thousands of nested brackets
        return _ADDRESS if "://" in text else f"{shown} is not a requirement (as in numpy>=2 or numpy==2.4.6)"
    return _ADDRESS if requirement.url else None


_ADDRESS = (
    "a URL cannot be locked: name a package that the index has, compile it (extensions:), or install it in a child "
    "image"
)


def _requirement(text: str) -> str:
    problem = requirement_problem(text, repr(text))
    if problem:
        raise ValueError(problem)
    return str(Requirement(text))


def _platform(text: str) -> str:
    if text != PLATFORM:
        raise ValueError(f"unsupported platform {text!r}: only {PLATFORM} is supported")
    return text


# Pattern -> description of what it allows.
ALLOWED: dict[str, str] = {}


def shaped(pattern: str, allowed: str, longest: int, shortest: int | None = None) -> StringConstraints:
    """Text with a pattern and limits of its length in characters. `allowed`: what the pattern allows, in words, for the
    error message."""
    ALLOWED[pattern] = allowed
    return StringConstraints(min_length=shortest, max_length=longest, pattern=pattern)


def one_line(longest: int, shortest: int | None = None) -> StringConstraints:
    return shaped(PRINTABLE, "text on one line, without control characters", longest, shortest)


_ID = r"^[a-z0-9][a-z0-9.-]*$", "lower case letters, digits, dots and dashes, as in rtx4090 or cublas-hopper-fpe"
Platform = Annotated[str, AfterValidator(_platform)]
Text = Annotated[str, one_line(2000)]
Release = Annotated[str, one_line(60), AfterValidator(_version)]
PackageSpec = Annotated[str, one_line(300), AfterValidator(_requirement)]
# Debian policy 5.6.1: lower case letters, digits and + - . , at least two characters. The argument `NAME-` would make
# apt-get remove NAME.
DebianPackage = Annotated[
    str,
    shaped(
        r"^[a-z0-9][a-z0-9+.-]*[a-z0-9+.]$",
        "a package's name: only lower case letters, digits and + - . , without - at the end",
        100,
    ),
]
_BY_DIGEST = "HOST/NAME@sha256:<64 hex digits>, with NAME in lower case"
ImageReference = Annotated[str, shaped(f"^{BY_DIGEST_OR_TAG}$", f"HOST/NAME:TAG or {_BY_DIGEST}", 400)]
PinnedImage = Annotated[str, shaped(f"^{BY_DIGEST}$", _BY_DIGEST, 500)]
ImageTag = Annotated[str, shaped(f"^{BY_TAG}$", "HOST/NAME:TAG, with NAME in lower case", 400)]
VariableName = Annotated[
    str, shaped(r"^[A-Za-z_][A-Za-z0-9_]*$", "a variable's name: letters, digits and _, no digit first", 100)
]
ReasonName = Annotated[
    str, shaped(r"^[A-Za-z0-9_][A-Za-z0-9._+-]*$", "the name of a key, a library, a package or a variable", 100)
]
Id = Annotated[str, shaped(*_ID, 60)]
GpuId: TypeAlias = Id
LibraryName: TypeAlias = Id
ProbeName = Annotated[
    str, shaped(r"^[a-z0-9]+(\.[a-z0-9_]+)?$", "a probe's name, as in gemm.exact (envbuild test --list)", 60)
]
SitePath = Annotated[
    str,
    shaped(r"^[A-Za-z0-9_][A-Za-z0-9._+-]*(/[A-Za-z0-9_][A-Za-z0-9._+-]*)*$", "a path below site-packages", 200),
]
Sha256 = Annotated[str, shaped(r"^[0-9a-f]{64}$", "64 hex digits, as sha256sum shows them", 64)]


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


class ArchiveFile(Model):
    """A tar or Debian package, identified by its sha256. Its URL, from `url` or the setting `archives`, is not part of
    the lock."""

    sha256: Sha256 = Field(description="sha256 of the file")
    url: (
        Annotated[
            str,
            shaped(r"^(https?|file)://[!-~]+$", "an address of http, https or file, without spaces", 1000),
            AfterValidator(url_redaction.validate_url),
        ]
        | None
    ) = Field(None, description="URL of the file; the setting `archives`, if set, replaces it")


class ToolkitArchive(ArchiveFile):
    """The CUDA toolkit (nvcc) for the image: a tar or Debian package, identified by its sha256. Its URL, from `url` or
    the setting `archives`, is not part of the lock."""


class SourceArchive(ArchiveFile):
    """The extension's source: a tar, identified by its sha256. Its URL, from `url` or the setting `archives`, is not
    part of the lock."""


@dataclass(frozen=True)
class StartupFile:
    """A file in site-packages that the profile allows to run code whenever Python starts."""

    file: str
    sha256: str
