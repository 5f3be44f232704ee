"""Evidence from others: its signers, its content, and the table made from it."""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envbuild.attest import community_evidence, in_toto_statements, keys_and_signatures
from envbuild.attest.community_evidence import EvidenceRow
from envbuild.attest.in_toto_statements import Subject
from envbuild.evidence import evidence_statements_and_store
from envbuild.report import profile_markdown_tables
from envbuild.util.errors import CheckFailed, OutOfDate
from unit.evidence.runs import passed_run, probe, run_on
from unit.site import Site, new_key, proved
from unit.support import envbuild

ROOT = Path(__file__).parents[3]
NOW = datetime.datetime.now(datetime.UTC)


@pytest.fixture
def site(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with proved(project, monkeypatch) as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "evidence" / "keys").mkdir(parents=True)
    return tmp_path / "evidence"


def send(site: Site, folder: Path, who: str, run: Any = None, file: str = "") -> Path:
    """Do what docs/guides/share-proof.md asks for: sign a run with the configured key, and add the public key."""
    signer = keys_and_signatures.configured_signer()
    assert signer
    path = site.prove(run or run_on("NVIDIA H20"))
    record = dict(evidence_statements_and_store.stored(site.engine.image.id))[path]
    made = in_toto_statements.test_result(
        record, evidence_statements_and_store.record_text(path), Subject("envbuild/sample", record.subject)
    )
    sent = folder / f"{file or f'sample-{who}'}.dsse.json"
    shutil.copy(
        evidence_statements_and_store.save_envelope(
            path, keys_and_signatures.seal(in_toto_statements.canonical(made), signer)
        ),
        sent,
    )
    (folder / "keys" / f"{who}.pub").write_bytes(signer.public.pem)
    return sent


