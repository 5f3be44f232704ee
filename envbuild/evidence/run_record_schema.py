"""The run record: one typed document with everything that a self-test measured about an image or environment. Pure.

Every record is validated when it is read, whoever wrote it. Keys that this envbuild does not use are kept, so that a
record that is read and written again has the same bytes.
"""

from __future__ import annotations

import datetime
import json
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

from envbuild.evidence.environment_record import MeasuredEnvironment
from envbuild.facts.probe_catalogue_reader import Level
from envbuild.testrun.run_result import ProbeResult

VERSION = 1
FINISHED = "%Y-%m-%dT%H:%M:%SZ"


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, frozen=True, defer_build=True)


class RecordedSelftest(_Part):
    """The self-test of a run: the settings as in EvidenceRequirements, its `id` (selftest_job.selftest_id), and the
    `versions` of the probes and of the harness."""

    id: str
    level: Level
    require: list[str]
    settings: dict[str, bool]
    # Defaults for records that were written before these fields existed.
    gpu_count: int = 1
    transport: str | None = None
    own: dict[str, str] = {}
    demands: dict[str, float] = {}
    versions: dict[str, int] = {}


class RecordedImage(_Part):
    id: str


class RecordedGpu(_Part):
    """The GPUs of a run. `model`: the id of the GPU model in the facts, or `name` if the facts do not contain it."""

    model: str
    name: str
    count: int = 1
    driver: str | None = None


class RecordedPlace(_Part):
    """Where a run took place, if not in a container of this machine's engine. `unconfined`: the restrictions of
    Docker's containers that were missing there."""

    unconfined: Annotated[list[Annotated[str, StringConstraints(max_length=200)]], Field(max_length=20)] = []


class LoadedLibrary(_Part):
    """A library that the self-test's process had loaded. `owner`: its distribution, name==version; `record`: whether
    the file matches the distribution's RECORD."""

    name: str | None = None
    version: str | None = None
    owner: str | None = None
    path: str | None = None
    sha256: str | None = None
    record: bool | None = None

    @property
    def distribution(self) -> tuple[str, str]:
        """Name and version of the distribution; empty if unknown."""
        name, _, version = (self.owner or "").partition("==")
        return name, version


def _time(text: str) -> str:
    datetime.datetime.strptime(text, FINISHED)
    return text


class RunRecord(_Part):
    """A run record about an `image` or about a Python environment (`installed`). `seconds`: the duration. `before`: the
    hex digests of the records about the same subject that existed before the run was recorded. `errors`: errors of the
    run. `start` and `environment`: as the self-test reported them, not validated."""

    version: Literal[1]
    image: RecordedImage | None = None
    installed: MeasuredEnvironment | None = None
    profile: str
    lock: str
    finished: Annotated[str, StringConstraints(max_length=20), AfterValidator(_time)]
    gpu: RecordedGpu | None
    where: RecordedPlace | None = None
    engine: str | None = None
    start: dict[str, object] = {}
    environment: dict[str, object]
    seconds: float
    selftest: RecordedSelftest
    before: list[str]
    results: list[ProbeResult]
    errors: list[str]

    @model_validator(mode="after")
    def _has_one_subject(self) -> Self:
        if (self.image is None) == (self.installed is None):
            raise ValueError("a run record must be about either an image or an environment")
        return self

    @property
    def subject(self) -> str:
        """The id of the image, or the digest of the environment: "sha256:..."."""
        if self.installed:
            return self.installed.id
        assert self.image is not None
        return self.image.id

    @property
    def encoded(self) -> str:
        """The text of the record's file. The file is named by the sha256 of this text."""
        return json.dumps(self.model_dump(exclude_unset=True), indent=1, sort_keys=True)

    @property
    def distributions(self) -> dict[str, str]:
        """The installed distributions: name -> version."""
        found = self.environment.get("distributions")
        return {str(name): str(version) for name, version in found.items()} if isinstance(found, dict) else {}

    @property
    def libraries(self) -> list[LoadedLibrary]:
        """The libraries that the self-test had loaded. Invalid entries are left out."""
        found = self.environment.get("libraries")
        return [one for item in found if (one := _library(item))] if isinstance(found, list) else []

    def by_status(self, status: str) -> list[str]:
        """The names of the probes with this status."""
        return [result.probe for result in self.results if result.status == status]


def _library(item: object) -> LoadedLibrary | None:
    try:
        return LoadedLibrary.model_validate(item)
    except ValueError:
        return None


class Newer(ValueError):
    """Raised for a run record in a newer format. Its content is unknown, so it may report a failure."""


def validate_record(record: object) -> RunRecord:
    """Return the run record in a parsed JSON document. Raises ValueError if it is invalid, Newer for a newer format."""
    version = record.get("version") if isinstance(record, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise Newer(f"a run record has format {version}, this envbuild reads {VERSION}: use a newer envbuild")
    return RunRecord.model_validate(record)
