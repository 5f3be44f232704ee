"""Targets: output of a self-test in a hostile image, and fingerprints."""

from __future__ import annotations

import contextlib
import copy
import datetime
import json
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from pydantic import ValidationError
from unit.evidence.runs import NAMES, NONCE, documents, line, lines, output, probe
from unit.support import image_of, sha
from unit.testrun import fingerprints

from envbuild.audit.environment_file_hasher import EnvironmentFiles, FolderFiles, InterpreterReport
from envbuild.evidence import environment_measurement, evidence_statements_and_store, run_record_schema
from envbuild.evidence.environment_record import MeasuredEnvironment, environment_differences
from envbuild.evidence.proof_rules import EvidenceRequirements
from envbuild.report import fingerprint_comparison
from envbuild.report.fingerprint_comparison import FingerprintRow
from envbuild.selftest.harness import frame_and_message_streams
from envbuild.testrun import fingerprint_reader, junit_writer, output_judge
from envbuild.testrun.fingerprint_reader import Fingerprint
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import CheckFailed, UsageError
from envbuild.util.json_output_types import plain
from fuzz.strategies import BYTES, JSON, Draw, as_json, files, json_files, spoiled, trees
from fuzz.target import Target

CARDS = {"gpus": [{"name": "NVIDIA H20", "uuid_sha256": "a" * 64}], "driver": "550.54.15"}
RUNS: list[Any] = [
    documents(),
    documents(probe("env.identity", traits=CARDS), probe("gemm.crash", "failed"), probe("train.step", "skipped")),
    [*documents()[:2], {"kind": "fingerprint", "version": 1}, *documents()[2:]],
]
WANTED = EvidenceRequirements("sample", f"sha256:{sha('lock')}", "quick", NAMES, {"allow_tf32": False})
NOW = datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC)


@st.composite
def _outputs(draw: Draw) -> tuple[bytes, int | None, bool]:
    """Draw complete frames with arbitrary content; now and then some bytes are changed."""
    found = draw(trees(RUNS))
    frames_of = found if isinstance(found, list) else [found]
    raw = b"".join(line(as_json(one), number) for number, one in enumerate(frames_of))
    if draw(st.integers(0, 3)) == 0:
        raw = draw(spoiled(st.just(raw), (*JSON, *BYTES, *lines(documents()), b"ENVBUILD", NONCE.encode(), b"\n")))
    return raw, draw(st.sampled_from((0, 0, 0, 5, 1, 137, None))), draw(st.integers(0, 9)) == 0


def _selftest(value: tuple[bytes, int | None, bool]) -> None:
    """Judge the output, read its progress lines, report it, and make a run record of it, which must be the same after
    it is encoded and read."""
    stdout, code, timed_out = value
    progress = [found for one in stdout.split(b"\n") if (found := output_judge.progress_of(one, NONCE))]
    run = output_judge.judge_output(output(stdout, exit_code=code, timed_out=timed_out), NONCE, NAMES)
    assert not run.passed or (code == 0 and len(progress) == len(run.results) + 1)
    json.dumps(plain(run.summary()))
    junit_writer.render("sample", run, {})
    try:
        record = evidence_statements_and_store.run_record(image_of(), WANTED, run, "docker 26", NOW)
    except CheckFailed:
        assert evidence_statements_and_store.gpu_of(run), "only a card's traits may be anything"
        return
    stated = evidence_statements_and_store.test_statement(record, sha("record"))
    assert stated.predicate["result"] != "PASSED" or run.passed
    json.dumps(stated.document())
    read = run_record_schema.validate_record(strict_and_canonical_json.parse(record.encoded.encode(), "the record"))
    assert read == record and read.encoded == record.encoded
    with contextlib.suppress(CheckFailed):
        fingerprint_reader.text_of(run)


def _messages(value: tuple[bytes, int]) -> None:
    """The messages do not depend on how the stream is split."""
    raw, size = value
    whole, pieces = frame_and_message_streams.Unpacker(), frame_and_message_streams.Unpacker()
    expected = whole.feed(raw)
    found = [one for at in range(0, len(raw), size) for one in pieces.feed(raw[at : at + size])]
    assert found == expected and pieces.cut == whole.cut


_STREAM = [
    frame_and_message_streams.pack(frame_and_message_streams.ANNOUNCE, b"a step")
    + frame_and_message_streams.pack(frame_and_message_streams.NOTE, b"a fault")
    + frame_and_message_streams.pack(frame_and_message_streams.RESULT, b"{}"),
    frame_and_message_streams.pack(frame_and_message_streams.ENVIRONMENT, b"{}") * 3,
]


