"""Each attack on an image in a registry is refused, with its own reason."""

from __future__ import annotations

import base64
import copy
import dataclasses
import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
import zstandard

from envbuild.attest import in_toto_statements, keys_and_signatures, policy, registry_attestations
from envbuild.attest.in_toto_statements import Subject
from envbuild.evidence import evidence_statements_and_store
from envbuild.image.image_naming import LOCK_LABEL
from envbuild.registry import image_content_reader, oci_types
from envbuild.registry.image_content_reader import Config
from envbuild.testrun.run_result import RunLocation
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import CheckFailed, FileError, NetworkError, UsageError
from envbuild.util.untrusted_input_errors import Malformed
from unit.evidence.runs import passed_run, probe, run_on
from unit.site import LAYER, LAYER_TYPE, Site, config_of, new_key, proved
from unit.support import CommandResult, as_yaml, envbuild, sha


@pytest.fixture
def site(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with proved(project, monkeypatch) as found:
        yield found


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> Path:
    file = Path("team.pub")
    file.write_bytes(new_key(monkeypatch).pem)
    return file


@pytest.fixture
def pushed(site: Site, key: Path) -> Site:
    assert site.push().code == 0
    return site


def verify(site: Site, *arguments: str, tag: str = "verified", name: str = "team/sample") -> CommandResult:
    return envbuild("verify", f"{site.registry.host}/{name}:{tag}", *arguments, "--json")


def reasons(site: Site, *arguments: str, key: str = "team.pub", **where: str) -> list[str]:
    """Return the ids of the reasons for a refusal, none if the image is verified."""
    result = verify(site, "--key", key, *arguments, **where)
    document = result.document
    assert result.code == (0 if document["state"] == "verified" else CheckFailed.code)
    return [reason["id"] for reason in document["reasons"]]


def att(site: Site) -> str:
    _, raw = site.registry.manifests["verified"]
    return registry_attestations.att_tag(oci_types.digest_of(raw))


def rewrite(site: Site, change: Callable[[dict[str, Any]], dict[str, Any] | bytes | None]) -> None:
    """Change every envelope attached to the image, in both forms, as an attacker who can write to the registry."""
    for target, (media, raw) in list(site.registry.manifests.items()):
        document = json.loads(raw)
        for layer in document.get("layers", []):
            if layer["mediaType"] not in (registry_attestations.ENVELOPE, registry_attestations.BUNDLE):
                continue
            blob = json.loads(site.registry.blobs[layer["digest"]])
            envelope = blob.get("dsseEnvelope", blob)
            changed = change(copy.deepcopy(envelope)) or envelope
            if isinstance(changed, dict) and "dsseEnvelope" in blob:
                changed = {**blob, "dsseEnvelope": changed}
            new = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
            layer["digest"] = site.registry.add_blob(new)
        if document.get("layers") and raw != json.dumps(document).encode():
            site.registry.manifests[target] = (media, json.dumps(document).encode())
    only_att(site)


def only_att(site: Site) -> None:
    """Keep only the older form of the attestations, so that the referrers' digests need not be corrected."""
    for target in [name for name in site.registry.manifests if name.startswith("sha256-") and ".att" not in name]:
        del site.registry.manifests[target]


def resign(site: Site, change: Callable[[dict[str, Any]], None]) -> None:
    """Change every statement and sign it again with the right key: an attacker who has the key."""
    signer = keys_and_signatures.configured_signer()

    def again(envelope: dict[str, Any]) -> dict[str, Any]:
        stated = json.loads(base64.b64decode(envelope["payload"]))
        change(stated)
        return keys_and_signatures.seal(strict_and_canonical_json.encode(stated), signer)

    rewrite(site, again)


# valid images


def test_a_pushed_image_is_verified(pushed: Site) -> None:
    result = verify(pushed, "--key", "team.pub")
    assert result.code == 0, result.stdout
    _, raw = pushed.registry.manifests["verified"]
    document = result.document
    (evidence,) = document.pop("evidence")
    assert (evidence["model"], evidence["state"], evidence["level"]) == ("cpu", "verified", "quick")
    assert document == {
        "reference": f"{pushed.registry.host}/team/sample:verified",
        "state": "verified",
        "profile": "sample",
        "lock": pushed.lock.id,
        "image": pushed.engine.image.id,
        "digest": oci_types.digest_of(raw),
        "level": "quick",
        "gpus": ["cpu"],
        "base": None,
        "changed_settings": {},
        "unconfined": [],
        "environment": None,
        "reasons": [],
    }
    plain = envbuild("verify", f"{pushed.registry.host}/team/sample@{oci_types.digest_of(raw)}", "--key", "team.pub")
    assert plain.stdout == f"{oci_types.digest_of(raw)}\n"


def test_missing_isolation_of_a_cluster_container_is_reported(site: Site, key: Path) -> None:
    where = RunLocation(runner="kubernetes", node="gpu-7", unconfined=("the network is \x1b[2Jopen",))
    site.prove(dataclasses.replace(passed_run(), where=where), day=1)
    assert site.push().code == 0
    assert verify(site, "--key", "team.pub").document["unconfined"] == [*where.unconfined]
    plain = envbuild("verify", f"{site.registry.host}/team/sample:verified", "--key", "team.pub")
    assert plain.code == 0 and "less confined" in plain.stderr and "the network is" in plain.stderr
    assert "\x1b" not in plain.stderr and "gpu-7" not in plain.stderr


def test_the_older_form_is_enough(pushed: Site) -> None:
    only_att(pushed)
    assert reasons(pushed) == []


def test_the_newer_form_is_enough(pushed: Site) -> None:
    del pushed.registry.manifests[att(pushed)]
    assert reasons(pushed) == []


# attacks


def test_evidence_for_another_image_is_refused(pushed: Site) -> None:
    config = config_of([LAYER], {LOCK_LABEL: pushed.lock.id}, ["EVIL=1"])
    document = {"mediaType": oci_types.MANIFEST, "config": {"digest": pushed.registry.add_blob(config)},
                "layers": [{"digest": LAYER, "mediaType": LAYER_TYPE}]}  # fmt: skip
    digest = pushed.registry.put(oci_types.MANIFEST, document, "evil")
    pushed.registry.manifests[registry_attestations.att_tag(digest)] = pushed.registry.manifests[att(pushed)]
    assert reasons(pushed, tag="evil") == ["subject"]


def test_a_tag_moved_by_hand_to_another_image_is_refused(pushed: Site) -> None:
    config = config_of([f"sha256:{sha('other')}"], {})
    layers = [{"digest": f"sha256:{sha('other')}", "mediaType": LAYER_TYPE}]
    document = {
        "mediaType": oci_types.MANIFEST,
        "config": {"digest": pushed.registry.add_blob(config)},
        "layers": layers,
    }
    pushed.registry.put(oci_types.MANIFEST, document, "verified")
    assert reasons(pushed) == ["no-evidence"]


def test_another_keys_signature_is_refused(pushed: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("other.pub").write_bytes(new_key(monkeypatch).pem)
    assert reasons(pushed, key="other.pub") == ["signature"]


def test_unsigned_evidence_is_refused(site: Site, key: Path) -> None:
    assert site.push("--unsigned").code == 0
    assert reasons(site) == ["unsigned"]


def test_after_a_signed_push_the_unsigned_one_is_not_mentioned(site: Site, key: Path) -> None:
    assert site.push("--unsigned").code == 0
    assert site.push().code == 0
    assert reasons(site) == []
    assert reasons(site, "--gpu", "NVIDIA H20") == ["gpu"]


def test_without_a_key_nothing_is_believed(pushed: Site) -> None:
    result = verify(pushed)
    assert (result.code, [reason["id"] for reason in result.document["reasons"]]) == (5, ["no-key"])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 5, "no public key given"),
        (["--key", "nosuch.pub"], 3, "name the signer's public key: --key team.pub"),
        (["--key", "empty.pub"], 3, "is not a public key"),
    ],
)
def test_without_a_usable_key_the_registry_is_not_contacted(
    project: Path, arguments: list[str], code: int, words: str
) -> None:
    """Nothing listens on that port, so that a request would end with exit code 7."""
    (project / "empty.pub").touch()
    done = envbuild("verify", "127.0.0.1:9/team/sample:verified", *arguments)
    assert (done.code, words in done.stderr) == (code, True), done.stderr


