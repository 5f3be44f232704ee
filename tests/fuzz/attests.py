"""Targets: statements signed by others, contents of registries and bundles, and policies of a site."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import requests
import yaml
from hypothesis import strategies as st
from requests.adapters import HTTPAdapter
from unit.evidence.runs import passed_run, probe, run_on
from unit.support import sha
from urllib3 import HTTPResponse

from envbuild.attest import (
    child_layer_check,
    community_evidence,
    image_verifier,
    in_toto_statements,
    keys_and_signatures,
    policy,
    policy_check,
    registry_attestations,
    saved_image_file,
    trusted_statements,
)
from envbuild.attest.in_toto_statements import BuildDetails, Subject
from envbuild.attest.policy import Policy
from envbuild.evidence import evidence_statements_and_store, run_record_schema
from envbuild.image import engine_image_to_oci_layout
from envbuild.image.image_naming import LOCK_LABEL
from envbuild.image.layers import base_image_contents
from envbuild.image.layers.base_image_contents import BaseLayerRef
from envbuild.lock import lock_file
from envbuild.registry import image_content_reader, layer_archive_comparison, oci_types, registry_http_and_auth
from envbuild.registry.oci_types import Manifest, Reference
from envbuild.registry.registry_client import Repository
from envbuild.util.errors import EnvbuildError
from envbuild.util.json_output_types import plain
from envbuild.util.untrusted_input_errors import Malformed, Refusal
from fuzz import tars
from fuzz.plans import GOLDEN, lock_seeds
from fuzz.proofs import NOW, WANTED
from fuzz.strategies import BYTES, JSON, Draw, as_json, as_yaml, spoiled, trees, yaml_files
from fuzz.target import Target

PLACE = Reference.parse("registry.example/team/sample:verified")
LAYER = b"layer"
CONFIG: dict[str, Any] = {
    "config": {"Labels": {LOCK_LABEL: "@lock"}, "Env": ["PATH=/bin", "LD_LIBRARY_PATH=/x"]},
    "rootfs": {"type": "layers", "diff_ids": [oci_types.digest_of(LAYER)]},
}


@cache
def signer() -> keys_and_signatures.Signer:
    """Return the same key in every campaign."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = ec.derive_private_key(20261121, ec.SECP256R1())
    return keys_and_signatures.private(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), "the key")


@cache
def _lock() -> lock_file.Lock:
    return lock_file.parse(as_yaml(next(seed for seed in lock_seeds() if seed["content"]["wheels"])).decode(), "a lock")


@cache
def _config() -> bytes:
    return json.dumps(CONFIG).replace("@lock", _lock().id).encode()


def _image_id() -> str:
    return oci_types.digest_of(_config())


@cache
def record_seeds() -> list[dict[str, Any]]:
    """Run records of this image: on the CPU, on a GPU, and one that failed."""
    from envbuild.image.docker_engine import Image

    image = Image(_image_id(), "handle", (oci_types.digest_of(LAYER),), {}, {}, 1)
    runs = (passed_run(), run_on("NVIDIA H20"), passed_run(probe("env.libs"), probe("gemm.crash", "failed")))
    wanted = dataclasses.replace(WANTED, lock=_lock().id)
    made = [evidence_statements_and_store.run_record(image, wanted, run, "docker 26", NOW) for run in runs]
    return [json.loads(record.encoded) for record in made]


def _subject() -> Subject:
    return Subject("envbuild/sample", _image_id())


@cache
def _build() -> dict[str, object]:
    profile = yaml.safe_load((GOLDEN / "cpu" / "profile.yaml").read_text(encoding="utf-8"))
    text = as_yaml(next(seed for seed in lock_seeds() if seed["content"]["wheels"])).decode()
    roots = {_lock().wheels[0].wheel.file: ("torch",)}
    made = BuildDetails("sample", profile, _lock(), text, sha("facts"), sha("recipe"), {"envbuild": "0.1.0"}, roots)
    return in_toto_statements.slsa_provenance(made, _subject()).document()


def _result(record: object, meant: object = None) -> dict[str, object]:
    """Return the test result that encloses `record`, which may have arbitrary content. `meant`: the valid record that
    the other fields of the test result describe; by default `record`."""
    found = run_record_schema.validate_record(record if meant is None else meant)
    return in_toto_statements.test_result(found, as_json(record), _subject()).document()


