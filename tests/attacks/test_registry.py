"""An attacker who can write to the registry and has no key: an index, another signed image, a child image."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from unit.evidence.runs import run_on
from unit.saved import tar
from unit.site import LAYER, LAYER_TYPE, Site, config_of, pushed
from unit.support import CommandResult, as_yaml, envbuild, sha

from envbuild.attest import child_config_check, in_toto_statements, keys_and_signatures, registry_attestations
from envbuild.evidence import evidence_statements_and_store
from envbuild.image.image_naming import LOCK_LABEL
from envbuild.registry import oci_types
from envbuild.registry.image_content_reader import Config
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import CheckFailed, FileError


@pytest.fixture
def site(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An image that its owner verified, signed and pushed to team/sample."""
    with pushed(project, monkeypatch) as found:
        yield found


def verify(site: Site, *arguments: str, ref: str = "team/sample:verified") -> CommandResult:
    return envbuild("verify", f"{site.registry.host}/{ref}", "--key", "team.pub", *arguments, "--json")


def refused(result: CommandResult) -> list[str]:
    """Return the ids of the reasons for the refusal."""
    assert result.code == CheckFailed.code, result.stdout
    found = [reason["id"] for reason in result.document["reasons"]]
    assert found and result.document["state"] == "unverified"
    return found


def digest_of(site: Site, tag: str = "verified") -> str:
    return oci_types.digest_of(site.registry.manifests[tag][1])


def put_image(site: Site, tag: str, config: bytes, *layers: str) -> dict[str, Any]:
    """Put an image into the registry under a tag; return its descriptor."""
    document = {
        "schemaVersion": 2,
        "mediaType": oci_types.MANIFEST,
        "config": oci_types.descriptor(oci_types.CONFIG, config),
        "layers": [{"mediaType": LAYER_TYPE, "digest": layer, "size": 1} for layer in layers or (LAYER,)],
    }
    site.registry.add_blob(config)
    site.registry.put(oci_types.MANIFEST, document, tag)
    return described(site, tag)


def described(site: Site, tag: str) -> dict[str, Any]:
    return oci_types.descriptor(*site.registry.manifests[tag])


# an index

PROVED, EVIL = "proved", "evil"


def put_index(site: Site, *entries: tuple[str, str | None]) -> str:
    """Move the tag `verified` to an index of (image, platform as OS/ARCHITECTURE); return its digest."""
    known = {PROVED: described(site, "verified"), EVIL: put_image(site, "evil", config_of([LAYER], {}, ["EVIL=1"]))}
    manifests = []
    for name, platform in entries:
        system, _, architecture = (platform or "").partition("/")
        more = {"platform": {"os": system, "architecture": architecture}} if platform else {}
        manifests.append({**known[name], **more})
    document = {"schemaVersion": 2, "mediaType": oci_types.INDEX, "manifests": manifests}
    return site.registry.put(oci_types.INDEX, document, "verified")


@pytest.mark.attack(
    "writer of a registry", "an index with the proved image and another image", "refused: several images (index)"
)
@pytest.mark.parametrize(
    "entries",
    [
        ((EVIL, "linux/x86_64"), (PROVED, "linux/amd64")),
        ((EVIL, "Linux/AMD64"), (PROVED, "linux/amd64")),
        ((PROVED, "linux/amd64"), (EVIL, "linux/arm64")),
        ((PROVED, "linux/amd64"), (EVIL, "linux/amd64")),
        ((PROVED, "linux/amd64"), (EVIL, None)),
        ((PROVED, "linux/amd64"), (EVIL, "Unknown/unknown")),
        ((PROVED, "unknown/unknown"),),
    ],
    ids=["x86_64", "AMD64", "arm64", "twice", "no-platform", "Unknown", "none"],
)
def test_an_index_of_several_images(site: Site, entries: tuple[tuple[str, str | None], ...]) -> None:
    digest = put_index(site, *entries)
    assert refused(verify(site)) == ["index"]
    assert refused(verify(site, ref=f"team/sample@{digest}")) == ["index"]


