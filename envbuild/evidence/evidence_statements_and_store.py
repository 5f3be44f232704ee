"""Stores evidence: an in-toto statement about one image on one GPU model, and the run record that it refers to.

The files are in the user's state folder, by image id. The statement is written last, so an existing statement is
complete. `verified` is computed from the evidence every time, never stored.
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.evidence.proof_rules import CPU, Proof, RequiredProof, failures, judge_model, model_of, record_digest
from envbuild.evidence.run_record_schema import FINISHED, VERSION, Newer, validate_record
from envbuild.facts import database, probe_catalogue_reader
from envbuild.image.image_naming import repository
from envbuild.testrun.run_result import TestRun
from envbuild.testrun.selftest_job import selftest_id
from envbuild.util import user_folders
from envbuild.util.atomic_files import write_atomically

if TYPE_CHECKING:  # evidence on disk can be read without an engine and its client library
    from envbuild.image.docker_engine import Image

STATEMENT = "https://in-toto.io/Statement/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"


_PUBLISHED = ("runner", "engine", "unconfined")


def run_record(
    image: Image,
    wanted: RequiredProof,
    run: TestRun,
    engine: str,
    finished: datetime.datetime,
    machine: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the run record: one document with everything that was measured, named by the sha256 of its bytes.

    `before`: the records of this image that existed already. A later pass overrides a failure listed there,
    independently of any clock. `machine`: processor, cores, memory and system of the engine's machine, if it is this
    machine. `where`: for a run elsewhere, the runner, its engine and the missing confinement; empty for a run here.
    Other data of the runner (node, job, ...) identifies a site's machines: `save` stores it next to the record, because
    the record is published.
    """
    return {
        "version": VERSION,
        "profile": wanted.profile,
        "image": {"id": image.id, "layers": list(image.layers)},
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
        "before": sorted(path.name.partition(".")[0] for path in _folder(image.id).glob("*.statement.json")),
        "gpu": gpu_of(run),
        "engine": engine,
        "machine": dict(machine) if machine else None,
        "where": {key: run.where[key] for key in _PUBLISHED if key in run.where},
        "finished": finished.strftime(FINISHED),
        "seconds": round(run.seconds, 3),
        "start": dict(run.start),
        "environment": dict(run.environment),
        # the output of a script is shown, but not published
        "results": [{key: value for key, value in result.items() if key != "output"} for result in run.results],
        "errors": list(run.errors),
    }


def gpu_of(run: TestRun) -> dict[str, Any] | None:
    """Return the GPU as measured by env.identity: {"model", "name", "count", "uuids", "driver", ...}; None for the CPU.

    `model` is its id in the facts, or its name if the facts do not contain it; `uuids`: the sha256 of each GPU's UUID.
    """
    traits: Mapping[str, Any] = next((r["traits"] for r in run.results if r["probe"] == "env.identity"), {})
    cards = traits.get("gpus")
    if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards) or not cards:
        return None
    name = str(cards[0].get("name"))
    known = database.gpu_by_name(name)
    return {
        **{key: value for key, value in cards[0].items() if key != "uuid_sha256"},
        "model": known.id if known else name,
        "name": name,
        "count": len(cards),
        "uuids": [card.get("uuid_sha256") for card in cards],
        "driver": traits.get("driver"),
    }


def test_statement(record: Mapping[str, Any], record_digest: str) -> dict[str, Any]:
    """Return an in-toto Statement v1 with test-result v0.1, according to its schema; a skipped probe is in no list."""
    model, own = model_of(record), record["selftest"]["own"]
    named = {
        status: [f"{model}/{result['probe']}" for result in record["results"] if result["status"] == status]
        for status in ("passed", "failed")
    }
    missing = [name for name in record["selftest"]["require"] if f"{model}/{name}" not in named["passed"]]
    result = "FAILED" if failures(record) else "WARNED" if missing else "PASSED"
    return {
        "_type": STATEMENT,
        "subject": [{"name": repository(record["profile"]), "digest": {"sha256": _hex(record["image"]["id"])}}],
        "predicateType": TEST_RESULT,
        "predicate": {
            "result": result,
            "configuration": [
                {"name": "lock", "digest": {"sha256": _hex(record["lock"])}},
                {"name": "selftest", "digest": {"sha256": _hex(record["selftest"]["id"])}},
                {"name": "run-record", "digest": {"sha256": record_digest}, "mediaType": "application/json"},
                *({"name": part, "digest": {"sha256": own[part]}} for part in sorted(own)),
            ],
            "passedTests": [] if record["errors"] else named["passed"],
            "failedTests": named["failed"],
        },
    }


