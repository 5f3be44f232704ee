"""Files of the first release stay readable with the same verdict; files of a future release are refused clearly."""

from __future__ import annotations

import datetime
import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from envbuild.attest import (
    image_verifier,
    in_toto_statements,
    keys_and_signatures,
    saved_image_file,
    trusted_statements,
)
from envbuild.attest.policy import Policy
from envbuild.evidence import evidence_statements_and_store, proof_rules, run_record_schema
from envbuild.image import build_records, container_definition_export
from envbuild.lock import lock_file
from envbuild.registry.oci_types import Reference
from envbuild.runners.kubernetes import kubernetes_settings
from envbuild.runners.slurm import slurm_settings
from envbuild.util import settings, strict_and_canonical_json, user_folders
from envbuild.util.errors import LockError, SettingsError
from unit.site import new_key

RELEASED = Path(__file__).parents[1] / "golden" / "released"
IMAGE = "sha256:054a220a95a55611aeac97386069836fa98fd624ece7ac696db9306ec080ad2f"
LOCK = "sha256:98e37f5aa928c6594d074b37deeaa58818033e4148db2b8eceb6f400706c2b7e"
SELFTEST = "sha256:00c851c19b458dfe229cc04d2528fcbe9970033597b88608ffdf2c1d7dcc28a6"
NOW = datetime.datetime(2026, 11, 22, tzinfo=datetime.UTC)


