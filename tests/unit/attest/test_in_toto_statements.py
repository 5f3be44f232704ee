from __future__ import annotations

import base64
import copy
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from envbuild.attest import in_toto_statements, keys_and_signatures, sbom, trusted_statements
from envbuild.attest.in_toto_statements import BuildDetails, Subject
from envbuild.evidence import evidence_statements_and_store, proof_rules
from envbuild.facts import fact_file_reader
from envbuild.fetch.archive_spec import Archive
from envbuild.image.build_records import CompiledRecord
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.lock.wheel_file_hashes_and_contents import roots
from envbuild.profile.project_test_shapes_and_script import Script
from envbuild.util import strict_and_canonical_json, untrusted_input_errors
from envbuild.util.errors import CheckFailed
from unit.evidence.runs import documents, judged, lines, passed_run, probe
from unit.evidence.test_evidence_statements_and_store import IMAGE, document_of, record_of
from unit.support import PROFILE, lock_for, plan_of, sha, write_wheel

SUBJECT = Subject("envbuild/sample", IMAGE.id, "registry.example/sample", f"sha256:{sha('manifest')}")


@pytest.fixture
def locked(project: Path) -> Lock:
    return lock_for(plan_of(project, PROFILE))


def made_of(locked: Lock, project: Path) -> BuildDetails:
    lock_file.write(locked, project / "sample.lock.yaml", "sample")
    return BuildDetails(
        profile="sample",
        document=PROFILE,
        lock=locked,
        lock_text=(project / "sample.lock.yaml").read_text(encoding="utf-8"),
        facts=fact_file_reader.facts_digest(),
        recipe=sha("recipe"),
        versions={"envbuild": "0.1.0", "engine": "docker 26.1.5"},
        roots={locked.wheels[0].wheel.file: ("torch",)},
    )


def result_of(locked: Lock) -> Any:
    """Return the document of a test result."""
    path = evidence_statements_and_store.save(record_of(locked))
    ((_, record),) = evidence_statements_and_store.stored(IMAGE.id)
    return in_toto_statements.test_result(record, evidence_statements_and_store.record_text(path), SUBJECT).document()


def built(made: BuildDetails) -> Any:
    """Return the document of a build statement."""
    return json.loads(in_toto_statements.canonical(in_toto_statements.slsa_provenance(made, SUBJECT)))


# the record is part of its statement


def test_a_test_result_carries_its_record(locked: Lock) -> None:
    wanted = record_of(locked)
    stated = result_of(locked)
    assert stated["_type"] == "https://in-toto.io/Statement/v1"
    assert [item["digest"]["sha256"] for item in stated["subject"]] == [IMAGE.id[7:], sha("manifest")]
    digest, record = in_toto_statements.read_test_result(stated["predicate"])
    assert record == wanted
    assert digest == evidence_statements_and_store.stored(IMAGE.id)[0][0].name.partition(".")[0]


def test_before_a_push_the_image_id_is_the_only_subject() -> None:
    assert Subject("envbuild/sample", IMAGE.id).digests == (("envbuild/sample", IMAGE.id[7:]),)


def test_the_same_statement_gives_the_same_bytes(locked: Lock) -> None:
    stated = result_of(locked)
    other = dict(reversed(copy.deepcopy(stated).items()))
    read, again = map(in_toto_statements.parse_statement, (stated, other))
    assert (
        in_toto_statements.canonical(read)
        == in_toto_statements.canonical(again)
        == strict_and_canonical_json.encode(stated)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.update(result="FAILED"), "does not match its run record"),
        (lambda p: p["passedTests"].append("h20/gemm.exact"), "does not match its run record"),
        (lambda p: p["configuration"].pop(), "names no run record|is not in its statement"),
        (lambda p: p["configuration"][-1].update(content="e30="), "does not match the digest in its statement"),
        (lambda p: p["configuration"][-1].pop("content"), "is not in its statement"),
        (lambda p: p["configuration"][-1].update(content="*"), "is not in its statement"),
        (lambda p: p.pop("configuration"), "names no run record"),
        (lambda p: p.update(configuration=[1]), "names no run record"),
    ],
)
def test_a_predicate_that_was_tampered_with_is_refused(locked: Lock, change: Any, message: str) -> None:
    predicate = result_of(locked)["predicate"]
    change(predicate)
    with pytest.raises(CheckFailed, match=message):
        in_toto_statements.read_test_result(predicate)


def test_another_record_with_its_own_digest_is_refused(locked: Lock) -> None:
    """If the whole record is replaced, the statement contradicts the record."""
    predicate = result_of(locked)["predicate"]
    other = record_of(locked, passed_run(probe("env.libs"), probe("gemm.crash", "failed"))).encoded.encode()
    descriptor = predicate["configuration"][-1]
    descriptor.update(content=base64.b64encode(other).decode(), digest={"sha256": hashlib.sha256(other).hexdigest()})
    with pytest.raises(CheckFailed, match="does not match its run record"):
        in_toto_statements.read_test_result(predicate)


