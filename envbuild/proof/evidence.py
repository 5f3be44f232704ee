"""Evidence: an in-toto statement about one image on one GPU model, and the run record that it points at.

On disk under the user's state folder, by image id; the statement is written last, so one that is there is whole.
`verified` is computed from it every time, never stored.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild import settings
from envbuild.image.names import repository
from envbuild.plan import facts
from envbuild.plan.probes import LEVELS
from envbuild.plan.store import write_atomically
from envbuild.proof.job import selftest_id
from envbuild.proof.shape import FINISHED, checked
from envbuild.proof.testrun import TestRun

if TYPE_CHECKING:  # evidence on disk is read without an engine, and without its client
    from envbuild.image.engine import Image

STATEMENT = "https://in-toto.io/Statement/v1"
TEST_RESULT = "https://in-toto.io/attestation/test-result/v0.1"
CPU = "cpu"


@dataclass(frozen=True)
class Proof:
    """What the evidence says of one GPU model ("cpu" where the profile names none).

    `state`: proved, stale (the evidence is for another self-test or level, lacks a probe, or says no), or missing.
    `failed`: the self-test said no, and nothing since then said yes.
    """

    model: str
    state: str
    evidence: Path | None
    reason: str
    failed: bool = False


@dataclass(frozen=True)
class Wanted:
    """What counts as a proof: this lock, these probes, this level or a higher one, these settings of torch.

    `gpu_count`: so many cards or more were there; `transport`: it was required of NCCL; None: it may have been.
    `own`: the sha256 of what the profile adds to the self-test, by "script" and "shapes".
    `demands`: by name, what was asked for at least (job.demands).
    """

    profile: str
    lock: str
    level: str
    require: tuple[str, ...]
    settings: Mapping[str, bool]
    gpu_count: int = 1
    transport: str | None = None
    own: Mapping[str, str] = field(default_factory=dict)
    demands: Mapping[str, float] = field(default_factory=dict)


def as_recorded(record: Mapping[str, Any]) -> Wanted:
    """What a record was made for: whether it meets that is asked where nothing else says what is wanted."""
    made = record["selftest"]
    return Wanted(
        profile=record["profile"],
        lock=record["lock"],
        level=made["level"],
        require=tuple(made["require"]),
        settings=made["settings"],
        gpu_count=made["gpu_count"],
        transport=made["transport"],
        own=made["own"],
        demands=made["demands"],
    )


def run_record(image: Image, wanted: Wanted, run: TestRun, engine: str, finished: datetime.datetime) -> dict[str, Any]:
    """Everything that was measured, in one document; named by the sha256 of its bytes.

    `before`: the records of this image that were there already. A later pass outweighs a failure that it names there;
    no clock decides.
    """
    return {
        "version": 1,
        "profile": wanted.profile,
        "image": {"id": image.id, "layers": list(image.layers)},
        "lock": wanted.lock,
        "selftest": {
            "id": selftest_id(),
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
        "finished": finished.strftime(FINISHED),
        "seconds": round(run.seconds, 3),
        "start": dict(run.start),
        "environment": dict(run.environment),
        "results": [dict(result) for result in run.results],
        "errors": list(run.errors),
    }


def gpu_of(run: TestRun) -> dict[str, Any] | None:
    """The card as env.identity measured it: {"model", "name", "count", "uuids", "driver", ...}; None for the CPU.

    `model` is its id in the facts, or its name where they do not know it; `uuids` are the sha256 of each card's.
    """
    traits: Mapping[str, Any] = next((r["traits"] for r in run.results if r["probe"] == "env.identity"), {})
    cards = traits.get("gpus")
    if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards) or not cards:
        return None
    name = str(cards[0].get("name"))
    known = facts.gpu_by_name(name)
    return {
        **{key: value for key, value in cards[0].items() if key != "uuid_sha256"},
        "model": known.id if known else name,
        "name": name,
        "count": len(cards),
        "uuids": [card.get("uuid_sha256") for card in cards],
        "driver": traits.get("driver"),
    }


def model_of(record: Mapping[str, Any]) -> str:
    return str(record["gpu"]["model"]) if record["gpu"] else CPU


def _sharing(model: str) -> frozenset[str]:
    """The models whose proof is also this one's."""
    gpu = facts.gpus().get(model)
    return frozenset(other.id for other in facts.family(gpu)) if gpu else frozenset({model})


def statement(record: Mapping[str, Any], record_digest: str) -> dict[str, Any]:
    """In-toto Statement v1 with test-result v0.1, as its schema has it; a probe that did not run is in no list."""
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


