"""Reads a site's requirements for the use of an image: policy.yaml, and command-line options that replace its
values."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from envbuild.attest import keys_and_signatures
from envbuild.attest.keys_and_signatures import PublicKey
from envbuild.evidence.proof_rules import CPU
from envbuild.facts import database, probe_catalogue_reader
from envbuild.facts.probe_catalogue_reader import Level
from envbuild.profile.value_types import ProbeName, Release
from envbuild.registry.oci_types import Reference
from envbuild.util import yaml_and_project_paths
from envbuild.util.errors import FileError, UsageError, near

_AGE = re.compile(r"([1-9][0-9]{0,4})([dh])")
_WORDS = {"string_type": "must be text, in quotes", "list_type": "must be a list", "value_error": "must be a version"}
LockId = Annotated[str, StringConstraints(pattern=r"^(sha256:)?[0-9a-f]{12,64}$")]
ConfigKey = Literal[
    "Cmd", "Entrypoint", "Env", "ExposedPorts", "Healthcheck", "Labels", "OnBuild", "Shell", "StopSignal", "User",
    "Volumes", "WorkingDir",
]  # fmt: skip
Age = Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]{0,4}[dh]$")]


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)

    keys: list[str] = Field(
        [], description="public key files, relative to the policy's folder; a signature with any of them is enough"
    )
    gpus: list[str] = Field(
        [], description="GPU models that the image must be proved on; default: all models of its profile"
    )
    driver: Release | None = Field(None, description="version of the NVIDIA driver that the image will run with")
    max_age: Age | None = Field(None, description="the largest age of the newest proof: 90d, 12h")
    level: Level | None = Field(None, description="the lowest accepted level of the self-test")
    probes: list[ProbeName] = Field([], description="probes that must have passed, in addition to those of its profile")
    base: str | None = Field(None, description="for child images: the repository of the proved base image")
    forbid_in_child: list[ConfigKey] = Field(
        [], description="settings that a child image of `base` must not change: Cmd, Env, User ..."
    )
    profile: str | None = Field(None, description="the profile that the image must be built from")
    lock: LockId | None = Field(None, description="the id of the image's lock, at least the first 12 digits")
    copies: list[str] = Field([], alias="from", description="repositories that the image may have been copied from")


@dataclass(frozen=True)
class Policy:
    """A site's policy. `gpus`: GPU models, as ids of the facts database or as names that the database does not contain;
    if empty, the models of the image's profile. `lock`: prefix of the lock's id. `copies`: repositories that the image
    may have been pushed to instead of the one that serves it. `forbid_in_child`: keys of an image's configuration."""

    keys: tuple[PublicKey, ...] = ()
    gpus: tuple[str, ...] = ()
    driver: str | None = None
    max_age: datetime.timedelta | None = None
    level: str | None = None
    probes: tuple[str, ...] = ()
    base: Reference | None = None
    forbid_in_child: tuple[str, ...] = ()
    profile: str | None = None
    lock: str | None = None
    copies: tuple[str, ...] = ()


def read(file: Path | None, given: Mapping[str, object], key: Path | None) -> Policy:
    """Return the policy in `file`, in which the values in `given` replace those of the file.

    `key`: the file of the only public key to trust. Without it and without keys in the policy, the setting `public_key`
    names the file. Raises FileError with every error in the policy; without a policy file, UsageError with every error
    in `given`. An unknown probe or an invalid image name is reported only if nothing else is wrong.
    """
    doc = (
        yaml_and_project_paths.read(file, FileError)
        if file
        else yaml_and_project_paths.Document("the command line", {})
    )
    try:
        found = _File.model_validate({**doc.data, **{name: value for name, value in given.items() if value}})
    except ValidationError as error:
        faults = [doc.fault(tuple(item["loc"]), _said(item)) for item in error.errors()]
        faults.sort(key=lambda fault: fault.line or 0)
        raise (FileError if file else UsageError)(f"{doc.file} is not a valid policy", faults=faults) from None
    probe_catalogue_reader.refuse_unknown(found.probes)
    names = [key] if key else [file.parent / name for name in found.keys if file]
    keys = [keys_and_signatures.trusted(name) for name in names or (None,)]
    return Policy(
        keys=tuple(one for one in keys if one),
        gpus=model_names(found.gpus),
        driver=found.driver,
        max_age=_age(found.max_age) if found.max_age else None,
        level=found.level,
        probes=tuple(found.probes),
        base=Reference.parse(found.base) if found.base else None,
        forbid_in_child=tuple(found.forbid_in_child),
        profile=found.profile,
        lock=f"sha256:{found.lock.removeprefix('sha256:')}" if found.lock else None,
        copies=tuple(map(_repository, found.copies)),
    )


def _repository(text: str) -> str:
    reference = Reference.parse(text)
    if reference.tag or reference.digest:
        raise UsageError(f"{text} has a tag or a digest", hint=f"name the repository: {reference.repository}")
    return reference.repository


def _said(item: ErrorDetails) -> str:
    """Return the message about a key of the policy: for an unknown key, with known keys; otherwise, with the key's
    description."""
    name, known = str(item["loc"][0]), {field.alias or name: field for name, field in _File.model_fields.items()}
    if name not in known:
        hint = near(name, known) or f"known: {', '.join(known)}"
        return f"unknown key ({hint})"
    allowed = f"must be {item['ctx']['expected']}" if item["type"] == "literal_error" else "invalid value"
    return f"{_WORDS.get(item['type'], allowed)}: {known[name].description}"


def model_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the ids of GPU models: "NVIDIA H20" and "h20" both give h20."""
    found = []
    for name in names:
        known = database.gpus().get(name.lower()) or database.gpu_by_name(name)
        found.append(known.id if known else CPU if name.lower() == CPU else name)
    return tuple(dict.fromkeys(found))


def _age(text: str) -> datetime.timedelta:
    match = _AGE.fullmatch(text)
    assert match
    return datetime.timedelta(**{"days" if match[2] == "d" else "hours": int(match[1])})
