"""Stores evidence: an in-toto statement about one image or environment on one GPU model, and the run record that the
statement refers to.

The files are in the user's state folder, in a subfolder named after the image id or the digest of the environment. The
statement is written after the run record, so the record of an existing statement is complete. Whether an image is
verified is never stored, but computed from the evidence every time.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from envbuild.evidence.environment_record import MeasuredEnvironment
from envbuild.evidence.proof_rules import (
    CPU,
    EvidenceRequirements,
    Proof,
    failures,
    judge_environment,
    judge_model,
    model_of,
    record_digest,
)
from envbuild.evidence.run_record_schema import FINISHED, VERSION, Newer, RecordedGpu, RunRecord, validate_record
from envbuild.facts import database, probe_catalogue_reader
from envbuild.image.image_naming import repository
from envbuild.testrun.run_result import RunLocation, TestRun
from envbuild.testrun.selftest_job import selftest_id
from envbuild.util import user_folders
from envbuild.util.atomic_files import write_atomically
from envbuild.util.errors import CheckFailed, printable

if TYPE_CHECKING:  # reading evidence must not import the engine's client library
    from envbuild.image.docker_engine import Image

STATEMENT = "https://in-toto.io/Statement/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
_PUBLISHED = {"runner", "engine", "unconfined"}


@dataclass(frozen=True)
class Statement:
    """An in-toto Statement v1. `subjects`: name and sha256 (hex) of each subject."""

    subjects: tuple[tuple[str, str], ...]
    predicate_type: str
    predicate: Mapping[str, object]

    def document(self) -> dict[str, object]:
        return {
            "_type": STATEMENT,
            "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in self.subjects],
            "predicateType": self.predicate_type,
            "predicate": dict(self.predicate),
        }


def run_record(
    tested: Image | MeasuredEnvironment,
    wanted: EvidenceRequirements,
    run: TestRun,
    engine: str,
    finished: datetime.datetime,
    machine: Mapping[str, object] | None = None,
) -> RunRecord:
    """Return the run record: one document with everything that the run measured.

    `machine`: processor, cores, memory and system of the engine's machine, if that is this machine.

    In the record, `before` lists the existing records about the same image or environment. A pass overrides a failure
    that it lists, independently of any clock. `where` has the runner, its engine and the missing confinement; it is
    empty for a run in this machine's engine. Other data of the runner (node, job, ...) would identify a site's machines
    in the published record, so `save` stores it in a separate file.

    Raises CheckFailed if the self-test reported data that a record cannot contain.
    """
    subject: dict[str, object]
    if isinstance(tested, MeasuredEnvironment):
        subject = {"installed": tested.model_dump()}
    else:
        subject = {"image": {"id": tested.id, "layers": list(tested.layers)}}
    document = {
        "version": VERSION,
        "profile": wanted.profile,
        **subject,
        "lock": wanted.lock,
        "selftest": {
            "id": selftest_id(),
            "versions": dict(probe_catalogue_reader.versions()),
            "level": wanted.level,
            "require": list(wanted.require),
            "settings": dict(wanted.settings),
            "gpu_count": wanted.gpu_count,
            "transport": wanted.transport,
            "own": dict(wanted.own),
            "demands": dict(wanted.demands),
        },
        "before": sorted(path.name.partition(".")[0] for path in _folder(tested.id).glob("*.statement.json")),
        "gpu": _recorded_gpu(run),
        "engine": engine,
        "machine": dict(machine) if machine else None,
        "where": run.where.model_dump(mode="json", include=_PUBLISHED, exclude_unset=True) if run.where else {},
        "finished": finished.strftime(FINISHED),
        "seconds": round(run.seconds, 3),
        "start": dict(run.start),
        "environment": dict(run.environment),
        # the output of a profile's own script is shown, but not published
        "results": [result.model_dump(exclude={"output"}, exclude_unset=True) for result in run.results],
        "errors": list(run.errors),
    }
    try:
        return validate_record(document)
    except ValidationError as error:
        fault = error.errors()[0]
        where = printable(".".join(map(str, fault["loc"])))
        raise CheckFailed(f"the self-test's result cannot be recorded: {where}: {fault['msg']}") from None


def gpu_of(run: TestRun) -> RecordedGpu | None:
    """Return the GPUs that the probe env.identity measured; None if it measured none, as in a run on the CPU."""
    traits, cards = _measured_gpus(run)
    if not cards:
        return None
    name, driver = printable(str(cards[0].get("name"))), traits.get("driver")
    known = database.gpu_by_name(name)
    return RecordedGpu(
        model=known.id if known else name,
        name=name,
        count=len(cards),
        driver=None if driver is None else printable(str(driver)),
    )


def _recorded_gpu(run: TestRun) -> dict[str, object] | None:
    """Return the fields of `gpu_of`, all other measurements of the first GPU, and `uuids`: the sha256 of each GPU's
    UUID."""
    gpu, (_, cards) = gpu_of(run), _measured_gpus(run)
    if gpu is None:
        return None
    first = {key: value for key, value in cards[0].items() if key != "uuid_sha256"}
    return {**first, **gpu.model_dump(), "uuids": [card.get("uuid_sha256") for card in cards]}


def _measured_gpus(run: TestRun) -> tuple[Mapping[str, object], list[dict[str, object]]]:
    """Return all measurements of the probe env.identity, and those of each GPU. If the list of GPUs is invalid, it is
    returned empty."""
    traits = next((result.traits for result in run.results if result.probe == "env.identity"), {})
    cards = traits.get("gpus")
    return traits, cards if isinstance(cards, list) and all(isinstance(card, dict) for card in cards) else []


def test_outcome(record: RunRecord) -> str:
    """Return FAILED if the run failed, else WARNED if a required probe did not pass, else PASSED."""
    if failures(record):
        return "FAILED"
    return "PASSED" if set(record.selftest.require) <= set(record.by_status("passed")) else "WARNED"


def test_statement(record: RunRecord, record_digest: str) -> Statement:
    """Return the in-toto test result v0.1 about a record. `record_digest`: the record's sha256, hex."""
    described = {"name": "run-record", "digest": {"sha256": record_digest}, "mediaType": "application/json"}
    subject = (subject_name(record), _hex(record.subject))
    return Statement((subject,), TEST_RESULT, test_predicate(record, described))


