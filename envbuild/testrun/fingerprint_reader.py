"""Reads fingerprints from a self-test's output or from a file. Neither source is trusted, so both are validated.

The format is version 1 of `envbuild/selftest/numerics/fingerprint_document.py` and `output_statistics.py`.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from envbuild.testrun.output_judge import PrintableText
from envbuild.testrun.run_result import TestRun
from envbuild.util import strict_and_canonical_json, yaml_and_project_paths
from envbuild.util.errors import CheckFailed, EnvbuildError, Fault, FingerprintError
from envbuild.util.strict_and_canonical_json import NotStrict

VERSION = 1
MAX_BYTES = 64 << 20
_MOST_FAULTS = 20


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)


Count = Annotated[int, Field(ge=0, le=1 << 53)]
Number = Annotated[float, BeforeValidator(lambda value: float(value) if value in ("nan", "inf", "-inf") else value)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Short = Annotated[PrintableText, Field(max_length=200)]
Shape = Annotated[list[Count], Field(max_length=32)]
DType = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,30}$")]


class Against(_Part):
    """An output compared with the exact float64 result. `ratio`: the largest ratio of error to bound; `median`: the
    median ratio; `relative`: the root mean square of the errors divided by the root mean square of the exact values;
    `nonfinite`: the number of elements that are NaN or infinite in both results. Elements that are minus infinity in
    both, as from a mask, are not counted, unless a weight of the module is not finite."""

    ulps: dict[Annotated[str, Field(pattern=r"^(0|-?[1-9][0-9]{0,3})$")], Count]
    error: Number
    bound: Number
    ratio: Number
    median: Number
    where: Shape
    got: Number
    expected: Number
    wrong: Count
    count: Count
    relative: Number
    nonfinite: Count = 0


class Observed(_Part):
    """An output of an operation. `fed`: the number of NaN or +inf elements in the inputs (-inf does not count, because
    masks contain it); `nonfinite`: the number of non-finite elements in the output; `against`: None without a
    reference."""

    dtype: DType
    shape: Shape
    sha256: Sha256
    fed: Count
    nonfinite: Count
    rms: Number
    peak: Number
    samples: list[Number] = Field(max_length=1000)
    against: Against | None
    drift: Number | None = None


class FingerprintOp(_Part):
    """An operation or a module, with the output in each of the two passes. `note`: why a pass or a reference is
    missing."""

    id: Annotated[PrintableText, Field(min_length=1, max_length=500)]
    dtype: DType
    shape: Shape
    exact: bool
    backend: Short
    flags: list[Short] = Field(max_length=50)
    note: Annotated[PrintableText, Field(max_length=2000)] | None
    golden: Sha256 | None
    teacher: Observed | None
    free: Observed | None


class FingerprintGpu(_Part):
    name: Short
    compute_capability: Short
    sms: Count
    driver: Short | None


class FingerprintMachine(_Part):
    """The machine that was measured. `gpu` is None on the CPU. `libraries`: the version that each mapped CUDA library
    reports."""

    gpu: FingerprintGpu | None
    cpu: Short | None
    cpu_capability: Short | None
    threads: Count
    python: Short
    torch: Short
    cuda: Short | None
    libraries: dict[Short, Short] = Field(max_length=200)


class Fingerprint(_Part):
    """A fingerprint. `subject`: what was recorded, the self-test's operations or the modules of a model."""

    version: Literal[1]
    subject: Literal["operations", "model"]
    inputs: Sha256
    machine: FingerprintMachine
    ops: list[FingerprintOp] = Field(min_length=1, max_length=100_000)

    @field_validator("ops")
    @classmethod
    def _each_once(cls, ops: list[FingerprintOp]) -> list[FingerprintOp]:
        twice = [name for name, count in Counter(op.id for op in ops).items() if count > 1]
        if twice:
            raise ValueError(f"{twice[0]} appears twice")
        return ops


def text_of(run: TestRun) -> str:
    """Return a run's fingerprint as the text of a fingerprint file.

    Raises CheckFailed if the run's fingerprint is missing or invalid.
    """
    if not run.fingerprint:
        raise CheckFailed(
            "the self-test recorded no fingerprint", hint="see the reason that the probe `fingerprint` gives"
        )
    found = {key: value for key, value in run.fingerprint.items() if key != "kind"}
    try:
        Fingerprint.model_validate(found)
    except ValidationError as error:
        path, message = _faults(error, found)[0]
        where = yaml_and_project_paths.field_name(path)
        raise CheckFailed(f"the self-test's fingerprint is invalid: {where}: {message}") from error
    return json.dumps(found, allow_nan=False, indent=1, sort_keys=True) + "\n"


def read(file: Path) -> Fingerprint:
    """Read a fingerprint file. Raises FingerprintError with the file and field of each of the first faults, and with
    their lines if the YAML reader can parse the file."""
    name = yaml_and_project_paths.display(file)
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
        found = strict_and_canonical_json.strict(raw, MAX_BYTES)
    except OSError as error:
        raise FingerprintError(f"{name} cannot be read: {error.strerror}") from error
    except NotStrict as error:
        faults = [Fault("invalid JSON from here on", name, error.line)] if error.line else []
        raise FingerprintError(f"{name} {error}", faults=faults) from error
    try:
        return Fingerprint.model_validate(found)
    except ValidationError as error:
        raise FingerprintError(
            f"{name} is not a fingerprint of version {VERSION}",
            faults=_placed(_faults(error, found), raw, name),
            hint="to create one: envbuild test NAME --fingerprint FILE",
        ) from error


def _faults(error: ValidationError, found: object) -> list[tuple[yaml_and_project_paths.Path, str]]:
    """Return path and message of each fault. If the version is unsupported, only this fault is returned."""
    version = found.get("version") if isinstance(found, dict) else None
    if isinstance(version, int) and version != VERSION:
        return [(("version",), f"version {version}; this envbuild reads version {VERSION}")]
    return [(fault["loc"], fault["msg"]) for fault in error.errors()]


def _placed(faults: Sequence[tuple[yaml_and_project_paths.Path, str]], raw: bytes, name: str) -> list[Fault]:
    """Return the first faults. They have line numbers if the YAML reader, which records positions, can parse the JSON
    text."""
    first, more = faults[:_MOST_FAULTS], len(faults) - _MOST_FAULTS
    rest = [Fault(f"and {more} more", name)] if more > 0 else []
    if len(raw) <= yaml_and_project_paths.MAX_BYTES:
        with contextlib.suppress(EnvbuildError):
            places = yaml_and_project_paths.parse(raw.decode("utf-8"), name)
            return [*(places.fault(path, message) for path, message in first), *rest]
    return [*(Fault(message, name, None, yaml_and_project_paths.field_name(path)) for path, message in first), *rest]
