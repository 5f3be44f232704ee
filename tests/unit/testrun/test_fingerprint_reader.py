"""Fingerprints from files and from runs: complete ones are read, others are refused with the place of the fault."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from envbuild.testrun import fingerprint_reader
from envbuild.util import yaml_and_project_paths
from envbuild.util.errors import CheckFailed, FingerprintError
from unit.evidence.runs import documents, judged, lines, probe
from unit.testrun.fingerprints import NEW, OLD, Document, changed, load, op


@pytest.mark.parametrize("file", [NEW, OLD])
def test_a_recorded_one_is_read(file: Path) -> None:
    found = fingerprint_reader.read(file)
    assert found.subject == "operations"
    assert found.machine.torch.startswith(file.stem.removeprefix("torch-"))
    assert all(item.teacher or item.note for item in found.ops)


def test_a_committed_one_is_canonical() -> None:
    """Committed fingerprints are formatted as envbuild writes fingerprints, so that diffs of new versions are
    readable."""
    for file in (NEW, OLD):
        assert file.read_text(encoding="utf-8") == json.dumps(load(file), indent=1, sort_keys=True) + "\n"
        assert file.stat().st_size < 200_000


def test_numbers_that_json_has_not_come_back() -> None:
    document = changed(lambda d: op(d, "fp32/silu")["free"].update(samples=["nan", "inf", "-inf", 1.5]))
    observed = fingerprint_reader.Fingerprint.model_validate(document).ops
    samples = next(item.free.samples for item in observed if item.id == "fp32/silu" and item.free)
    assert math.isnan(samples[0]) and samples[1:] == [math.inf, -math.inf, 1.5]


def test_output_to_a_terminal_has_no_escape_sequences() -> None:
    def spoil(document: Document) -> None:
        document["machine"]["gpu"] = {"name": "A\x1b[2J", "compute_capability": "8.0", "sms": 1, "driver": None}

    found = fingerprint_reader.Fingerprint.model_validate(changed(spoil))
    assert found.machine.gpu is not None and found.machine.gpu.name == "A\N{REPLACEMENT CHARACTER}[2J"


Spoil = Callable[[Document], object]
FIRST = "ops[0].teacher.against"
SPOILED: dict[str, tuple[Spoil, str]] = {
    "a text for a number": (lambda d: d["ops"][8]["teacher"].update(rms="1.0"), "ops[8].teacher.rms"),
    "a list for a number": (lambda d: d["ops"][8]["teacher"].update(rms=[1]), "ops[8].teacher.rms"),
    "a negative count": (lambda d: d["ops"][8]["teacher"].update(nonfinite=-1), "ops[8].teacher.nonfinite"),
    "a fraction of a count": (lambda d: d["ops"][0]["teacher"]["against"].update(wrong=0.5), f"{FIRST}.wrong"),
    "a giant shape": (lambda d: d["ops"][0].update(shape=[1 << 60]), "ops[0].shape[0]"),
    "no hash": (lambda d: d["ops"][0]["teacher"].update(sha256="0" * 63), "ops[0].teacher.sha256"),
    "another dtype's name": (lambda d: d["ops"][0].update(dtype="float32; rm"), "ops[0].dtype"),
    "an unknown key": (lambda d: d["ops"][0].update(more=1), "ops[0].more"),
    "a missing key": (lambda d: d["ops"][0].pop("golden"), "ops[0].golden"),
    "an invalid bin": (lambda d: d["ops"][0]["teacher"]["against"]["ulps"].update(x=1), f"{FIRST}.ulps.x"),
    "no operations": (lambda d: d.update(ops=[]), "ops"),
    "one twice": (lambda d: d["ops"].append(d["ops"][0]), "ops"),
    "another subject": (lambda d: d.update(subject="cats"), "subject"),
    "another version": (lambda d: d.update(version=2, ops=5), "version"),
    "too many samples": (lambda d: d["ops"][0]["teacher"].update(samples=[0.0] * 1001), "ops[0].teacher.samples"),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILED)
def test_a_fault_is_reported_with_its_line_and_field(tmp_path: Path, name: str) -> None:
    spoil, field = SPOILED[name]
    file = tmp_path / "x.json"
    file.write_text(json.dumps(changed(spoil), indent=1, sort_keys=True), encoding="utf-8")
    with pytest.raises(FingerprintError) as caught:
        fingerprint_reader.read(file)
    assert caught.value.code == 3
    fault = caught.value.faults[0]
    assert fault.field is not None and fault.field.startswith(field)
    assert fault.file == str(file) and fault.line is not None
    key = field.rpartition(".")[2].partition("[")[0]
    if name != "a missing key":
        assert f'"{key}"' in file.read_text(encoding="utf-8").splitlines()[fault.line - 1 - field.endswith("]")]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0", b"\xff\xfe", b"[", b"[]", b"null", b"5", b'"x"', b"{}", b'{"version": 1}', b"[" * 100_000,
        b'{"version": NaN}', b'{"version": 1e999}', b'{"version": ' + b"9" * 5000 + b"}", b'{"a": 1, "a": 2}',
        b'{"version": 1}\n\t}', b'{"version": true}', b'{\t"version": 1}',
    ],
)  # fmt: skip
def test_no_file_brings_a_traceback(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(content)
    with pytest.raises(FingerprintError):
        fingerprint_reader.read(file)


def test_a_missing_file_and_a_folder_are_reported(tmp_path: Path) -> None:
    for file in (tmp_path / "none.json", tmp_path):
        with pytest.raises(FingerprintError, match="cannot be read"):
            fingerprint_reader.read(file)


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint_reader, "MAX_BYTES", 1000)
    with pytest.raises(FingerprintError, match="is larger than 1000 bytes"):
        fingerprint_reader.read(NEW)
    with pytest.raises(FingerprintError, match="is larger than 1000 bytes"):
        fingerprint_reader.read(Path("/dev/zero"))


def test_the_first_of_many_faults_are_reported(tmp_path: Path) -> None:
    def spoil(document: Document) -> None:
        for found in document["ops"][:25]:
            found.update(shape=[-1], exact=5)

    file = tmp_path / "x.json"
    file.write_text(json.dumps(changed(spoil)), encoding="utf-8")
    with pytest.raises(FingerprintError) as caught:
        fingerprint_reader.read(file)
    assert [fault.message for fault in caught.value.faults[20:]] == ["and 30 more"]


def test_no_lines_are_looked_up_in_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The YAML reader, which knows line numbers, would take minutes for such a file."""
    monkeypatch.setattr(yaml_and_project_paths, "MAX_BYTES", 1000)
    file = tmp_path / "x.json"
    file.write_text(json.dumps(changed(SPOILED["no operations"][0])) + " " * 1000, encoding="utf-8")
    with pytest.raises(FingerprintError) as caught:
        fingerprint_reader.read(file)
    assert [(fault.field, fault.line) for fault in caught.value.faults] == [("ops", None)]


def test_a_syntax_fault_has_its_line(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(b'{"version": 1,\n "x": }')
    with pytest.raises(FingerprintError, match="is not JSON") as caught:
        fingerprint_reader.read(file)
    assert caught.value.faults[0].line == 2


# fingerprints from a run


def run_with(document: Document, *probes: Document) -> Any:
    found = documents(*probes)
    return judged(lines([*found[:-1], {**document, "kind": "fingerprint"}, found[-1]]))


def test_a_runs_fingerprint_is_the_file_that_it_becomes(tmp_path: Path) -> None:
    run = run_with(load())
    assert run.passed
    assert fingerprint_reader.text_of(run) == NEW.read_text(encoding="utf-8")


def test_a_run_without_a_fingerprint_is_reported() -> None:
    with pytest.raises(CheckFailed, match="recorded no fingerprint"):
        fingerprint_reader.text_of(judged(lines(documents())))


@pytest.mark.parametrize("name", SPOILED)
def test_forged_fingerprints_are_not_kept(name: str) -> None:
    run = run_with(changed(SPOILED[name][0]), probe("env.libs"))
    with pytest.raises(CheckFailed, match="fingerprint is invalid"):
        fingerprint_reader.text_of(run)