def subject_name(record: RunRecord) -> str:
    """Return the name of a record's subject: the repository of an image, or `environment/PROFILE`."""
    return f"environment/{record.profile}" if record.installed else repository(record.profile)


def test_predicate(record: RunRecord, described: Mapping[str, object]) -> dict[str, object]:
    """Return the predicate of a test result. The predicate does not list skipped probes. `described`: the resource
    descriptor of the record."""
    model, own = model_of(record), record.selftest.own
    passed, failed = ([f"{model}/{name}" for name in record.by_status(status)] for status in ("passed", "failed"))
    return {
        "result": test_outcome(record),
        "configuration": [
            {"name": "lock", "digest": {"sha256": _hex(record.lock)}},
            {"name": "selftest", "digest": {"sha256": _hex(record.selftest.id)}},
            dict(described),
            *({"name": part, "digest": {"sha256": own[part]}} for part in sorted(own)),
        ],
        "passedTests": [] if record.errors else passed,
        "failedTests": failed,
    }


def save(record: RunRecord, where: RunLocation | None = None) -> Path:
    """Write the record, then the statement that refers to it, and return the statement's path. `where`: all data that a
    cluster's runner reported about the run. These data are written to a third file, which no code reads."""
    text = record.encoded
    digest = hashlib.sha256(text.encode()).hexdigest()
    folder = _folder(record.subject)
    write_atomically(folder / f"{digest}.record.json", text)
    if where:
        write_atomically(folder / f"{digest}.where.json", json.dumps(where.document(), indent=1, sort_keys=True))
    path = folder / f"{digest}.statement.json"
    write_atomically(path, json.dumps(test_statement(record, digest).document(), indent=1, sort_keys=True))
    return path


def save_envelope(statement_file: Path, envelope: Mapping[str, object]) -> Path:
    """Write the signed form of a statement next to the statement. It is a single file that can be given to others."""
    file = statement_file.with_name(f"{record_digest(statement_file)}.dsse.json")
    write_atomically(file, json.dumps(envelope, sort_keys=True))
    return file