@pytest.fixture
def state(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of the first release, read with the self-test of that time."""
    folder = Path(os.environ["XDG_STATE_HOME"])
    shutil.copytree(RELEASED / "state", folder, dirs_exist_ok=True)
    monkeypatch.setattr(proof_rules, "selftest_id", lambda: SELFTEST)
    return folder / "envbuild"


def key() -> keys_and_signatures.PublicKey:
    found = keys_and_signatures.trusted(RELEASED / "team.pub")
    assert found
    return found


def wanted() -> proof_rules.EvidenceRequirements:
    ((_, record),) = evidence_statements_and_store.stored(IMAGE)
    return proof_rules.as_recorded(record)


# files of the first release are read, and its evidence gets the same verdict as then


@pytest.mark.parametrize(("name", "short"), [("released", LOCK), ("h200", None)])
def test_a_lock_is_read_and_written_the_same(tmp_path: Path, name: str, short: str | None) -> None:
    file = RELEASED / "profiles" / f"{name}.lock.yaml"
    found = lock_file.read(file)
    assert found and short in (None, found.id)
    written = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert found.id == written["id"] and found.content == written["content"]
    lock_file.write(found, tmp_path / "again.yaml", name)
    assert (tmp_path / "again.yaml").read_bytes() == file.read_bytes()


def test_its_dockerfile_installs_what_it_did() -> None:
    """The text may change with a release; the installed files and hashes may not."""
    found = lock_file.read(RELEASED / "profiles" / "released.lock.yaml")
    assert found

    def hashes(text: str) -> list[str]:
        return sorted(word for word in text.replace('"', " ").split() if word.startswith("--hash="))

    before = (RELEASED / "released.Dockerfile").read_text(encoding="utf-8")
    assert hashes(container_definition_export.standalone_dockerfile(found, "released")) == hashes(before) != []


def test_evidence_proves_what_it_proved(state: Path) -> None:
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE, wanted())
    assert (proof.state, proof.reason) == ("proved", "proved on the CPU, 2026-11-21")
    run = evidence_statements_and_store.run_of(
        state / "evidence" / IMAGE[7:] / str(proof.evidence and proof.evidence.name), IMAGE
    )
    assert run.passed and len(run.by_status("passed")) == 11 and "own.script" in run.by_status("passed")


@pytest.mark.parametrize("changes", [{"lock": f"sha256:{'0' * 64}"}, {"level": "full"}, {"require": ("train.step",)}])
def test_evidence_does_not_prove_what_it_did_not(state: Path, changes: dict[str, Any]) -> None:
    required = proof_rules.EvidenceRequirements(**{**vars(wanted()), **changes})
    assert evidence_statements_and_store.newest_proofs(IMAGE, required)[0].state == "stale"


def test_a_build_record_is_read(state: Path) -> None:
    (record,) = build_records.all_records(IMAGE)
    assert (record.lock, len(record.layers), record.extensions) == (LOCK, 5, ())


def test_a_signed_statement_is_believed(state: Path) -> None:
    (file,) = (state / "evidence").glob("*/*.dsse.json")
    verdict = image_verifier.verify_statement([image_verifier.read_file(file)], Policy((key(),)), NOW)
    assert (verdict.reasons, verdict.gpus, verdict.image_id) == ([], ["cpu"], IMAGE)


def test_a_signed_statement_of_another_key_is_not(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = (state / "evidence").glob("*/*.dsse.json")
    other = Policy((new_key(monkeypatch),))
    assert [
        reason.id for reason in image_verifier.verify_statement([image_verifier.read_file(file)], other, NOW).reasons
    ] == ["signature"]


@pytest.fixture
def saved(tmp_path: Path) -> saved_image_file.SavedImage:
    file = tmp_path / "released.tar"
    file.write_bytes(gzip.decompress((RELEASED / "bundle.tar.gz").read_bytes()))
    return saved_image_file.SavedImage(file)


def test_a_saved_image_is_read_and_its_evidence_believed(state: Path, saved: saved_image_file.SavedImage) -> None:
    assert saved.file(saved_image_file.PROFILE) == b"released"
    assert saved.file(saved_image_file.LOCK) == (RELEASED / "profiles" / "released.lock.yaml").read_bytes()
    verdict = image_verifier.verify_at(saved, Reference("saved", "released", "released"), Policy((key(),)), (), NOW)
    assert (verdict.reasons, verdict.gpus, verdict.image and verdict.image.id) == ([], ["cpu"], IMAGE)
    assert verdict.build and verdict.build.lock.id == LOCK


def test_the_settings_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    user_folders.config_file().parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(RELEASED / "config.yaml", user_folders.config_file())
    assert settings.setting("debian_mirror") == "https://mirror.example/debian"
    on_slurm = slurm_settings.parse(settings.section("slurm"), {}, lambda name: True)
    on_kubernetes = kubernetes_settings.parse(settings.section("kubernetes"), {}, lambda name: True)
    assert (on_slurm.partition, on_kubernetes.namespace) == ("gpu", "proofs")
    known = yaml.safe_load((RELEASED / "config.yaml").read_text(encoding="utf-8"))
    named = {"on" if name is True else name for name in known}
    assert named <= set(settings._KNOWN) | set(settings._SECTIONS), "later settings are not in it"


def test_an_exported_check_runs(tmp_path: Path) -> None:
    """The exported check contains everything that it needs, so it is run by Python alone."""
    file = tmp_path / "check.py"
    file.write_bytes(gzip.decompress((RELEASED / "check-released.py.gz").read_bytes()))
    shown = subprocess.run([sys.executable, file, "--help"], capture_output=True, text=True)
    assert shown.returncode == 0 and "released" in shown.stdout
    file.write_bytes(file.read_bytes().replace(b"#+ U", b"#+ V", 1))
    assert subprocess.run([sys.executable, file], capture_output=True).returncode == 3


# a later format is refused, with a remedy


def test_a_later_lock_is_refused(tmp_path: Path) -> None:
    text = (RELEASED / "profiles" / "released.lock.yaml").read_text(encoding="utf-8")
    (tmp_path / "x.lock.yaml").write_text(text.replace("format: 1", "format: 2", 1), encoding="utf-8")
    with pytest.raises(LockError, match="has format 2, this envbuild reads 1") as caught:
        lock_file.read(tmp_path / "x.lock.yaml")
    assert (caught.value.code, caught.value.hint) == (3, "use a newer envbuild")


def later(state: Path) -> Path:
    """Add a record of format 2 to the folder of the old record, as a newer envbuild of the same user would, and return
    its statement."""
    (path,) = (state / "evidence").glob("*/*.record.json")
    record = {**json.loads(path.read_text(encoding="utf-8")), "version": 2, "verdict": "failed"}
    raw = json.dumps(record).encode()
    written = path.with_name(f"{hashlib.sha256(raw).hexdigest()}.record.json")
    written.write_bytes(raw)
    statement = written.with_name(written.name.replace(".record.", ".statement."))
    statement.write_text("{}", encoding="utf-8")
    return statement


def test_old_evidence_does_not_count_with_later_evidence(state: Path) -> None:
    """The later evidence may say that the self-test failed since; an older envbuild cannot know."""
    required = wanted()
    written = later(state)
    (proof,) = evidence_statements_and_store.newest_proofs(IMAGE, required)
    assert (proof.state, proof.evidence) == ("stale", written)
    assert proof.reason == "a run record has format 2, this envbuild reads 1: use a newer envbuild"


def test_later_evidence_about_another_image_does_no_harm(state: Path) -> None:
    required = wanted()
    later(state).parent.rename(state / "evidence" / ("0" * 64))
    shutil.copytree(RELEASED / "state", state.parent, dirs_exist_ok=True)
    assert evidence_statements_and_store.newest_proofs(IMAGE, required)[0].state == "proved"


@pytest.mark.parametrize("version", ["2", None, 1.5, [], {}, -1, True])
def test_an_invalid_format_version_is_malformed(state: Path, version: Any) -> None:
    (path,) = (state / "evidence").glob("*/*.record.json")
    record = {**json.loads(path.read_text(encoding="utf-8")), "version": version}
    with pytest.raises(ValueError) as caught:
        run_record_schema.validate_record({**record, "image": {}})
    assert not isinstance(caught.value, run_record_schema.Newer)


def signed(statement: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Policy]:
    public = new_key(monkeypatch)
    signer = keys_and_signatures.configured_signer()
    assert signer
    return keys_and_signatures.seal(strict_and_canonical_json.encode(statement), signer), Policy((public,))


def later_result(state: Path) -> dict[str, Any]:
    """Return a test result whose record has the next format."""
    ((path, record),) = evidence_statements_and_store.stored(IMAGE)
    raw = json.dumps({**json.loads(evidence_statements_and_store.record_text(path)), "version": 2}).encode()
    return in_toto_statements.test_result(record, raw, in_toto_statements.Subject("x", IMAGE)).document()


def test_a_later_signed_statement_is_refused_by_name(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    envelope, policy = signed(later_result(state), monkeypatch)
    (reason,) = image_verifier.verify_statement([envelope], policy, NOW).reasons
    assert reason.id == "newer" and reason.detail.endswith("use a newer envbuild")


def test_a_later_build_statement_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    definition = {"buildType": "urn:envbuild:build:2"}
    made = {
        "_type": evidence_statements_and_store.STATEMENT,
        "subject": [{"name": "x", "digest": {"sha256": IMAGE[7:]}}],
        "predicateType": in_toto_statements.PROVENANCE,
        "predicate": {"buildDefinition": definition},
    }
    envelope, policy = signed(made, monkeypatch)
    believed = trusted_statements.believe([envelope], policy.keys, IMAGE)
    assert [reason.id for reason in believed.refused] == ["newer"]


def test_a_later_word_of_a_trusted_key_is_not_outweighed(
    state: Path, saved: saved_image_file.SavedImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved image alone is verified; with a later signed statement about its image next to the file, the image is
    not verified."""
    envelope, policy = signed(later_result(state), monkeypatch)
    both = Policy((key(), *policy.keys))
    place = Reference("saved", "released", "released")
    assert image_verifier.verify_at(saved, place, both, (), NOW).verified
    assert [reason.id for reason in image_verifier.verify_at(saved, place, both, (envelope,), NOW).reasons] == ["newer"]
    assert image_verifier.verify_at(saved, place, Policy((key(),)), (envelope,), NOW).verified, (
        "a statement of an untrusted key is ignored"
    )


def test_a_setting_that_is_not_known_is_refused() -> None:
    user_folders.config_file().parent.mkdir(parents=True, exist_ok=True)
    user_folders.config_file().write_text("of_a_later_release: x\n", encoding="utf-8")
    with pytest.raises(SettingsError) as caught:
        settings.setting("debian_mirror")
    assert "of_a_later_release" in " ".join(map(str, caught.value.faults)) and caught.value.hint


def test_a_build_record_of_a_later_release_proves_nothing(state: Path) -> None:
    """The image is built again, because the additional fields of the record may matter."""
    (file,) = (state / "builds").glob("*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**found, "of_a_later_release": 1}), encoding="utf-8")
    assert list(build_records.all_records(IMAGE)) == []