@pytest.mark.attack("writer of a registry", "an index within an index", "refused: not an image's manifest (index)")
def test_a_nested_index(site: Site) -> None:
    put_index(site, (PROVED, "linux/amd64"))
    entry = {**described(site, "verified"), "platform": {"os": "linux", "architecture": "amd64"}}
    for media_type in (oci_types.INDEX, oci_types.MANIFEST):
        document = {"schemaVersion": 2, "mediaType": oci_types.INDEX, "manifests": [{**entry, "mediaType": media_type}]}
        site.registry.put(oci_types.INDEX, document, "verified")
        assert refused(verify(site)) == ["index"]


@pytest.mark.attack(
    "writer of a registry",
    "an index that calls the proved manifest an index",
    "refused: not an image's manifest (index)",
)
def test_an_index_with_another_media_type_for_its_image(site: Site) -> None:
    entry = {**described(site, "verified"), "mediaType": oci_types.INDEX}
    site.registry.put(
        oci_types.INDEX, {"schemaVersion": 2, "mediaType": oci_types.INDEX, "manifests": [entry]}, "verified"
    )
    assert refused(verify(site)) == ["index"]


@pytest.mark.attack("writer of a registry", "an index whose image is not there", "refused: is missing (index)")
def test_an_index_without_its_image(site: Site) -> None:
    entry = {**described(site, "verified"), "digest": f"sha256:{'1' * 64}"}
    document = {"schemaVersion": 2, "mediaType": oci_types.INDEX, "manifests": [entry]}
    site.registry.put(oci_types.INDEX, document, "verified")
    found = verify(site)
    assert refused(found) == ["index"]
    assert "is missing" in found.stdout


@pytest.mark.legitimate(
    "user of buildx", "an index with one image and its attestation", "verified, with the digest of the image's manifest"
)
def test_an_index_of_one_image_and_an_attestation(site: Site) -> None:
    image = digest_of(site)
    digest = put_index(site, (PROVED, "linux/amd64"), (EVIL, "unknown/unknown"))
    for ref in ("team/sample:verified", f"team/sample@{digest}"):
        result = verify(site, ref=ref)
        assert (result.code, result.document["digest"]) == (0, image), result.stdout


# another signed image


@pytest.mark.attack(
    "writer of a registry",
    "the signed image of one repository served as another's",
    "refused: pushed elsewhere (repository)",
)
@pytest.mark.parametrize("name", ["team/h20-production", "team/sample-full", "other/sample"])
def test_a_signed_image_in_another_repository(site: Site, name: str) -> None:
    """For example, the CPU image in place of the GPU image, or an image verified at `quick` in place of an image
    verified at `full`."""
    for ref in (f"{name}:verified", f"{name}@{digest_of(site)}"):
        result = verify(site, ref=ref)
        assert refused(result) == ["repository"]
        assert f"--from {site.registry.host}/team/sample" in result.document["reasons"][0]["detail"]


@pytest.mark.attack(
    "writer of a registry",
    "an image of one repository, where a copy of a third one is accepted",
    "refused: pushed elsewhere (repository)",
)
def test_a_copy_of_another_repository_than_the_one_that_is_named(site: Site) -> None:
    named = f"{site.registry.host}/team/other"
    assert refused(verify(site, "--from", named, ref="mirror/sample:verified")) == ["repository"]


@pytest.mark.attack(
    "writer of a registry",
    "an image of another profile, lock or level, by the same key",
    "refused: profile, lock, stale",
)
@pytest.mark.parametrize(
    ("expectations", "reason"),
    [({"profile": "h20"}, "profile"), ({"lock": f"sha256:{sha('x')}"}, "lock"), ({"lock": sha("x")[:12]}, "lock"),
     ({"level": "full"}, "stale")],
)  # fmt: skip
def test_another_image_than_is_expected(site: Site, expectations: dict[str, str], reason: str) -> None:
    options = [word for name, value in expectations.items() for word in (f"--{name}", value)]
    result = verify(site, *options)
    assert refused(result) == [reason]
    assert (result.document["profile"], result.document["lock"]) == ("sample", site.lock.id)
    Path("policy.yaml").write_text(as_yaml({"keys": ["team.pub"], **expectations}), encoding="utf-8")
    assert refused(verify(site, "--policy", "policy.yaml")) == [reason]