def test_a_file_that_was_sent_is_a_row(site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_key(monkeypatch)
    sent = send(site, folder, "alice")
    new_key(monkeypatch)
    send(site, folder, "bob", passed_run())
    day = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    found = community_evidence.read(folder, NOW)
    what = (site.lock.id, site.engine.image.id, ())
    assert found == [
        EvidenceRow("CPU", "sample", "bob", day, *what),
        EvidenceRow("NVIDIA H20", "sample", "alice", day, *what),
    ]
    assert profile_markdown_tables.proofs_table(found).splitlines() == [
        "| GPU | Profile | Who | When | Valid? |",
        "| --- | --- | --- | --- | --- |",
        f"| CPU | sample | bob | {day} | yes |",
        f"| NVIDIA H20 | sample | alice | {day} | yes |",
    ]
    assert envbuild("verify", "--evidence", str(sent), "--key", str(folder / "keys" / "alice.pub")).code == 0


def test_invalid_and_outdated_proofs_come_with_a_reason(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_key(monkeypatch)
    send(site, folder, "a", passed_run(probe("env.libs", "failed")), "failed")
    send(site, folder, "a", run_on("NVIDIA H20", cublas="12.1.3.1"), "known")
    objections = {row.gpu: row.objections for row in community_evidence.read(folder, NOW)}
    assert "the self-test failed: env.libs" in objections["CPU"][0]
    assert "cublas-hopper-fpe" in objections["NVIDIA H20"][0]
    assert "| yes |" not in profile_markdown_tables.proofs_table(community_evidence.read(folder, NOW))


def test_every_file_must_be_signed_evidence(site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_key(monkeypatch)
    sent = send(site, folder, "alice")
    stranger = json.loads(sent.read_text(encoding="utf-8"))
    text = keys_and_signatures.envelope_payload(stranger).replace(b"PASSED", b"WARNED")
    changed = {**keys_and_signatures.seal(text, None), "signatures": stranger["signatures"]}
    new_key(monkeypatch)
    other = keys_and_signatures.seal(
        keys_and_signatures.envelope_payload(stranger), keys_and_signatures.configured_signer()
    )
    nothing = keys_and_signatures.seal(b'{"_type":"x"}', keys_and_signatures.configured_signer())
    for name, document in (("changed", changed), ("other", other), ("two", [stranger, stranger]), ("empty", nothing)):
        (folder / f"{name}.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(CheckFailed) as caught:
        community_evidence.read(folder, NOW)
    faults = {fault.file: fault.message.partition(":")[0] for fault in caught.value.faults}
    assert faults == {"changed.json": "signature", "other.json": "signature", "two.json": "malformed",
                      "empty.json": "signature"}  # fmt: skip


def test_a_statement_of_something_else_is_not_a_test_result(
    site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_key(monkeypatch)
    send(site, folder, "alice")
    sbom = in_toto_statements.canonical(in_toto_statements.sbom({}, Subject("x", site.engine.image.id)))
    envelope = keys_and_signatures.seal(sbom, keys_and_signatures.configured_signer())
    (folder / "sbom.json").write_text(json.dumps(envelope), encoding="utf-8")
    with pytest.raises(CheckFailed) as caught:
        community_evidence.read(folder, NOW)
    assert [(fault.file, fault.message) for fault in caught.value.faults] == [
        ("sbom.json", "malformed: it contains no test result")
    ]


def test_foreign_text_is_escaped_in_the_table() -> None:
    row = EvidenceRow("<b>GPU</b> | x", "[link](http://x)", "who\n| a |", "2026-01-01", "", "", ("`code` \x1b[31m",))
    line = profile_markdown_tables.proofs_table([row]).splitlines()[2]
    assert line.count(" | ") == 4
    assert not any(part in line for part in ("<b>", "\x1b", "[link]("))


def test_it_fills_a_document(site: Site, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is expected next to the document."""
    page = folder.parent / "page.md"
    page.write_text("<!-- envbuild:evidence evidence -->\n<!-- envbuild:end -->\n", encoding="utf-8")
    assert envbuild("docs", str(page)).code == 0
    assert profile_markdown_tables.proofs_table([]) in page.read_text(encoding="utf-8")
    new_key(monkeypatch)
    send(site, folder, "alice")
    assert envbuild("docs", "--check", str(page)).code == OutOfDate.code
    assert envbuild("docs", str(page)).code == 0
    assert "| NVIDIA H20 | sample | alice |" in page.read_text(encoding="utf-8")
    (folder / "keys" / "alice.pub").unlink()
    refused = envbuild("docs", str(page))
    assert (refused.code, "sample-alice.dsse.json: signature" in refused.stderr) == (CheckFailed.code, True)


def test_a_missing_folder_of_evidence_is_an_empty_table(project: Path) -> None:
    page = project / "page.md"
    page.write_text("<!-- envbuild:evidence evidence -->\n<!-- envbuild:end -->\n", encoding="utf-8")
    assert envbuild("docs", "page.md").code == 0
    assert page.read_text(encoding="utf-8").splitlines()[1] == profile_markdown_tables.proofs_table([])


def test_proofs_of_others_count_for_the_model_and_its_family() -> None:
    row = EvidenceRow("NVIDIA H100 80GB HBM3", "sample", "alice", "2026-11-21", "lock", "", ())
    foreign = [replace(row, lock="other"), replace(row, profile="h20"), replace(row, objections=("old",))]
    (proof,) = community_evidence.community_proofs([*foreign, row], "sample", "lock", ("h100", "a100"))
    assert (proof.model, proof.reason) == ("h100", "proved on NVIDIA H100 80GB HBM3, 2026-11-21")
    (proof,) = community_evidence.community_proofs([replace(row, gpu="CPU")], "sample", "lock", ("cpu",))
    assert proof.reason == "proved on the CPU, 2026-11-21"


def test_the_readme_has_the_table_of_what_is_in_the_folder() -> None:
    """Every file in the folder must also be signed by a key in the folder; otherwise the command exits with 5."""
    readme = ROOT / "README.md"
    assert "<!-- envbuild:evidence evidence -->" in readme.read_text(encoding="utf-8").splitlines()
    assert envbuild("docs", "--check", str(readme)).code == 0