@cache
def _stated() -> list[dict[str, object]]:
    return [_build(), *map(_result, record_seeds())]


def _sealed(statement: Any) -> dict[str, Any]:
    return keys_and_signatures.seal(as_json(statement), signer())


@cache
def _envelopes() -> list[dict[str, Any]]:
    return list(map(_sealed, _stated()))


POLICIES = (
    Policy(),
    Policy(driver="535.54.03", gpus=("h20",)),
    Policy(max_age=datetime.timedelta(days=1), level="full"),
    Policy(probes=("gemm.crash",), driver="600.1"),
)


@st.composite
def _signed(draw: Draw) -> tuple[list[dict[str, Any]], Policy]:
    """Draw statements that a trusted key signed, with arbitrary content; records match their digest."""
    found = []
    for _ in range(draw(st.integers(1, 2))):
        if draw(st.integers(0, 2)):
            record = draw(trees(record_seeds()))
            try:
                made = _result(record)
            except ValueError:  # it cannot be made a statement
                made = _result(record, meant=record_seeds()[0])
        else:
            made = draw(trees(_stated()))
        if draw(st.integers(0, 4)) == 0:
            made = draw(trees([made]))
        found.append(_sealed(made))
    return found, draw(st.sampled_from(POLICIES))


def _statements(value: tuple[list[dict[str, Any]], Policy]) -> None:
    """Statements are accepted, or refused with a reason; accepted ones can be judged and reported."""
    envelopes, policy_read = value
    believed = trusted_statements.believe(envelopes, [signer().public], _image_id())
    for build in believed.builds:
        policy_check.of_build(build, believed.records, policy_read, NOW)
    on, reasons = policy_check.of_records(believed.records, policy_read, NOW)
    json.dumps([[proof.reason for proof in on], [str(reason) for reason in reasons]])
    for envelope in envelopes:
        try:
            community_evidence.evidence_rows([("x.dsse.json", envelope)], {"who": signer().public}, NOW)
        except EnvbuildError:
            continue


def _envelope(raw: bytes) -> None:
    """Only signed content is accepted, whatever else was changed."""
    file = Path("x.dsse.json")
    file.write_bytes(raw)
    found = image_verifier.read_file(file)
    judged = image_verifier.verify_statement([found], Policy(keys=(signer().public,)), NOW)
    json.dumps(plain(judged.document()))
    if trusted_statements.believe([found], [signer().public], None).records:
        assert keys_and_signatures.envelope_payload(found) in [
            keys_and_signatures.envelope_payload(known) for known in _envelopes()
        ]
    assert not trusted_statements.believe([found], [], None).records


_FILES = st.deferred(
    lambda: st.one_of(
        trees(_envelopes()).map(as_json),
        trees([{"mediaType": registry_attestations.BUNDLE, "dsseEnvelope": one} for one in _envelopes()]).map(as_json),
        spoiled(st.sampled_from(list(map(as_json, _envelopes()))), (*JSON, *BYTES)),
    )
)

# registries


def _registry() -> dict[str, Any]:
    """Return the documents of a registry, and how the registry serves these documents; "@name" is the digest of the
    document of that name."""
    part = {"mediaType": oci_types.CONFIG, "digest": "@config", "size": 1}
    descriptors = {"mediaType": registry_attestations.ENVELOPE, "digest": "@envelope", "size": 1}
    return {
        "config": json.loads(_config()),
        "envelope": _envelopes()[1],
        "bundled": {"mediaType": registry_attestations.BUNDLE, "dsseEnvelope": _envelopes()[0]},
        "manifest": {
            "schemaVersion": 2,
            "mediaType": oci_types.MANIFEST,
            "config": part,
            "layers": [{"mediaType": "x", "digest": "@layer", "size": 5}],
        },
        "index": {
            "mediaType": oci_types.INDEX,
            "manifests": [
                {
                    "mediaType": oci_types.MANIFEST,
                    "digest": "@manifest",
                    "platform": {"os": "linux", "architecture": "amd64"},
                }
            ],
        },
        "att": {"mediaType": oci_types.MANIFEST, "config": part, "layers": [descriptors]},
        "bundle": {
            "mediaType": oci_types.MANIFEST,
            "config": part,
            "layers": [{"digest": "@bundled"}],
            "subject": {"digest": "@manifest"},
        },
        "referrers": {
            "mediaType": oci_types.INDEX,
            "manifests": [{"digest": "@bundle", "artifactType": registry_attestations.BUNDLE}],
        },
        "tags": {"name": "team/sample", "tags": ["environment", "environment-0123456789abcdef", "verified"]},
        "status": {"tag": 200, "manifests": 200, "blobs": 200, "referrers": 200, "tags": 200},
        "headers": {
            "tag": {"Content-Type": oci_types.INDEX, "Docker-Content-Digest": "@index"},
            "manifests": {"Content-Type": oci_types.MANIFEST},
            "blobs": {"Location": "/v2/x"},
            "referrers": {"Location": "https://elsewhere.example/"},
        },
    }