@pytest.mark.attack(
    "writer of a registry",
    "the proved configuration in a manifest with another layer, its evidence copied",
    "refused: the manifest was not signed (subject)",
)
def test_the_proved_configuration_in_another_manifest(site: Site) -> None:
    copied = site.registry.manifests[registry_attestations.att_tag(digest_of(site))]
    put_image(site, "verified", site.engine.config, f"sha256:{sha('evil')}")
    site.registry.manifests[registry_attestations.att_tag(digest_of(site))] = copied
    assert refused(verify(site)) == ["subject"]


@pytest.mark.legitimate("team with a mirror", "a copy to another repository, with --from", "verified")
def test_a_copy_to_another_repository(site: Site) -> None:
    named = f"{site.registry.host}/team/sample"
    Path("policy.yaml").write_text(
        as_yaml({"keys": ["team.pub"], "from": ["r.example/other", named]}), encoding="utf-8"
    )
    for ref in ("mirror/sample:verified", f"mirror/sample@{digest_of(site)}"):
        assert verify(site, "--from", named, ref=ref).code == 0
        assert verify(site, "--policy", "policy.yaml", ref=ref).code == 0


@pytest.mark.legitimate(
    "user of an image", "the profile, the lock and the level that it has", "verified; the answer names all of them"
)
def test_the_image_that_is_expected(site: Site) -> None:
    for lock in (site.lock.id, site.lock.id.removeprefix("sha256:"), site.lock.short):
        result = verify(site, "--profile", "sample", "--lock", lock, "--level", "quick")
        assert result.code == 0, result.stdout
    named = {key: result.document[key] for key in ("profile", "lock", "level", "gpus")}
    assert named == {"profile": "sample", "lock": site.lock.id, "level": "quick", "gpus": ["cpu"]}
    plain = envbuild("verify", f"{site.registry.host}/team/sample:verified", "--key", "team.pub")
    assert plain.stderr == f"verified on cpu: profile sample, lock {site.lock.short}, level quick\n"


@pytest.mark.legitimate("team", "one image that was pushed as several profiles", "verified as each of them")
def test_an_image_of_several_profiles(site: Site) -> None:
    media_type, raw = site.registry.manifests["verified"]
    subject = oci_types.Manifest(raw, media_type)
    envelopes, _ = registry_attestations.fetch_envelopes(site.place, subject.digest)
    stated = [json.loads(keys_and_signatures.envelope_payload(envelope)) for envelope in envelopes]
    (build,) = (one for one in stated if one["predicateType"] == in_toto_statements.PROVENANCE)
    build["predicate"]["buildDefinition"]["externalParameters"]["profile"]["name"] = "other"
    wanted = [(in_toto_statements.PROVENANCE, strict_and_canonical_json.encode(build))]
    assert registry_attestations.publish(site.place, subject, wanted, keys_and_signatures.configured_signer()) == 1
    for name in ("sample", "other"):
        result = verify(site, "--profile", name)
        assert (result.code, result.document["profile"]) == (0, name), result.stdout
    assert refused(verify(site, "--profile", "third")) == ["profile"]


@pytest.mark.legitimate("user of a GPU", "evidence from a file, signed before the push", "verified by it")
def test_evidence_that_was_signed_before_the_push(site: Site) -> None:
    """Such evidence names the image only by the image id."""
    path = site.prove(run_on("NVIDIA H20"))
    record = dict(evidence_statements_and_store.stored(site.engine.image.id))[path]
    subject = in_toto_statements.Subject("envbuild/sample", site.engine.image.id)
    made = in_toto_statements.test_result(record, evidence_statements_and_store.record_text(path), subject)
    file = evidence_statements_and_store.save_envelope(
        path, keys_and_signatures.seal(in_toto_statements.canonical(made), keys_and_signatures.configured_signer())
    )
    assert refused(verify(site, "--gpu", "h20")) == ["gpu"]
    assert verify(site, "--gpu", "h20", "--evidence", str(file)).code == 0