@cache
def prints_seeds() -> list[dict[str, Any]]:
    """Return the recorded fingerprints that have few operations and samples."""
    found = []
    for file in (fingerprints.NEW, fingerprints.OLD):
        document = fingerprints.load(file)
        document["ops"] = document["ops"][:: max(1, len(document["ops"]) // 3)][:4]
        for op in document["ops"]:
            for seen in filter(None, (op["teacher"], op["free"])):
                seen["samples"] = seen["samples"][:4]
        found.append(document)
    return found


def _fingerprint(raw: bytes) -> None:
    """Read a fingerprint, and compare it with itself and, in both directions, with the fingerprints of which the inputs
    are changed copies."""
    file = Path("print.json")
    file.write_bytes(raw)
    found = fingerprint_reader.read(file)
    for seed in prints_seeds():
        for a, b in ((found, _model(seed)), (_model(seed), found), (found, found)):
            try:
                result = fingerprint_comparison.compare_fingerprints(a, b)
                sides = (FingerprintRow("a", a.machine), FingerprintRow("b", b.machine))
                json.dumps(plain(fingerprint_comparison.document(result, *sides)), allow_nan=False)
            except UsageError:
                continue


def _model(document: dict[str, Any]) -> Fingerprint:
    return Fingerprint.model_validate(copy.deepcopy(document))


RECORDS = [
    b"torch/__init__.py,sha256=x,1\ntorch/lib/x.so,sha256=y,2\ntorch-1.dist-info/METADATA,,\n../../bin/t,,\n",
    b'"torch/__init__.py",,\ntorch/__pycache__/a.pyc,,\ntorch-1.dist-info/RECORD,,\n',
]
REPORT: dict[str, Any] = {
    "version": "CPython 3.11.2", "executable": "/base/bin/python", "prefixes": ["/env", "/base"],
    "standard_library": "/base/lib", "path": ["/env/site"], "loader_folders": ["/env/lib"],
    "library_path": [], "preloaded": [], "cuda_libraries": ["/cuda/libcudart.so"], "libc": "/lib/libc.so.6",
    "libstdcxx": None, "libpython": None, "driver": "550.54", "gpus": ["NVIDIA H20"], "cut": False,
}  # fmt: skip
_SITE = {"torch/__init__.py": sha("a"), "torch/lib/x.so": sha("b"), "torch-1.dist-info/RECORD": sha("c"), "x.pth": ""}


def _environment(value: tuple[bytes, Any]) -> None:
    """Whatever RECORD and the interpreter say, a changed file is noticed."""
    raw, reported = value
    try:
        report = InterpreterReport.model_validate(reported)
    except ValidationError:
        return
    records = {"torch-1.dist-info/RECORD": raw.decode("utf-8", "replace")}
    single = dict.fromkeys([*report.cuda_libraries, *report.preloaded, report.executable, report.libc or "",
                            report.libstdcxx or "", report.libpython or ""], sha("l"))  # fmt: skip

    def measured(**changed: str) -> MeasuredEnvironment:
        site = FolderFiles("/env/site", {**_SITE, "x.pth": sha("p"), **changed}, frozenset(), records)
        files = EnvironmentFiles(report, (site,), FolderFiles("/base/lib", {}), (), single)
        return environment_measurement.measure_environment(files, {"torch": "1"})

    before = measured()
    assert MeasuredEnvironment.model_validate(json.loads(before.model_dump_json())) == before
    for path in ("torch/__init__.py", "torch/lib/x.so", "x.pth", "new.py"):
        changed = measured(**{path: sha("changed")})
        assert environment_differences(before, changed, with_gpu=False), path


def _json(raw: bytes) -> None:
    """Accepted documents must have the same value for every other JSON reader."""
    found = strict_and_canonical_json.parse(raw, "it")
    assert json.loads(json.dumps(found, allow_nan=False)) == found


TARGETS = (
    Target("self-test output", _outputs(), _selftest, 9),
    Target("probe messages", st.tuples(files(_STREAM, (*BYTES, b"A", b"\0\0\0\1")), st.integers(1, 9)), _messages, 68),
    Target("fingerprint", json_files(prints_seeds()), _fingerprint, 9),
    Target("environment", st.tuples(files(RECORDS, (b"..", b"/", b'"', *BYTES)), trees([REPORT])), _environment, 30),
    Target("JSON", st.one_of(json_files(RUNS[0]), st.binary(max_size=100)), _json, 68),
)