def run_of(statement_file: Path, image_id: str) -> TestRun:
    """Return the run that a statement refers to. Raises FileNotFoundError if its record is missing or damaged."""
    record = record_of(statement_file, image_id)
    return TestRun(tuple(record.results), record.environment, record.start, tuple(record.errors), record.seconds)


def record_of(statement_file: Path, image_id: str | None = None) -> RunRecord:
    """Return the record that a statement refers to. `image_id`: if None, the name of the statement's folder.

    Raises FileNotFoundError if the record is missing or damaged.
    """
    record = _read(statement_file, image_id or f"sha256:{statement_file.parent.name}")
    if record is None:
        raise FileNotFoundError(errno.ENOENT, "is missing or incomplete", str(statement_file))
    return record


def record_text(statement_file: Path) -> bytes:
    """Return the bytes of the record that a statement refers to. Raises OSError."""
    return statement_file.with_name(statement_file.name.replace(".statement.", ".record.")).read_bytes()


def _folder(image_id: str) -> Path:
    return user_folders.state_folder("evidence") / _hex(image_id)


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def newest_proofs(
    image_id: str,
    wanted: EvidenceRequirements,
    models: Sequence[str] = (CPU,),
    environment: MeasuredEnvironment | None = None,
) -> list[Proof]:
    """Return for each GPU model the newest valid evidence. Without valid evidence, return evidence with the reason why
    it is not valid: the newest that reports a failure which counts, otherwise the newest.

    `environment`: the environment, if the evidence is not about an image; only evidence about exactly this environment
    is valid. If some evidence has a newer format than this envbuild reads, no evidence is valid, since it may report a
    failed self-test.
    """
    found = stored(image_id)
    known = {path for path, _ in found}
    for path in sorted(_folder(image_id).glob("*.statement.json")):
        if path not in known and (why := _newer(path)):
            return [Proof(model, "stale", path, why) for model in models]
    if environment:
        return [judge_environment(model, wanted, found, environment) for model in models]
    return [judge_model(model, wanted, found) for model in models]


def ever_proved(image_id: str, name: str, locks: Collection[str]) -> bool:
    """Whether a run of any version of the self-test ever passed for this image, the profile `name` and one of
    `locks`."""
    return any(
        record.profile == name and record.lock in locks and test_outcome(record) == "PASSED"
        for _, record in stored(image_id)
    )


def stored(image_id: str) -> list[tuple[Path, RunRecord]]:
    """Return (statement file, record) for all intact evidence about an image or environment, the newest first."""
    paths = _folder(image_id).glob("*.statement.json")
    return newest_first((path, record) for path in paths if (record := _read(path, image_id)))


def stored_subjects() -> list[str]:
    """Return the id of every image and environment for which a folder of evidence exists, sorted."""
    folder = user_folders.state_folder("evidence")
    names = (path.name for path in folder.iterdir()) if folder.is_dir() else ()
    return sorted(f"sha256:{name}" for name in names if re.fullmatch("[0-9a-f]{64}", name))


def newest_first(found: Iterable[tuple[Path, RunRecord]]) -> list[tuple[Path, RunRecord]]:
    return sorted(found, key=lambda item: item[1].finished, reverse=True)


def _newer(path: Path) -> str | None:
    """Return a message if the format of a statement's record is newer than this envbuild reads; else None."""
    try:
        validate_record(json.loads(record_text(path)))
    except Newer as newer:
        return str(newer)
    except (OSError, ValueError, RecursionError):
        pass
    return None


def _read(path: Path, image_id: str) -> RunRecord | None:
    """Return the record that a statement refers to. Returns None unless the record gives exactly this statement, and
    the record's digest and image match the statement's file name and `image_id`."""
    try:
        return _intact_record(path.read_text(encoding="utf-8"), record_text(path), path.name, image_id)
    except (OSError, ValueError, RecursionError):
        return None


@lru_cache(maxsize=64)  # several steps of a command read the same evidence
def _intact_record(statement: str, text: bytes, name: str, image_id: str) -> RunRecord | None:
    record = validate_record(json.loads(text))
    digest = hashlib.sha256(text).hexdigest()
    whole = json.loads(statement) == test_statement(record, digest).document() and name == f"{digest}.statement.json"
    return record if whole and record.subject == image_id else None
