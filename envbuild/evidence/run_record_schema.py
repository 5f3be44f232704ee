"""The schema that a run record must match before any of its content is used, whoever wrote it."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from envbuild.facts.probe_catalogue_reader import Level

VERSION = 1
FINISHED = "%Y-%m-%dT%H:%M:%SZ"


class _Part(BaseModel):
    """Part of a record. The fields that are read must match the schema, whoever wrote them; other fields are kept
    unchanged."""

    model_config = ConfigDict(extra="allow", strict=True, defer_build=True)


class _Selftest(_Part):
    id: str
    level: Level
    require: list[str]
    settings: dict[str, bool]
    # Defaults for records made before these fields existed.
    gpu_count: int = 1
    transport: str | None = None
    own: dict[str, str] = {}
    demands: dict[str, float] = {}
    versions: dict[str, int] = {}


class _Result(_Part):
    probe: str
    status: Literal["passed", "failed", "skipped"]


class _Image(_Part):
    id: str


class _Gpu(_Part):
    model: str
    name: str
    driver: str | None = None


class _Where(_Part):
    unconfined: Annotated[list[Annotated[str, StringConstraints(max_length=200)]], Field(max_length=20)] = []


def _time(text: str) -> str:
    datetime.datetime.strptime(text, FINISHED)
    return text


class _Record(_Part):
    version: Literal[1]
    image: _Image
    profile: str
    lock: str
    finished: Annotated[str, StringConstraints(max_length=20), AfterValidator(_time)]
    gpu: _Gpu | None
    where: _Where | None = None
    environment: dict[str, Any]
    seconds: float
    selftest: _Selftest
    before: list[str]
    results: list[_Result]
    errors: list[str]


class Newer(ValueError):
    """A run record of a later format: its content is unknown, so it may report a failure."""


def validate_record(record: Any) -> dict[str, Any]:
    """Validate a run record, and return it with defaults for optional fields. Raises ValueError, Newer."""
    version = record.get("version") if isinstance(record, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise Newer(f"a run record has format {version}, this envbuild reads {VERSION}: use a newer envbuild")
    found = _Record.model_validate(record)
    return {**record, "selftest": found.selftest.model_dump()}