_DOCUMENTS = ("config", "envelope", "bundled", "manifest", "index", "att", "bundle", "referrers", "tags")
_LISTS = ("environment", "environment-0123456789abcdef")  # tags of statements about environments
_LOCATIONS = (
    "https://[",
    "//x:y/",
    "http://registry.example/",
    "https://x" + "." * 300,
    "https://\ud800/",
    "/v2/team/sample/manifests/verified",
    "https://a b/",
    "https://@:@/",
    "https://x:99999/",
    "gopher://x",
)
_CHALLENGES = (
    'Bearer realm="https://[",service="s"',
    'Bearer realm="https://auth.registry.example/token",service="s"',
    "Basic x",
    "Bearer",
    'Bearer realm="x:y"',
    'Bearer realm="https://registry.example:x/"',
    'Bearer realm="https://\u00ff.x/"',
)


@st.composite
def _registries(draw: Draw) -> dict[str, Any]:
    found = draw(trees([_registry()]))
    found = found if isinstance(found, dict) else {}
    if draw(st.integers(0, 3)) == 0:
        kind = draw(st.sampled_from(("tag", "manifests", "blobs", "referrers", "tags")))
        status = draw(st.sampled_from((301, 307, 401, 401, 403, 404, 400, 500, 200)))
        head = {"Location": draw(st.sampled_from(_LOCATIONS)), "WWW-Authenticate": draw(st.sampled_from(_CHALLENGES))}
        found |= {"status": {kind: status}, "headers": {kind: head}}
    found["spoil"] = draw(st.none() | st.tuples(st.sampled_from(_DOCUMENTS), st.sampled_from(JSON)))
    return found


class _Answers(HTTPAdapter):
    """A registry without a network: the documents under their digests."""

    def __init__(self, documents: dict[str, Any]) -> None:
        super().__init__()
        self._said = documents
        self._blobs: dict[str, bytes] = {oci_types.digest_of(LAYER): LAYER}
        known = {"@layer": oci_types.digest_of(LAYER)}
        for name in _DOCUMENTS:
            text = json.dumps(documents.get(name))
            for mark, digest in known.items():
                text = text.replace(f'"{mark}"', f'"{digest}"')
            raw = text.encode()
            if documents.get("spoil") and documents["spoil"][0] == name:
                raw = documents["spoil"][1][:70_000] + raw
            known[f"@{name}"] = oci_types.digest_of(raw)
            self._blobs[known[f"@{name}"]] = raw
        self._known = known

    def _found(self, url: str) -> tuple[str, bytes | None, str]:
        path = url.partition("?")[0].rpartition("/")[2]
        if path == "verified":
            return "tag", self._blobs[self._known["@index"]], oci_types.INDEX
        if path == "list":
            return "tags", self._blobs[self._known["@tags"]], "application/json"
        if path in (registry_attestations.att_tag(self._known["@manifest"]), *_LISTS):
            return "manifests", self._blobs[self._known["@att"]], oci_types.MANIFEST
        kind = next((kind for kind in ("blobs", "referrers") if f"/{kind}/" in url), "manifests")
        if kind == "referrers":
            return kind, self._blobs[self._known["@referrers"]], oci_types.INDEX
        return kind, self._blobs.get(path), oci_types.MANIFEST

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> requests.Response:
        kind, raw, media_type = self._found(str(request.url))
        status, headers = self._of("status", kind), self._of("headers", kind)
        headers = {"Content-Type": media_type}
        for key, value in headers.items() if isinstance(headers, dict) else ():
            text = re.sub("[\r\n]", " ", self._known.get(str(value), str(value)))
            headers[re.sub("[^!-9;-~]", "", str(key))] = text.encode("latin-1", "replace").decode("latin-1")
        code = status if type(status) is int and 200 <= status < 600 else 200
        if raw is None:
            code, raw = 404, b"{}"
        body = HTTPResponse(io.BytesIO(raw), headers=headers, status=code, preload_content=False)
        return self.build_response(request, body)

    def _of(self, key: str, kind: str) -> Any:
        found = self._said.get(key)
        return found.get(kind) if isinstance(found, dict) else None