def test_evidence_from_before_gpus_had_uuids_is_still_read(locked: Lock) -> None:
    """A record as an earlier envbuild wrote it: no "uuids", no "driver"."""
    old = record_of(locked, gpu={"model": "h20", "name": "NVIDIA H20", "count": 1})
    evidence_statements_and_store.save(old)
    ((path, record),) = evidence_statements_and_store.stored(IMAGE.id)
    assert proof_rules.model_of(record) == "h20"
    stated = in_toto_statements.test_result(record, evidence_statements_and_store.record_text(path), SUBJECT)
    assert in_toto_statements.read_test_result(stated.predicate)[1] == old


# the GPU


def test_the_record_says_which_gpu_and_driver(locked: Lock) -> None:
    cards = [
        {"name": "NVIDIA H20", "compute_capability": "9.0", "uuid_sha256": "a" * 64},
        {"name": "NVIDIA H20", "compute_capability": "9.0", "uuid_sha256": None},
    ]
    traits = {"gpus": cards, "driver": "550.54.15"}
    record = document_of(locked, judged(lines(documents(probe("env.identity", traits=traits)))))
    assert record["gpu"] == {
        "model": "h20", "name": "NVIDIA H20", "compute_capability": "9.0", "count": 2,
        "uuids": ["a" * 64, None], "driver": "550.54.15",
    }  # fmt: skip


# the build


def test_the_build_names_every_file_by_hash(locked: Lock, project: Path) -> None:
    stated = built(made_of(locked, project))
    assert stated["predicateType"] == "https://slsa.dev/provenance/v1"
    definition = stated["predicate"]["buildDefinition"]
    found = {item["name"]: item["digest"]["sha256"] for item in definition["resolvedDependencies"]}
    wanted = {w.wheel.file: w.wheel.sha256 for w in locked.wheels} | {
        d.file: d.sha256 for d in (*locked.base, *locked.apt)
    }
    assert found == wanted
    assert definition["internalParameters"]["facts"] == {"sha256": fact_file_reader.facts_digest()}
    assert definition["externalParameters"]["profile"] == {"name": "sample", "document": PROFILE}
    enclosed = in_toto_statements.Descriptor.model_validate(definition["externalParameters"]["lock"])
    text = in_toto_statements.descriptor_content(enclosed, "the lock").decode()
    assert lock_file.parse(text, "the lock") == locked


def test_a_base_image_is_a_dependency(project: Path) -> None:
    image = f"registry.example/base@sha256:{sha('base')}"
    based = lock_for(plan_of(project, {**PROFILE, "base": {"image": image}, "apt": []}))
    stated = built(made_of(based, project))
    first = stated["predicate"]["buildDefinition"]["resolvedDependencies"][0]
    assert first["digest"] == {"sha256": sha("base")}


def test_a_script_of_the_projects_own_and_archives_travel_along(
    locked: Lock, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE", "x")
    document = {**PROFILE, "selftest": {**PROFILE["selftest"], "script": Script("smoke.py", "print(1)\n")}}
    archive = Archive("cuda-compat", "570.124.06", sha("archive"), 1000)
    based = dataclasses.replace(locked, archives=(archive,))
    made = dataclasses.replace(made_of(based, project), document=document)
    payload = in_toto_statements.canonical(in_toto_statements.slsa_provenance(made, SUBJECT))
    found = json.loads(payload)["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert {"sha256": sha("archive")} in [item["digest"] for item in found]
    bom: Any = sbom.make_sbom("sample", based, IMAGE.id)
    assert "cuda-compat" in [item["name"] for item in bom["components"]]
    signer = keys_and_signatures.private(keys_and_signatures.generate("x")[0], "key")
    believed = trusted_statements.believe([keys_and_signatures.seal(payload, signer)], [signer.public], IMAGE.id)
    assert believed.refused == ()
    (build,) = believed.builds
    assert build.profile.selftest.script == Script("smoke.py", "print(1)\n")
    assert build.lock.archives == (archive,)


def test_the_facts_digest_moves_with_a_sites_own(tmp_path: Path) -> None:
    from envbuild.util import user_folders

    before = fact_file_reader.facts_digest()
    own = user_folders.config_file().parent / "facts.d" / "more.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("gpus: []\n", encoding="utf-8")
    assert fact_file_reader.facts_digest() != before


def test_the_folders_of_a_wheel(tmp_path: Path) -> None:
    file = write_wheel(tmp_path, "some-thing", "1.0")
    assert roots(file) == ("some_thing-1.0.dist-info", "some_thing.py")
    moved = {"some_thing-1.0.data/purelib/more/a.py": b"", "some_thing-1.0.data/scripts/tool": b"", "nvidia/x/a": b""}
    file = write_wheel(tmp_path / "more", "some-thing", "1.0", files=moved)
    assert roots(file) == ("more", "nvidia/x", "some_thing-1.0.dist-info", "some_thing.py")


# the bill of materials


def test_the_bill_of_materials_is_valid_and_carries_the_locked_hashes(locked: Lock) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    bom: Any = sbom.make_sbom("sample", locked, IMAGE.id)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(bom)) is None
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    found = {item["bom-ref"]: item["hashes"] for item in bom["components"]}
    wanted = {w.wheel.file: w.wheel.sha256 for w in locked.wheels} | {
        d.file: d.sha256 for d in (*locked.base, *locked.apt)
    }
    assert found == {name: [{"alg": "SHA-256", "content": sha256}] for name, sha256 in wanted.items()}
    assert bom["metadata"]["component"]["hashes"] == [{"alg": "SHA-256", "content": IMAGE.id[7:]}]


def test_the_bill_of_materials_is_the_same_every_time(locked: Lock) -> None:
    assert sbom.make_sbom("sample", locked, IMAGE.id) == sbom.make_sbom("sample", locked, IMAGE.id)


# untrusted documents


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"{" * 10, "is not JSON"),
        (b"[]", "is not a JSON object"),
        (b'{"a": ' * 70 + b"1" + b"}" * 70, "nested deeper than 64"),
        (b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "nested too deep|nested deeper"),
        (b'{"a": 1, "a": 2}', "an object contains a key twice"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": "\xff"}', "is not JSON"),
        (b'{"a": "' + b"x" * 2000 + b'"}', "is larger than 1000 bytes"),
    ],
)
def test_documents_from_elsewhere_are_bounded(raw: bytes, message: str) -> None:
    with pytest.raises(untrusted_input_errors.Malformed, match=message):
        strict_and_canonical_json.parse(
            raw, "the document", limit=1000 if len(raw) == 2009 else strict_and_canonical_json.MAX_BYTES
        )