def save(record: Mapping[str, Any]) -> Path:
    """Write the record, then the statement that points at it; returns the statement's path."""
    text = json.dumps(record, indent=1, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    folder = _folder(record["image"]["id"])
    write_atomically(folder / f"{digest}.record.json", text)
    made = statement(record, digest)
    path = folder / f"{digest}.statement.json"
    write_atomically(path, json.dumps(made, indent=1, sort_keys=True))
    return path


def save_envelope(statement_file: Path, envelope: Mapping[str, Any]) -> Path:
    """Write the signed form of a statement beside it: one file that can be given to others."""
    file = statement_file.with_name(f"{_digest(statement_file)}.dsse.json")
    write_atomically(file, json.dumps(envelope, sort_keys=True))
    return file


def run_of(statement_file: Path, image_id: str) -> TestRun:
    """The run that a proof's statement points at. Raises FileNotFoundError if it went away meanwhile."""
    record = _read(statement_file, image_id)
    if record is None:
        raise FileNotFoundError(statement_file)
    return TestRun(
        tuple(record["results"]), record["environment"], record["start"], tuple(record["errors"]), record["seconds"]
    )


def record_text(statement_file: Path) -> bytes:
    """The record that a statement points at, as it was written. Raises OSError."""
    return statement_file.with_name(statement_file.name.replace(".statement.", ".record.")).read_bytes()


def _folder(image_id: str) -> Path:
    return settings.state_folder("evidence") / _hex(image_id)


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")


def prove(image_id: str, wanted: Wanted, models: Sequence[str] = (CPU,)) -> list[Proof]:
    """For each model the newest evidence that counts, else the newest with the reason why it does not."""
    found = stored(image_id)
    return [judge(model, wanted, found) for model in models]


def ever_proved(image_id: str, name: str, locks: Collection[str]) -> bool:
    """Whether this image was once proved as profile `name`, for one of `locks`, by whatever self-test."""
    return any(
        record["profile"] == name and record["lock"] in locks and _result(record) == "PASSED"
        for _, record in stored(image_id)
    )


def stored(image_id: str) -> list[tuple[Path, dict[str, Any]]]:
    """Every whole piece of evidence on an image, the newest first."""
    paths = _folder(image_id).glob("*.statement.json")
    return newest_first((path, record) for path in paths if (record := _read(path, image_id)))


def newest_first(found: Iterable[tuple[Path, dict[str, Any]]]) -> list[tuple[Path, dict[str, Any]]]:
    return sorted(found, key=lambda item: str(item[1]["finished"]), reverse=True)


def _result(record: Mapping[str, Any]) -> str:
    return str(statement(record, "")["predicate"]["result"])


def judge(model: str, wanted: Wanted, found: Sequence[tuple[Path, dict[str, Any]]]) -> Proof:
    """What statements (named by their records' digests, the newest first) and records say of one model."""
    found = [(path, record) for path, record in found if model_of(record) in _sharing(model)]
    denials = {_digest(path): (path, said) for path, record in found if (said := _denial(record, wanted))}
    denied = stale = None
    for path, record in found:
        reason = _objection(record, wanted)
        later = [denials[digest] for digest in denials if digest not in record["before"]]
        if reason is None and not later:
            return Proof(model, "proved", path, f"proved on {_device(record)}, {record['finished'][:10]}")
        if reason is None:
            path, said = later[0]
            denied = denied or Proof(
                model, "stale", path, f"the self-test failed since: {', '.join(said)}", failed=True
            )
        else:
            stale = stale or Proof(model, "stale", path, reason, failed=bool(failures(record)))
    return denied or stale or never(model)


def never(model: str) -> Proof:
    return Proof(model, "missing", None, "never proved")


def _device(record: Mapping[str, Any]) -> str:
    return str(record["gpu"]["name"]) if record["gpu"] else "the CPU"


def _denial(record: Mapping[str, Any], wanted: Wanted) -> list[str]:
    """What speaks against the image: probes that failed, whoever ran them; faults of a run only for its own profile."""
    if record["profile"] == wanted.profile:
        return failures(record)
    return [result["probe"] for result in record["results"] if result["status"] == "failed"]


def _digest(statement_file: Path) -> str:
    return statement_file.name.partition(".")[0]


def failures(record: Mapping[str, Any]) -> list[str]:
    """The probes that failed, and the faults of the run; that nothing passed is one."""
    failed = [result["probe"] for result in record["results"] if result["status"] == "failed"]
    passed = any(result["status"] == "passed" for result in record["results"])
    return [*failed, *record["errors"], *([] if passed else ["no probe passed"])]


def _objection(record: Mapping[str, Any], wanted: Wanted) -> str | None:
    """Why this evidence does not count, None if it does."""
    if record["lock"] != wanted.lock:
        return "proved for another lock"
    if failed := failures(record):
        return f"the self-test failed: {', '.join(failed)}"
    if record["selftest"]["id"] not in {selftest_id(), *facts.released_selftests()}:
        return "proved by an older self-test"
    if record["selftest"]["settings"] != dict(wanted.settings):
        return "proved with other settings of torch"
    if record["selftest"]["gpu_count"] < wanted.gpu_count:
        return f"proved for fewer GPUs than {wanted.gpu_count} that work together"
    if wanted.transport not in (None, record["selftest"]["transport"]):
        return f"proved without the transport {wanted.transport} being asked for"
    own, said = record["selftest"]["own"], {"script": "another script", "shapes": "other shapes"}
    if other := [words for part, words in said.items() if own.get(part) != wanted.own.get(part)]:
        return f"proved with {' and '.join(other)}"
    demanded = record["selftest"]["demands"]
    less = [name for name, least in wanted.demands.items() if demanded.get(name, 0) < least]
    if less:
        return f"proved with less asked of {', '.join(less)}"
    if LEVELS.index(record["selftest"]["level"]) < LEVELS.index(wanted.level):
        return f"proved at level {record['selftest']['level']}, {wanted.level} is asked for"
    passed = {result["probe"] for result in record["results"] if result["status"] == "passed"}
    missing = [name for name in wanted.require if name not in passed]
    return f"required probes did not run: {', '.join(missing)}" if missing else None


def _read(path: Path, image_id: str) -> dict[str, Any] | None:
    """The record behind a statement; None unless the two, their names and the image fit together to the byte."""
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
        text = record_text(path)
        record = checked(json.loads(text))
        digest = hashlib.sha256(text).hexdigest()
        whole = stated == statement(record, digest) and path.name == f"{digest}.statement.json"
        return record if whole and record["image"]["id"] == image_id else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