@pytest.mark.attack("author of evidence", "a statement about another profile or lock", "refused: profile, lock")
def test_evidence_of_another_profile_or_lock(site: Site) -> None:
    path = site.prove(run_on("NVIDIA H20"))
    record = dict(evidence_statements_and_store.stored(site.engine.image.id))[path]
    made = in_toto_statements.test_result(
        record, evidence_statements_and_store.record_text(path), in_toto_statements.Subject("x", record.subject)
    )
    file = evidence_statements_and_store.save_envelope(
        path, keys_and_signatures.seal(in_toto_statements.canonical(made), keys_and_signatures.configured_signer())
    )
    command = ("verify", "--evidence", str(file), "--key", "team.pub", "--json")
    assert refused(envbuild(*command, "--profile", "h20")) == ["profile"]
    assert refused(envbuild(*command, "--lock", sha("x"))) == ["lock"]
    result = envbuild(*command, "--profile", "sample", "--lock", site.lock.short)
    assert (result.code, result.document["profile"], result.document["lock"]) == (0, "sample", site.lock.id)


# a child image


def put_child(site: Site, tag: str = "verified", *, layers: tuple[bytes, ...] = (), **settings: Any) -> None:
    """Push an image with the base's configuration (also the label of its lock), changed `settings` and more
    `layers`."""
    document = json.loads(site.engine.config)
    document["config"] |= settings
    digests = [LAYER, *(site.registry.add_blob(raw) for raw in layers)]
    document["rootfs"]["diff_ids"] = digests
    put_image(site, tag, json.dumps(document).encode(), *digests)


def with_base(site: Site) -> tuple[str, str]:
    return "--base", f"{site.registry.host}/team/sample"


@pytest.mark.attack(
    "writer of a registry",
    "the proved image with one more layer, over the tag `verified`",
    "refused: a child without --base (base)",
)
def test_a_child_with_one_more_layer(site: Site) -> None:
    put_child(site, layers=(tar([("opt/venv/evil.py", "evil")]),))
    for ref in ("team/sample:verified", f"team/sample@{digest_of(site)}"):
        result = verify(site, ref=ref)
        assert "base" in refused(result)
        assert (result.document["base"], result.document["gpus"]) == (None, [])


@pytest.mark.attack(
    "writer of a registry",
    "the proved layers with another configuration, over the tag `verified`",
    "refused: a child without --base (base), and with it (configuration, environment)",
)
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"Entrypoint": ["/evil"]}, "configuration"),
        ({"Env": ["PATH=/evil:/bin"]}, "environment"),
        ({"Env": []}, "environment"),
        ({"Env": ["PATH=/bin", "LD_PRELOAD=/evil.so"]}, "environment"),
        ({"Env": ["PATH=/bin", "LD_AUDIT=/evil.so"]}, "environment"),
        ({"Env": ["PATH=/bin", "GLIBC_TUNABLES=glibc.rtld.x=1"]}, "environment"),
        ({"Env": ["PATH=/bin", "PYTHONSTARTUP=/evil.py"]}, "environment"),
        ({"Env": ["PATH=/bin", "PYTHONPYCACHEPREFIX=/evil"]}, "environment"),
        ({"Env": ["PATH=/bin", "CUDA_INJECTION64_PATH=/evil.so"]}, "environment"),
        ({"Env": ["PATH=/bin", "NVIDIA_TF32_OVERRIDE=1"]}, "environment"),
        ({"Env": ["PATH=/bin", "NCCL_NET_PLUGIN=/evil.so"]}, "environment"),
        ({"Env": ["PATH=/bin", "TRITON_CACHE_DIR=/evil"]}, "environment"),
        ({"Env": ["PATH=/bin", "TRITON_HOME=/evil"]}, "environment"),
        ({"Env": ["PATH=/bin", "TRITON_INTERPRET=1"]}, "environment"),
        ({"Env": ["PATH=/bin", "TRITON_CACHE_MANAGER=evil:Manager"]}, "environment"),
        ({"Env": ["PATH=/bin", "CC=/evil"]}, "environment"),
        ({"Env": ["PATH=/bin", "CXX=/evil"]}, "environment"),
        ({"Env": ["PATH=/bin", "NVCC_PREPEND_FLAGS=-use_fast_math"]}, "environment"),
        ({"Env": ["PATH=/bin", "NVCC_APPEND_FLAGS=-include /evil.h"]}, "environment"),
        ({"Env": ["PATH=/bin", "NVCC_CCBIN=/evil"]}, "environment"),
        ({"Env": ["PATH=/bin", "PYTORCH_KERNEL_CACHE_PATH=/evil"]}, "environment"),
        ({"Env": ["PATH=/bin", "PYTORCH_TUNABLEOP_ENABLED=1"]}, "environment"),
        ({"Env": ["PATH=/bin", "PYTORCH_TUNABLEOP_FILENAME=/evil.csv"]}, "environment"),
        ({"Env": ["PATH=/bin", "TORCHINDUCTOR_CACHE_DIR=/evil"]}, "environment"),
        ({"Env": ["PATH=/bin", "TORCH_EXTENSIONS_DIR=/evil"]}, "environment"),
        ({"Env": ["PATH=/bin", "TORCH_DEVICE_BACKEND_AUTOLOAD=1"]}, "environment"),
        ({"Env": ["PATH=/bin", "OPENSSL_CONF=/evil.cnf"]}, "environment"),
        ({"Env": ["PATH=/bin", "OPENSSL_MODULES=/evil"]}, "environment"),
        ({"Env": ["PATH=/bin", "OMP_TOOL_LIBRARIES=/evil.so"]}, "environment"),
        ({"Env": ["PATH=/bin", "NVTX_INJECTION64_PATH=/evil.so"]}, "environment"),
        ({"Env": ["PATH=/bin", "IBV_DRIVERS=/evil.so"]}, "environment"),
        ({"Env": ["PATH=/bin", "ONEDNN_DEFAULT_FPMATH_MODE=BF16"]}, "environment"),
        ({"Env": ["PATH=/bin", "DNNL_DEFAULT_FPMATH_MODE=BF16"]}, "environment"),
        ({"Env": ["PATH=/bin", "ATEN_CPU_CAPABILITY=default"]}, "environment"),
        ({"Env": ["PATH=/bin", "MKL_CBWR=COMPATIBLE"]}, "environment"),
        ({"Env": ["PATH=/bin", "BASH_ENV=/evil.sh"]}, "environment"),
    ],
)  # fmt: skip
def test_a_child_with_another_configuration(site: Site, settings: dict[str, Any], reason: str) -> None:
    put_child(site, **settings)
    assert "base" in refused(verify(site))
    assert refused(verify(site, *with_base(site))) == [reason]