def _check_registry(documents: dict[str, Any]) -> None:
    """Verify the registry's image. Only statements that are signed for this image may verify it; an error must be an
    EnvbuildError."""
    http = requests.Session()
    http.trust_env = False
    http.mount("https://", _Answers(documents))
    http.mount("http://", _Answers(documents))
    with mock.patch.object(registry_http_and_auth, "registry_session", lambda authority, tries=4: http):
        with contextlib.suppress(EnvbuildError):
            registry_attestations.fetch_envelopes_without_image(Repository(PLACE), "environment")
        found = image_verifier.verify_image(PLACE, Policy(keys=(signer().public,)), [], NOW)
    json.dumps(plain(found.document()))
    if found.verified:  # only statements signed for this image count
        assert found.image is not None and found.image.id == _image_id()


# layers and bundles


class _Place:
    """One blob, read in small pieces."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def blocks(self, digest: str) -> Iterator[bytes]:
        yield from (self._raw[at : at + 700] for at in range(0, len(self._raw), 700))

    def manifest(self, target: str) -> Manifest | None:
        return None

    def blob(self, digest: str, limit: int = 0) -> bytes:
        return self._raw

    def referrers(self, digest: str) -> list[dict[str, Any]]:
        return []


def _diff_id(raw: bytes) -> str:
    import zlib

    import zstandard

    whole = b""
    try:
        while raw.startswith(b"\x1f\x8b"):
            inflate = zlib.decompressobj(wbits=31)
            whole += inflate.decompress(raw)
            raw = inflate.unused_data
        while raw.startswith(b"\x28\xb5\x2f\xfd"):
            frame = zstandard.ZstdDecompressor().decompressobj()
            whole += frame.decompress(raw)
            raw = frame.unused_data
    except (zlib.error, zstandard.ZstdError):
        return oci_types.digest_of(b"")
    return oci_types.digest_of(whole or raw)


def _layer(raw: bytes) -> None:
    """Any layer above the proved layers is inspected or refused."""
    (build,) = trusted_statements.believe([_envelopes()[0]], [signer().public], None).builds
    base = image_content_reader.Config(_image_id(), (oci_types.digest_of(LAYER),), {}, {})
    above = image_content_reader.Config(sha("child"), (*base.layers, _diff_id(raw)), {}, {"LD_PRELOAD": "/x"})
    parts = [{"digest": digest} for digest in (oci_types.digest_of(LAYER), oci_types.digest_of(raw))]
    manifest = Manifest(json.dumps({"layers": parts}).encode(), oci_types.MANIFEST)
    records = list(map(run_record_schema.validate_record, record_seeds()))
    child = image_content_reader.StoredImage(_Place(raw), manifest, above)
    for reason in child_layer_check.child_objections(child, base, build, records):
        str(reason)


def _base_image(raw: bytes) -> None:
    """The files of any layer of a base image are listed, and a Python is found or missing; no path leads above the
    root."""
    layer = BaseLayerRef(oci_types.digest_of(raw), len(raw), _diff_id(raw), oci_types.LAYER_TAR)
    tree = base_image_contents._read_tree(_Place(raw), [layer], "3.11")
    waiting = ["/"]
    while waiting:
        folder = waiting.pop()
        for name, node in tree.folder(folder):
            found = tree.resolve(f"{folder}{name}")
            assert not {"", ".", ".."} & {name, *(found[0].split("/")[1:] if found and found[0] != "/" else ())}
            waiting += [f"{folder}{name}/"] if isinstance(node, dict) else []
    base_image_contents._contents(tree, "3.11", "/bin:/opt/venv/lib/python3.11/site-packages:/usr/lib")


def _read_foreign_layer(both: tuple[bytes, bytes]) -> None:
    """A layer that is accepted as ours in a different order must consist of our entries to the last byte, and must
    contain nothing for which the order matters."""
    two, one = ((_Place(tar), oci_types.digest_of(tar), oci_types.digest_of(tar)) for tar in both)
    if layer_archive_comparison.difference(one, two, ("theirs", "ours")) is not None:
        raise Malformed("another")
    blocks = [sorted(tar[at : at + 512] for at in range(0, len(tar), 512)) for tar in both]
    assert blocks[0] == blocks[1]
    for tar in set(both) if both[0] != both[1] else ():
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            names = archive.getnames()
            assert not any(member.islnk() or ".wh." in member.name for member in archive)
        assert len({*names}) == len(names)
        assert not any(low.startswith(f"{high}/") for at, high in enumerate(names) for low in names[:at])


@cache
def _members() -> tuple[tuple[str, bytes], ...]:
    """Return an image, its index and a key, in the layout of `save`."""
    config, blob = _config(), b"blobs/sha256/"
    manifest = oci_types.encoded(
        {
            "mediaType": oci_types.MANIFEST,
            "config": oci_types.descriptor(oci_types.CONFIG, config),
            "layers": [oci_types.descriptor("x", LAYER)],
        }
    )
    index = {
        "manifests": [
            {
                **oci_types.descriptor(oci_types.MANIFEST, manifest),
                "annotations": {engine_image_to_oci_layout.REF: "verified"},
            }
        ]
    }
    held = {f"{blob.decode()}{hashlib.sha256(raw).hexdigest()}": raw for raw in (config, LAYER, manifest)}
    return (
        *held.items(),
        (engine_image_to_oci_layout.INDEX, json.dumps(index).encode()),
        (saved_image_file.KEY, signer().public.pem),
    )


def _bundle(raw: bytes) -> None:
    file = Path("x.tar")
    file.write_bytes(raw)
    found = saved_image_file.SavedImage(file)
    for name in (saved_image_file.KEY, saved_image_file.LOCK, engine_image_to_oci_layout.INDEX):
        try:
            found.file(name)
        except Refusal:
            continue
    manifest = found.manifest("verified")
    if manifest is None:
        return
    image_content_reader.config_of(found, manifest)
    registry_attestations.fetch_envelopes(found, manifest.digest)
    taken = {layer.digest: layer.size for layer in found.checked_image(manifest).layers}
    assert sum(taken.values()) <= len(raw), "more is loaded than the file has"


_KEYS = [
    {
        "keys": ["team.pub"],
        "gpus": ["h20", "NVIDIA H200"],
        "driver": "550.54.15",
        "max_age": "90d",
        "level": "full",
        "probes": ["gemm.crash"],
        "base": "registry.example/team/base",
    }
]


def _policy(raw: bytes) -> None:
    Path("team.pub").write_bytes(signer().public.pem)
    file = Path("policy.yaml")
    file.write_bytes(raw)
    found = policy.read(file, {}, None)
    assert all(key.fingerprint for key in found.keys)


def _pem(raw: bytes) -> None:
    """An accepted private key makes signatures that its public key verifies."""
    Path("a.pub").write_bytes(raw)
    if b"PRIVATE" not in raw:
        assert keys_and_signatures.trusted(Path("a.pub"))
        return
    made = keys_and_signatures.private(raw, "a.key")
    assert keys_and_signatures.signed_statement(keys_and_signatures.seal(b"{}", made), [made.public]) == {}


@cache
def _pems() -> list[bytes]:
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    other = ec.derive_private_key(7, ec.SECP384R1())
    private = [
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        for key in (other, ec.derive_private_key(7, ec.SECP256R1()))
    ]
    return [signer().public.pem, *private, b"-----BEGIN " + base64.b64encode(b"x" * 60) + b"-----"]


TARGETS = (
    Target("signed statement", st.deferred(_signed), _statements, 9),
    Target("envelope", _FILES, _envelope, 68),
    Target("registry", st.deferred(_registries), _check_registry, 9),
    Target("layer", tars.layers(), _layer, 9),
    Target("layer of a base image", tars.layers(), _base_image, 9),
    Target("layer next to ours", tars.reordered(), _read_foreign_layer, 9),
    Target("bundle", st.deferred(lambda: tars.tars(_members())), _bundle, 9),
    Target("policy", yaml_files(_KEYS), _policy, 68),
    Target("key", st.deferred(lambda: spoiled(st.sampled_from(_pems()), BYTES)), _pem, 68),
)