def save(record: Mapping[str, Any], where: Mapping[str, Any] | None = None) -> Path:
    """Write the record, then the statement that refers to it; return the statement's path. `where`: everything a runner
    reports about a run elsewhere; it is stored next to them, and nothing is computed from it."""
    text = json.dumps(record, indent=1, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    folder = _folder(record["image"]["id"])
    write_atomically(folder / f"{digest}.record.json", text)
    if where:
        write_atomically(folder / f"{digest}.where.json", json.dumps(dict(where), indent=1, sort_keys=True))
    made = test_statement(record, digest)
    path = folder / f"{digest}.statement.json"
    write_atomically(path, json.dumps(made, indent=1, sort_keys=True))
    return path


def save_envelope(statement_file: Path, envelope: Mapping[str, Any]) -> Path:
    """Write the signed form of a statement next to it: a single file that can be given to others."""
    file = statement_file.with_name(f"{record_digest(statement_file)}.dsse.json")
    write_atomically(file, json.dumps(envelope, sort_keys=True))
    return file


def run_of(statement_file: Path, image_id: str) -> TestRun:
    """Return the run that a proof's statement refers to. Raises FileNotFoundError if it has disappeared."""
    record = record_of(statement_file, image_id)
    return TestRun(
        tuple(record["results"]), record["environment"], record["start"], tuple(record["errors"]), record["seconds"]
    )


def record_of(statement_file: Path, image_id: str | None = None) -> dict[str, Any]:
    """Return the record that a statement refers to; if no image is given, it is the one that names the folder.

    Raises FileNotFoundError if the record has disappeared or is damaged.
    """
    record = _read(statement_file, image_id or f"sha256:{statement_file.parent.name}")
    if record is None:
        raise FileNotFoundError(errno.ENOENT, "is not there, or not whole", str(statement_file))
    return record


def record_text(statement_file: Path) -> bytes:
    """Return the bytes of the record that a statement refers to. Raises OSError."""
    return statement_file.with_name(statement_file.name.replace(".statement.", ".record.")).read_bytes()


def _folder(image_id: str) -> Path:
    return user_folders.state_folder("evidence") / _hex(image_id)


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def newest_proofs(image_id: str, wanted: RequiredProof, models: Sequence[str] = (CPU,)) -> list[Proof]:
    """Return for each model the newest valid evidence, or else the newest evidence with the reason why it is not valid.

    If there is evidence of a later format, no evidence is valid: the later one may report a failed self-test.
    """
    found = stored(image_id)
    known = {path for path, _ in found}
    for path in sorted(_folder(image_id).glob("*.statement.json")):
        if path not in known and (why := _newer(path)):
            return [Proof(model, "stale", path, why) for model in models]
    return [judge_model(model, wanted, found) for model in models]


def ever_proved(image_id: str, name: str, locks: Collection[str]) -> bool:
    """Whether this image was ever verified for profile `name` and one of `locks`, by any version of the self-test."""
    return any(
        record["profile"] == name and record["lock"] in locks and _result(record) == "PASSED"
        for _, record in stored(image_id)
    )


def stored(image_id: str) -> list[tuple[Path, dict[str, Any]]]:
    """Return all intact evidence on an image, the newest first."""
    paths = _folder(image_id).glob("*.statement.json")
    return newest_first((path, record) for path in paths if (record := _read(path, image_id)))


def newest_first(found: Iterable[tuple[Path, dict[str, Any]]]) -> list[tuple[Path, dict[str, Any]]]:
    return sorted(found, key=lambda item: str(item[1]["finished"]), reverse=True)


def _result(record: Mapping[str, Any]) -> str:
    return str(test_statement(record, "")["predicate"]["result"])


def _newer(path: Path) -> str | None:
    """Return why a statement's record cannot be read, if its format is newer; else None."""
    try:
        validate_record(json.loads(record_text(path)))
    except Newer as newer:
        return str(newer)
    except (OSError, ValueError, RecursionError):
        pass
    return None


def _read(path: Path, image_id: str) -> dict[str, Any] | None:
    """Return the record of a statement; None unless both, their file names and the image match byte for byte."""
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
        text = record_text(path)
        record = validate_record(json.loads(text))
        digest = hashlib.sha256(text).hexdigest()
        whole = stated == test_statement(record, digest) and path.name == f"{digest}.statement.json"
        return record if whole and record["image"]["id"] == image_id else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
