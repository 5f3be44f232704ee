"""The schema that a lock file must match before it is used. It limits the characters of each name, version and path."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from envbuild.profile.extension_spec import Commit, ExtensionName, ModuleName, Setting
from envbuild.profile.value_types import ImageTag, Model, PinnedImage, Platform, Sha256, SitePath, Text, VariableName

Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+~:-]*$", max_length=200)]
WheelFile = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.+!-]+\.whl$", max_length=250)]


class DebEntry(Model):
    name: Word
    version: Word
    sha256: Sha256
    bytes: int
    path: Annotated[
        str, StringConstraints(pattern=r"^pool(/[A-Za-z0-9_+~:-][A-Za-z0-9._+~:-]*)+\.deb$", max_length=400)
    ]


class WheelEntry(Model):
    name: Word
    version: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+!-]*$", max_length=100)]
    file: WheelFile
    sha256: Sha256
    bytes: int
    layer: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=60)]


class Bootstrap(Model):
    bootstrap: Word
    packages: list[DebEntry]


class ImageEntry(Model):
    image: PinnedImage
    tag: ImageTag | None = None

    @model_validator(mode="after")
    def _has_one_name(self) -> ImageEntry:
        if self.tag is not None and self.tag.rpartition(":")[0] != self.image.partition("@")[0]:
            raise ValueError("the tag and the digest of the base image have different names")
        return self


class OverrideEntry(Model):
    name: Word
    version: Word
    replaces: Text


class StartupEntry(Model):
    file: SitePath
    sha256: Sha256


class AcceptedOldEntry(Model):
    name: Word
    version: Word
    newest: Word


class ArchiveEntry(Model):
    name: Literal["cuda-toolkit", "cuda-compat"]
    version: Annotated[str, StringConstraints(pattern=r"^[0-9]+(\.[0-9]+)+$", max_length=60)]
    sha256: Sha256
    bytes: int


class NvccEntry(Model):
    home: Annotated[str, StringConstraints(pattern=r"^(/[A-Za-z0-9][A-Za-z0-9._-]*)+$", max_length=200)]
    release: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,3}\.[0-9]{1,3}$")]


class ExtensionEntry(Model):
    name: ExtensionName
    git: Commit | None = None
    sdist: Sha256 | None = None
    tree: Commit | None = None
    env: dict[VariableName, Text] = Field(default_factory=dict)
    settings: tuple[Setting, ...] = Field((), strict=False)
    modules: tuple[ModuleName, ...] = Field(strict=False, min_length=1)

    @model_validator(mode="after")
    def _has_one_source(self) -> ExtensionEntry:
        if (self.git is None) == (self.sdist is None) or (self.tree is None) != (self.git is None):
            raise ValueError("an extension has git and tree, or sdist")
        return self


class BuilderEntry(Model):
    arch: Annotated[str, StringConstraints(pattern=r"^[0-9]{1,2}\.[0-9](;[0-9]{1,2}\.[0-9])*$", max_length=200)]
    nvcc: NvccEntry
    wheels: list[WheelEntry]
    archives: list[ArchiveEntry] = Field(default_factory=list)
    debs: list[DebEntry] = Field(default_factory=list)
    environment: dict[VariableName, Text] = Field(default_factory=dict)


class RecordedWheelEntry(Model):
    name: ExtensionName
    key: Sha256
    file: WheelFile
    sha256: Sha256
    bytes: int = Field(ge=0)


class Content(Model):
    """Everything that determines an image; the sha256 of it is the lock's id."""

    platform: Platform
    python: Annotated[str, StringConstraints(pattern=r"^3\.[0-9]{1,2}$")]
    base: Bootstrap | ImageEntry
    apt: list[DebEntry]
    wheels: list[WheelEntry]
    overrides: list[OverrideEntry] = Field(default_factory=list)
    startup: list[StartupEntry] = Field(default_factory=list)
    accepted_old: list[AcceptedOldEntry] = Field(default_factory=list)
    archives: list[ArchiveEntry] = Field(default_factory=list)
    nvcc: NvccEntry | None = None
    extensions: list[ExtensionEntry] = Field(default_factory=list)
    builder: BuilderEntry | None = None
    environment: dict[VariableName, Text]

    @model_validator(mode="after")
    def _has_a_builder(self) -> Content:
        if bool(self.extensions) != (self.builder is not None):
            raise ValueError("extensions need a builder, and a builder needs extensions")
        return self

    @model_validator(mode="after")
    def _has_a_base_for_apt(self) -> Content:
        if self.apt and isinstance(self.base, ImageEntry):
            raise ValueError("a lock on a base image cannot have apt packages")
        return self


class Origin(Model):
    """The profile and the requirements that a lock was made from, if no profile has the lock's name; paths are relative
    to the lock's folder."""

    profile: Annotated[str, StringConstraints(max_length=1000)]
    requirements: Annotated[str, StringConstraints(max_length=1000)]


class LockDocument(Model):
    format: int
    made: Annotated[str, StringConstraints(pattern=r"^[0-9]{8}T[0-9]{6}Z$")]
    id: Digest
    inputs: dict[str, Digest]
    of: Origin | None = None
    content: Content
    compiled: list[RecordedWheelEntry] = Field(default_factory=list)

    @model_validator(mode="after")
    def _records_a_wheel_once(self) -> LockDocument:
        if len({one.name for one in self.compiled}) != len(self.compiled):
            raise ValueError("compiled has two wheels of one extension")
        return self