@pytest.mark.attack(
    "author of a child image", "a user, a signal or volumes other than the base's", "refused: changed (configuration)"
)
@pytest.mark.parametrize(
    "settings",
    [{"User": "0"}, {"User": ""}, {"User": "other"}, {"StopSignal": "SIGKILL"}, {"Volumes": {"/new": {}}},
     {"Volumes": None}],
)  # fmt: skip
def test_a_child_that_changes_a_setting_of_its_base(settings: dict[str, Any]) -> None:
    base = Config("b", (), {}, {}, {"User": "1000", "StopSignal": "SIGINT", "Volumes": {"/data": {}}})
    child = replace(base, settings={key: value for key, value in {**base.settings, **settings}.items() if value})
    assert [reason.id for reason in child_config_check.configuration_objections(child, base, ())] == ["configuration"]
    assert list(child_config_check.configuration_objections(base, base, ("User", "Env", "Cmd"))) == []


@pytest.mark.attack("author of a child image", "a label that names another lock", "refused (configuration)")
def test_a_child_that_changes_envbuilds_labels(site: Site) -> None:
    """The user names the base image by its tag, so the label does not choose the base image."""
    put_child(site, "app", Labels={LOCK_LABEL: f"sha256:{sha('x')}"})
    base = f"{site.registry.host}/team/sample:verified"
    assert refused(verify(site, "--base", base, ref="team/app:app")) == ["configuration"]


@pytest.mark.attack(
    "writer of a registry", "an image of another lock as the base of a child", "refused: profile, lock, repository"
)
def test_a_base_that_is_not_expected(site: Site) -> None:
    put_child(site, "app", Cmd=["serve"])
    assert refused(verify(site, *with_base(site), "--profile", "h20", ref="team/app:app")) == ["profile"]
    assert refused(verify(site, *with_base(site), "--lock", sha("x"), ref="team/app:app")) == ["lock"]
    other = f"{site.registry.host}/mirror/sample"
    assert refused(verify(site, "--base", other, ref="team/app:app")) == ["repository"]
    assert verify(site, "--base", other, "--from", with_base(site)[1], ref="team/app:app").code == 0