@pytest.mark.slow
def test_one_changed_byte_is_refused(pushed: Site) -> None:
    """Each statement is checked in this way, except the SBOM, which is not checked."""
    blobs = dict(pushed.registry.blobs)
    _, raw = pushed.registry.manifests[att(pushed)]
    only_att(pushed)
    lacking = {
        evidence_statements_and_store.TEST_RESULT: {"digest", "gpu"},
        in_toto_statements.PROVENANCE: {"digest", "no-build"},
    }
    for item in json.loads(raw)["layers"]:
        whole = blobs[item["digest"]]
        for at in range(7, len(whole), max(1, len(whole) // 9)):
            pushed.registry.blobs[item["digest"]] = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
            assert set(reasons(pushed)) == lacking.get(item["annotations"]["predicateType"], set())
        pushed.registry.blobs[item["digest"]] = whole


def test_one_changed_byte_in_a_manifest_or_the_configuration_is_refused(pushed: Site) -> None:
    """The images are named by digest. A tag may be moved, so different rules apply to tags."""
    media, raw = pushed.registry.manifests["verified"]
    digest, config = oci_types.digest_of(raw), json.loads(raw)["config"]["digest"]
    for path, kind, whole in ((f"manifests/{digest}", media, raw), (f"blobs/{config}", "", pushed.engine.config)):
        for at in range(0, len(whole), max(1, len(whole) // 7)):
            spoilt = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
            pushed.registry.lies = {f"/v2/team/sample/{path}": (200, {"Content-Type": kind}, spoilt)}
            ref = f"{pushed.registry.host}/team/sample@{digest}"
            result = envbuild("verify", ref, "--key", "team.pub", "--json")
            assert [reason["id"] for reason in result.document["reasons"]] == ["digest"]


EVIL = f"sha256:{sha('evil')}"


@pytest.mark.parametrize(
    "more",
    [
        {"Config": {"digest": EVIL}, "Layers": [{"digest": EVIL}]},
        {"layer\u017f": [{"digest": EVIL}]},  # a long s, which Go reads as an s
        {"subject": {"Digest": EVIL}},
        {"manifests": [{"digest": EVIL}]},
    ],
)
def test_a_manifest_that_an_engine_reads_as_another_is_refused(pushed: Site, more: dict[str, Any]) -> None:
    """Go reads the key `Layers` as `layers`, and the last one counts. With the true evidence copied next to it, the
    image would be accepted."""
    media, raw = pushed.registry.manifests["verified"]
    honest = oci_types.digest_of(raw)
    document = {**json.loads(raw), **more}
    pushed.registry.put(media, document, "verified")
    _, evil = pushed.registry.manifests["verified"]
    for name in (registry_attestations.att_tag, oci_types.fallback_tag):
        if name(honest) in pushed.registry.manifests:
            pushed.registry.manifests[name(oci_types.digest_of(evil))] = pushed.registry.manifests[name(honest)]
    assert reasons(pushed) == ["malformed"]


@pytest.mark.parametrize(
    "spoilt",
    [
        {"config": {"Env": ["PATH=/bin"], "env": ["LD_PRELOAD=/evil"]}},
        {"config": {"Env": ["LD_PRELOAD=/evil", "LD_PRELOAD="]}},
        {"config": {"Entrypoint": ["/x"], "entrypoint": []}},
        {"Config": {"Env": ["LD_PRELOAD=/evil"]}},
        {"RootFS": {"diff_ids": [EVIL]}},
        {"rootfs": {"diff_ids": [LAYER], "Diff_Ids": [EVIL]}},
    ],
)
def test_a_configuration_that_an_engine_reads_as_another_is_refused(spoilt: dict[str, Any]) -> None:
    document = {**json.loads(config_of([LAYER], {"Version": "1", "version": "2"})), "history": [{"created_by": "x"}]}
    assert image_content_reader.parse_config("sha256:0", json.dumps(document).encode()).layers == (LAYER,)
    with pytest.raises(Malformed):
        image_content_reader.parse_config("sha256:0", json.dumps({**document, **spoilt}).encode())


def test_one_changed_byte_in_a_statement_is_refused(pushed: Site) -> None:
    def flip(envelope: dict[str, Any]) -> dict[str, Any]:
        content = bytearray(base64.b64decode(envelope["payload"]))
        content[len(content) // 2] ^= 1
        return {**envelope, "payload": base64.b64encode(content).decode()}

    rewrite(pushed, flip)
    assert reasons(pushed) == ["signature"]


def test_a_swapped_predicate_is_refused(pushed: Site) -> None:
    """With the signature of a different statement, the content does not match; signed again, it contradicts its
    record."""

    def lie(stated: dict[str, Any]) -> None:
        if stated["predicateType"] == evidence_statements_and_store.TEST_RESULT:
            stated["predicate"]["passedTests"] += ["h20/gemm.exact"]

    resign(pushed, lie)
    assert "predicate" in reasons(pushed)


def test_another_predicate_type_is_not_a_test_result(pushed: Site) -> None:
    resign(pushed, lambda stated: stated.update(predicateType="https://kind.example/other"))
    assert reasons(pushed) == ["no-evidence", "base"]


def test_a_replayed_older_statement_does_not_outweigh_a_failure(site: Site, key: Path) -> None:
    assert site.push().code == 0
    site.prove(passed_run(probe("env.libs", "failed")), day=1)
    signer = keys_and_signatures.configured_signer()
    _, raw = site.registry.manifests["verified"]
    subject = Subject("envbuild/sample", site.engine.image.id, site.registry.host, oci_types.digest_of(raw))
    wanted = []
    for path, record in evidence_statements_and_store.stored(site.engine.image.id):
        made = in_toto_statements.test_result(record, evidence_statements_and_store.record_text(path), subject)
        wanted.append((evidence_statements_and_store.TEST_RESULT, in_toto_statements.canonical(made)))
    registry_attestations.publish(site.place, oci_types.Manifest(raw, oci_types.MANIFEST), wanted, signer)
    assert reasons(site) == ["failed"]


@pytest.mark.parametrize(
    ("day", "allowed", "found"),
    [(-30, "29d", ["age"]), (-30, "31d", []), (-30, "100h", ["age"]), (3, "29d", ["age"])],
)
def test_evidence_is_refused_by_age(
    project: Path, key: Path, monkeypatch: pytest.MonkeyPatch, day: int, allowed: str, found: list[str]
) -> None:
    """Evidence is refused if it is too old, or has a date in the future."""
    with proved(project, monkeypatch, day) as site:
        assert site.push().code == 0
        assert reasons(site, "--max-age", allowed) == found


@pytest.mark.parametrize("what", ["manifest", "config"])
def test_a_registry_that_serves_something_else_for_a_digest_is_refused(pushed: Site, what: str) -> None:
    media, raw = pushed.registry.manifests["verified"]
    digest = oci_types.digest_of(raw) if what == "manifest" else json.loads(raw)["config"]["digest"]
    other = json.dumps({**json.loads(raw), "annotations": {"a": "b"}}).encode() if what == "manifest" else b"{}"
    kind = "manifests" if what == "manifest" else "blobs"
    pushed.registry.lies[f"/v2/team/sample/{kind}/{digest}"] = (200, {"Content-Type": media}, other)
    result = envbuild(
        "verify", f"{pushed.registry.host}/team/sample@{oci_types.digest_of(raw)}", "--key", "team.pub", "--json"
    )
    assert [reason["id"] for reason in result.document["reasons"]] == ["digest"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"payload": "' + b"A" * (17 << 20) + b'"}', "too-large"),
        (b'{"payload": ' + b"[" * 5000 + b"]" * 5000 + b"}", "malformed"),
        (b"\x00", "malformed"),
    ],
)
def test_giant_and_deep_evidence_is_refused(pushed: Site, content: bytes, reason: str) -> None:
    rewrite(pushed, lambda envelope: content)
    assert set(reasons(pushed)) == {reason}


def test_another_lock_than_the_images_is_refused(pushed: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    right = image_content_reader.config_of
    monkeypatch.setattr(image_content_reader, "config_of", lambda *a: _relabelled(right(*a)))
    assert reasons(pushed) == ["lock"]


def _relabelled(config: Config) -> Config:
    return dataclasses.replace(config, labels={LOCK_LABEL: f"sha256:{'0' * 64}"})


def test_garbage_next_to_good_evidence_does_no_harm(pushed: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    _, raw = pushed.registry.manifests["verified"]
    stranger = keys_and_signatures.private(keys_and_signatures.generate("correct horse battery staple")[0], "key")
    registry_attestations.publish(
        pushed.place, oci_types.Manifest(raw, oci_types.MANIFEST), [("x", b"{}"), ("y", b"[")], stranger
    )
    assert reasons(pushed) == []


# requirements of a policy


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--gpu", "NVIDIA H20"], "gpu"),
        (["--level", "full"], "stale"),
        (["--driver", "550.54.15"], "driver"),
    ],
)
def test_an_unproved_image_is_refused(pushed: Site, arguments: list[str], reason: str) -> None:
    assert reasons(pushed, *arguments) == [reason]


def test_a_policy_is_a_file(pushed: Site) -> None:
    Path("policy.yaml").write_text(as_yaml({"keys": ["team.pub"], "gpus": ["cpu"], "level": "quick"}), encoding="utf-8")
    assert verify(pushed, "--policy", "policy.yaml").code == 0
    Path("policy.yaml").write_text(as_yaml({"keys": ["team.pub"], "probes": ["gemm.accuracy"]}), encoding="utf-8")
    result = verify(pushed, "--policy", "policy.yaml")
    assert [reason["id"] for reason in result.document["reasons"]] == ["stale"]
    assert "gemm.accuracy" in result.document["reasons"][0]["detail"]


def test_the_policy_in_the_documents_is_read(project: Path, key: Path) -> None:
    """The policy in the documents contains every key; the test checks what `verify` reads from that policy."""
    text = (Path(in_toto_statements.__file__).parents[2] / "docs" / "verify.md").read_text(encoding="utf-8")
    (block,) = (part.partition("```")[0] for part in text.split("```yaml\n")[1:])
    assert set(yaml.safe_load(block)) == {field.alias or name for name, field in policy._File.model_fields.items()}
    Path("policy.yaml").write_text(block, encoding="utf-8")
    found = policy.read(Path("policy.yaml"), {}, None)
    assert (found.lock, found.copies) == ("sha256:bc6b565b17e1", ("registry.example/h20",))
    assert (found.base and found.base.repository, found.forbid_in_child) == ("registry.example/h20", ("Cmd", "User"))


@pytest.mark.parametrize("wrong", [{"from": ["r.example/a:tag"]}, {"lock": "abc"}, {"profile": ["h20"]}])
def test_a_policy_that_names_no_repository_lock_or_profile_is_refused(pushed: Site, wrong: dict[str, Any]) -> None:
    Path("policy.yaml").write_text(as_yaml({"keys": ["team.pub"], **wrong}), encoding="utf-8")
    assert verify(pushed, "--policy", "policy.yaml").code in (FileError.code, UsageError.code)


def test_a_policys_faults_come_all_at_once(pushed: Site) -> None:
    Path("policy.yaml").write_text("max_age: long\nlevle: quick\ngpus: h20\n", encoding="utf-8")
    result = verify(pushed, "--policy", "policy.yaml")
    assert result.code == FileError.code
    assert [
        f"{fault['line']} {fault['field']}: {fault['message']}" for fault in result.document["error"]["faults"]
    ] == [
        "1 max_age: invalid value: the largest age of the newest proof: 90d, 12h",
        "2 levle: unknown key (did you mean level?)",
        "3 gpus: must be a list: GPU models that the image must be proved on; default: all models of its profile",
    ]


def test_a_policy_says_what_may_stand_there(pushed: Site) -> None:
    Path("policy.yaml").write_text("level: quik\nforbid_in_child: [cmd]\n", encoding="utf-8")
    faults = verify(pushed, "--policy", "policy.yaml").document["error"]["faults"]
    assert [fault["message"].partition(":")[0] for fault in faults][:1] == ["must be 'quick', 'standard' or 'full'"]
    assert "must be 'Cmd', " in faults[1]["message"]
    Path("policy.yaml").write_text("probes: [gemm.acuracy]\n", encoding="utf-8")
    result = verify(pushed, "--policy", "policy.yaml")
    assert result.code == UsageError.code and "did you mean gemm.accuracy?" in result.document["error"]["message"]


def test_a_level_and_a_probe_that_are_lacking_are_both_named(pushed: Site) -> None:
    Path("policy.yaml").write_text("keys: [team.pub]\nlevel: full\nprobes: [burn]\n", encoding="utf-8")
    (reason,) = verify(pushed, "--policy", "policy.yaml").document["reasons"]
    assert "but full is required; required probes did not run: burn" in reason["detail"]


def test_an_image_that_is_not_there_is_a_network_error(pushed: Site) -> None:
    assert verify(pushed, "--key", "team.pub", tag="nothing").code == NetworkError.code


# evidence of a GPU


def test_a_gpu_by_name_family_and_driver(site: Site, key: Path) -> None:
    site.prove(run_on("NVIDIA H20"))
    assert site.push().code == 0
    for name in ("NVIDIA H20", "h20"):
        assert reasons(site, "--gpu", name) == []
    assert reasons(site, "--gpu", "NVIDIA H200") == ["gpu"]
    assert reasons(site, "--gpu", "h20", "--driver", "550.54.15") == []
    assert reasons(site, "--gpu", "h20", "--driver", "570.10") == []
    assert reasons(site, "--gpu", "h20", "--driver", "535.10") == ["driver"]
    site.prove(run_on("NVIDIA A100 80GB PCIe"))
    assert site.push().code == 0
    assert reasons(site, "--gpu", "NVIDIA A800 80GB PCIe") == []  # the same silicon, by the facts


def test_an_advisory_that_is_known_by_now_is_refused(site: Site, key: Path) -> None:
    """cuBLAS 12.1 on an H20 is now known to crash, although the self-test passed at that time."""
    site.prove(run_on("NVIDIA H20", cublas="12.1.3.1"))
    assert site.push().code == 0
    assert "advisory" in reasons(site, "--gpu", "h20")


# evidence as a file


def test_a_signed_statement_is_checked_by_itself(site: Site, key: Path) -> None:
    path = site.prove(run_on("NVIDIA H20"))
    record = dict(evidence_statements_and_store.stored(site.engine.image.id))[path]
    made = in_toto_statements.test_result(
        record, evidence_statements_and_store.record_text(path), Subject("envbuild/sample", record.subject)
    )
    file = evidence_statements_and_store.save_envelope(
        path, keys_and_signatures.seal(in_toto_statements.canonical(made), keys_and_signatures.configured_signer())
    )
    result = envbuild("verify", "--evidence", str(file), "--key", "team.pub", "--json")
    assert (result.code, result.document["gpus"], result.document["image"]) == (0, ["h20"], record.subject)
    assert result.document["reference"] is None
    refused = envbuild("verify", "--evidence", str(file), "--key", "team.pub", "--gpu", "b200", "--json")
    assert (refused.code, refused.document["reasons"][0]["id"]) == (5, "gpu")
    file.write_text(file.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    broken = envbuild("verify", "--evidence", str(file), "--key", "team.pub", "--json")
    assert (broken.code, broken.document["reasons"][0]["id"]) == (5, "malformed")
    assert envbuild("verify").code == UsageError.code


# child images


def layer(*members: tuple[str, str]) -> bytes:
    """Return a layer with an empty file or a folder for each (path, kind); the kind of a folder is "dir"."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, kind in members:
            member = tarfile.TarInfo(path)
            member.type = tarfile.DIRTYPE if kind == "dir" else tarfile.REGTYPE
            archive.addfile(member)
    return buffer.getvalue()


def child(site: Site, *members: tuple[str, str], env: list[str] | None = None, packed: str = "gzip") -> None:
    """Push an image to a different repository of the registry, with one layer on top of the proved image."""
    tar = layer(*members)
    blob = gzip.compress(tar) if packed == "gzip" else zstandard.compress(tar) if packed == "zstd" else tar
    config = config_of([LAYER, oci_types.digest_of(tar)], {LOCK_LABEL: site.lock.id}, env)
    layers = [{"digest": d, "mediaType": LAYER_TYPE} for d in (LAYER, site.registry.add_blob(blob))]
    document = {"mediaType": oci_types.MANIFEST, "config": {"digest": site.registry.add_blob(config)}, "layers": layers}
    site.registry.put(oci_types.MANIFEST, document, "app")


SITE = "opt/venv/lib/python3.11/site-packages"


def child_reasons(site: Site) -> list[str]:
    return reasons(site, "--base", f"{site.registry.host}/team/sample", tag="app", name="team/app")


@pytest.mark.parametrize("packed", ["gzip", "zstd", ""])
def test_a_child_that_replaces_nothing_is_verified(pushed: Site, packed: str) -> None:
    child(
        pushed, ("opt/", "dir"), (SITE, "dir"), (f"{SITE}/mine/__init__.py", "file"), ("app/main.py", "file"),
        (f"{SITE}/mine/__pycache__", "dir"), (f"{SITE}/mine/__pycache__/a.pyc", "file"), packed=packed,
    )  # fmt: skip
    assert child_reasons(pushed) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        f"{SITE}/torch.py",
        f"./{SITE}/torch.py",
        f"{SITE}/x/../torch.py",
        f"{SITE}/.wh.torch.py",
        f"{SITE}/torch-2.13.0+cpu.dist-info/METADATA",
        f"{SITE}/torch-2.2.0.dist-info/METADATA",
        f"{SITE}/.wh..wh..opq",
        "opt/.wh.venv",
        "opt/venv",
    ],
)
def test_a_child_that_replaces_a_locked_library_is_refused(pushed: Site, path: str) -> None:
    for packed in ("gzip", "zstd"):
        child(pushed, ("app/main.py", "file"), (path, "file"), packed=packed)
        assert child_reasons(pushed) == ["replaced"]


@pytest.mark.parametrize(
    ("member", "env"),
    [
        ("app", ["PATH=/bin", "LD_LIBRARY_PATH=/x"]),
        ("app", ["PATH=/bin", "PYTHONPATH=/x"]),
        ("etc/ld.so.preload", None),
    ],
)
def test_a_child_that_changes_what_is_found_first_is_refused(pushed: Site, member: str, env: list[str] | None) -> None:
    child(pushed, (member, "file"), env=env)
    assert child_reasons(pushed) == ["environment"]


def test_a_child_with_a_second_cublas_is_refused(site: Site, key: Path) -> None:
    site.prove(run_on("NVIDIA H20"))
    assert site.push().code == 0
    child(site, ("usr/lib/libcublas.so.12", "file"))
    assert child_reasons(site) == ["shadowed"]


def test_a_child_of_something_else_is_refused(pushed: Site) -> None:
    child(pushed)
    media, raw = pushed.registry.manifests["app"]
    document = json.loads(raw)
    config = config_of([f"sha256:{sha('x')}", oci_types.digest_of(layer())], {LOCK_LABEL: pushed.lock.id})
    document["config"]["digest"] = pushed.registry.add_blob(config)
    pushed.registry.put(media, document, "app")
    assert child_reasons(pushed) == ["base"]


def attributed(**attributes: str) -> bytes:
    """Return a layer of one file with these extended attributes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("b")
        member.pax_headers = {name.replace("_", "."): value for name, value in attributes.items()}
        archive.addfile(member)
    return buffer.getvalue()


def sparse(maps: int) -> bytes:
    """Return a layer of one sparse file in GNU's old format, with this many blocks in its map."""
    head = tarfile.TarInfo("b")
    head.type = tarfile.GNUTYPE_SPARSE
    made = bytearray(head.tobuf(tarfile.GNU_FORMAT))
    made[482] = 1  # more of the map follows
    made[148:156] = b" " * 8
    made[148:156] = f"{sum(made):06o}\0 ".encode()
    return bytes(made) + (b"00000000001\0" * 42 + b"\1" + b"\0" * 7) * maps


# zstd frames that request 1 GiB of memory, and one that requests a TiB.
WINDOW = b"\x28\xb5\x2f\xfd\x00\xa0" + b"\x01\0\0"
ENDLESS = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\x01\0\0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"\x28\xb5\x2f\xfdx", "malformed"), (zstandard.compress(layer(("a", "file"))), "digest"),
     (zstandard.compress(layer(("b", "file")))[:-1], "malformed"), (WINDOW, "malformed"), (ENDLESS, "malformed"),
     (zstandard.compress(layer(("b", "file"))) + b"no zstd" * 9, "malformed"),
     (gzip.compress(layer(("a", "file"))), "digest"), (b"\x1f\x8bx", "malformed"),
     (b"x" * 2000, "malformed"), (attributed(GNU_sparse_realsize="x"), "malformed"),
     (attributed(size="9" * 30), "too-large"), (gzip.compress(attributed(size=str(1 << 62))), "too-large"),
     (gzip.compress(layer(("a", "file")) + bytes(3 << 20)) + b"no gzip" * 9, "malformed"),
     (attributed(GNU_sparse_map="0,1", GNU_sparse_size=str(1 << 60)), "layer"), (gzip.compress(sparse(100)), "layer")],
    ids=["zstd", "zstd-another", "zstd-cut", "zstd-window", "zstd-size", "zstd-behind",
         "another", "cut", "no-tar", "no-number", "too-large", "endless", "behind", "sparse", "old-sparse"],
)  # fmt: skip
def test_a_layer_that_is_not_what_it_says_is_refused(pushed: Site, content: bytes, reason: str) -> None:
    child(pushed, ("b", "file"))
    media, raw = pushed.registry.manifests["app"]
    document = json.loads(raw)
    document["layers"][1]["digest"] = pushed.registry.add_blob(content)
    pushed.registry.put(media, document, "app")
    assert child_reasons(pushed) == [reason]


def test_a_layer_with_an_endless_name_is_refused(pushed: Site) -> None:
    child(pushed, ("a" * (2 << 20), "file"))
    assert child_reasons(pushed) == ["too-large"]


def test_a_child_without_its_base_gets_a_hint_to_name_it(pushed: Site) -> None:
    child(pushed)
    assert reasons(pushed, tag="app", name="team/app") == ["no-evidence", "base"]