# extensions

KERNELS: dict[str, Any] = {
    "name": "kernels", "git": "https://git.example/team/kernels", "commit": "c" * 40, "modules": ["kernels_cuda"],
}  # fmt: skip
OTHER: dict[str, Any] = {"name": "other", "sdist": {"sha256": "e" * 64}, "modules": ["other"]}
EXTENDED: dict[str, Any] = {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "extensions": [KERNELS, OTHER]}
WHEEL = CompiledRecord(
    "kernels", sha("key"), "kernels-0.1-cp311-cp311-linux_x86_64.whl", sha("wheel"), ("kernels", "kernels_cuda.so")
)
SECOND = CompiledRecord("other", sha("key 2"), "other-0.1-cp311-cp311-linux_x86_64.whl", sha("wheel 2"), ("other",))


def extended(project: Path) -> BuildDetails:
    made = made_of(lock_for(plan_of(project, EXTENDED)), project)
    return dataclasses.replace(made, document=EXTENDED, compiled=(WHEEL, SECOND))


def test_a_build_names_what_was_compiled_from_what_and_with_what(project: Path) -> None:
    made = extended(project)
    stated = built(made)["predicate"]
    dependencies = {item["name"]: item for item in stated["buildDefinition"]["resolvedDependencies"]}
    assert dependencies["kernels"]["digest"] == {"gitCommit": "c" * 40}
    assert dependencies["other"]["digest"] == {"sha256": "e" * 64}
    assert made.lock.builder
    tools = {item.wheel.file: item.wheel.sha256 for item in made.lock.builder.wheels}
    assert {name: dependencies[name]["digest"]["sha256"] for name in tools} == tools
    assert not any("annotations" in dependencies[name] for name in tools)  # nothing of them is in the image
    first, _ = stated["runDetails"]["byproducts"]
    assert (first["name"], first["digest"]) == (WHEEL.file, {"sha256": WHEEL.sha256})
    assert first["annotations"]["key"] == WHEEL.key
    assert "git.example" not in json.dumps(stated["buildDefinition"]["resolvedDependencies"])


def test_a_build_without_extensions_says_nothing_of_them(locked: Lock, project: Path) -> None:
    assert "byproducts" not in built(made_of(locked, project))["predicate"]["runDetails"]


def test_the_folders_of_a_compiled_wheel_survive_a_round_trip(project: Path) -> None:
    """`verify --base` needs these folders to detect files that a child image replaced."""
    (build,) = trusted_statements._build(in_toto_statements.slsa_provenance(extended(project), SUBJECT))
    assert build.roots["kernels"] == WHEEL.roots and build.roots["other"] == SECOND.roots


@pytest.mark.parametrize("harm", ["none", "other", "odd"])
def test_a_statement_that_leaves_a_compiled_wheel_out_is_malformed(project: Path, harm: str) -> None:
    stated = built(extended(project))
    details = stated["predicate"]["runDetails"]
    changed: dict[str, Any] = {"none": [], "other": details["byproducts"][1:], "odd": [{"name": "x"}]}
    details["byproducts"] = changed[harm]
    with pytest.raises(untrusted_input_errors.Malformed):
        trusted_statements._build(in_toto_statements.parse_statement(stated))


def test_an_sbom_lists_extensions_by_their_commit(project: Path) -> None:
    bom: Any = sbom.make_sbom("sample", extended(project).lock, IMAGE.id)
    versions = {item["name"]: item["version"] for item in bom["components"]}
    assert (versions["kernels"], versions["other"]) == ("c" * 40, "e" * 64)