@pytest.mark.attack(
    "writer of a registry",
    "an image of another lock over the tag `verified`, checked with --base",
    "refused: a base with that lock does not exist (base)",
)
def test_an_image_whose_base_is_not_in_the_repository(site: Site) -> None:
    put_child(site, layers=(tar([("opt/venv/evil.py", "evil")]),), Labels={LOCK_LABEL: sha("another")})
    assert refused(verify(site, *with_base(site))) == ["base"]


@pytest.mark.legitimate(
    "user of an image",
    "a child with --base, its own files, Cmd, WorkingDir, User and variables",
    "verified as a child of the base; the answer lists what it sets",
)
def test_an_ordinary_child(site: Site) -> None:
    own = {"APP_PORT": "1", "ENV": "production", "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": "0",
           "CUDNN_LOGINFO_DBG": "1", "MKL_NUM_THREADS": "4", "TORCH_CUDA_ARCH_LIST": "9.0",
           "TRITON_PRINT_AUTOTUNING": "1", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # fmt: skip
    settings = {
        "Cmd": ["serve"],
        "WorkingDir": "/app",
        "User": "1000",
        "Env": ["PATH=/bin", *(f"{name}={value}" for name, value in own.items())],
        "Labels": {LOCK_LABEL: site.lock.id, "org.opencontainers.image.title": "app"},
        "Image": "sha256:0",
    }
    base = digest_of(site)
    put_child(site, "app", layers=(tar([("app/main.py", "x")]),), **settings)
    for ref in ("team/app:app", f"team/app@{digest_of(site, 'app')}"):
        result = verify(site, *with_base(site), ref=ref)
        assert result.code == 0, result.stdout
        assert result.document["digest"] == digest_of(site, "app")
        assert result.document["base"] == f"{site.registry.host}/team/sample@{base}"
        assert (result.document["profile"], result.document["level"]) == ("sample", "quick")
        assert result.document["changed_settings"] == {
            "Cmd": ["serve"],
            "Env": own,
            "Labels": {"org.opencontainers.image.title": "app"},
            "User": "1000",
            "WorkingDir": "/app",
        }
    command = ("verify", f"{site.registry.host}/team/app:app", "--key", "team.pub", *with_base(site))
    plain = envbuild(*command)
    assert plain.stdout == f"{digest_of(site, 'app')}\n"
    assert f"child of {site.registry.host}/team/sample@{base}" in plain.stderr and '"/app"' in plain.stderr


@pytest.mark.legitimate("user of an image", "a child of an image whose default command it replaces", "verified")
def test_a_child_with_another_command_than_its_base() -> None:
    """Every image of envbuild has the command `python`; images on a foreign base image run as user 0."""
    base = Config("b", (), {}, {}, {"Cmd": ["python"], "User": "0", "WorkingDir": "/workspace"})
    child = replace(base, settings={"Cmd": ["serve"], "User": "1000", "WorkingDir": "/app"})
    assert list(child_config_check.configuration_objections(child, base, ())) == []
    assert child_config_check.configuration_differences(replace(base, settings={}), base) == {
        "Cmd": None,
        "WorkingDir": None,
    }


@pytest.mark.attack(
    "author of a child image",
    "a command or a variable that the policy forbids",
    "refused: by the policy (configuration)",
)
def test_a_child_that_sets_what_a_policy_forbids(site: Site) -> None:
    put_child(site, "app", Cmd=["serve"], Env=["PATH=/bin", "APP_PORT=1"], WorkingDir="/app")
    policy = {"keys": ["team.pub"], "base": with_base(site)[1]}
    for forbidden, count in ((["Cmd", "Env"], 2), (["Cmd", "User"], 1), (["User"], 0)):
        Path("policy.yaml").write_text(as_yaml({**policy, "forbid_in_child": forbidden}), encoding="utf-8")
        result = verify(site, "--policy", "policy.yaml", ref="team/app:app")
        assert [reason["id"] for reason in result.document["reasons"]] == ["configuration"] * count
    Path("policy.yaml").write_text(as_yaml({**policy, "forbid_in_child": ["cmd"]}), encoding="utf-8")
    assert verify(site, "--policy", "policy.yaml", ref="team/app:app").code == FileError.code
