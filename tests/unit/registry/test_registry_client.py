from __future__ import annotations

import gzip
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import certifi
import pytest
import requests
from requests.adapters import HTTPAdapter

from envbuild.attest import keys_and_signatures, registry_attestations
from envbuild.registry import oci_types, registry_client, registry_http_and_auth, tls_context
from envbuild.registry.oci_types import Manifest, Reference
from envbuild.registry.registry_client import Repository
from envbuild.registry.registry_http_and_auth import HostUnreachable
from envbuild.util.errors import NetworkError, UsageError
from envbuild.util.untrusted_input_errors import Refusal
from unit.registries import Registry, docker_login, serving
from unit.support import sha

SECRET = "correct horse battery staple"


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving(Registry()) as found:
        yield found


def repository(registry: Registry) -> Repository:
    return Repository(Reference.parse(f"{registry.host}/team/h20"))


def refused(found: pytest.ExceptionInfo[Refusal]) -> str:
    return found.value.reason.id


# references


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("registry.example/h20", ("registry.example", "h20", None, None)),
        ("registry.example:5000/a/b:v1", ("registry.example:5000", "a/b", "v1", None)),
        ("localhost/a", ("localhost", "a", None, None)),
        ("[::1]:5000/a", ("[::1]:5000", "a", None, None)),
        ("debian", ("docker.io", "library/debian", None, None)),
        ("team/h20:verified", ("docker.io", "team/h20", "verified", None)),
        (f"r.io/a:v@sha256:{'0' * 64}", ("r.io", "a", "v", f"sha256:{'0' * 64}")),
    ],
)
def test_references_are_read_as_docker_reads_them(text: str, parts: tuple[str, ...]) -> None:
    found = Reference.parse(text)
    assert (found.host, found.name, found.tag, found.digest) == parts


@pytest.mark.parametrize(
    "text",
    ["r.io:65536/a", "[:::]/a",
     "", "http://r.io/a", "https://r.io/a", "r.io/A", "r.io/a:", "r.io/a@sha256:0", "r.io/a/../b", "r.io/a b", "r.io/",
     "r.io/a@md5:0", "r.io:99999999/a", "user@r.io/a", "r.io/" + "a" * 600, "r.io/a\n"],
)  # fmt: skip
def test_an_argument_that_names_no_image_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        Reference.parse(text)


# reading


def test_a_manifest_is_what_its_digest_says(registry: Registry) -> None:
    digest = registry.put(oci_types.MANIFEST, {"mediaType": oci_types.MANIFEST}, "v1")
    found = repository(registry).manifest("v1")
    assert found is not None
    assert found.digest == digest
    assert repository(registry).manifest("v2") is None


@pytest.mark.parametrize("by_tag", [True, False])
def test_another_manifest_for_the_digest_is_refused(registry: Registry, by_tag: bool) -> None:
    digest = registry.put(oci_types.MANIFEST, {"mediaType": oci_types.MANIFEST}, "v1")
    headers = {"Content-Type": oci_types.MANIFEST, "Docker-Content-Digest": digest}
    target = "v1" if by_tag else digest
    registry.lies[f"/v2/team/h20/manifests/{target}"] = (200, headers, b'{"mediaType": "other"}')
    with pytest.raises(Refusal, match="serves sha256:") as caught:
        repository(registry).manifest(target)
    assert refused(caught) == "digest"


def test_another_blob_for_the_digest_is_refused(registry: Registry) -> None:
    digest = registry.add_blob(b"right")
    assert repository(registry).blob(digest) == b"right"
    registry.blobs[digest] = b"wrong"
    with pytest.raises(Refusal) as caught:
        repository(registry).blob(digest)
    assert refused(caught) == "digest"


@pytest.mark.parametrize("encoding", ["gzip", "GZIP", "br", "x-unknown"])
def test_an_encoded_blob_is_refused(registry: Registry, encoding: str) -> None:
    """The blob is refused even if the decoded bytes match the digest."""
    digest, path = registry.add_blob(b"right"), "/v2/team/h20/blobs/"
    registry.lies[path + digest] = (200, {"Content-Encoding": "identity"}, b"right")
    assert repository(registry).blob(digest) == b"right"
    registry.lies[path + digest] = (200, {"Content-Encoding": encoding}, gzip.compress(b"right"))
    with pytest.raises(NetworkError, match=f"Content-Encoding '{encoding.lower()}'"):
        repository(registry).blob(digest)


def test_a_manifest_served_as_another_type_is_refused(registry: Registry) -> None:
    digest = registry.put(oci_types.INDEX, {"mediaType": oci_types.MANIFEST})
    with pytest.raises(Refusal) as caught:
        repository(registry).manifest(digest)
    assert refused(caught) == "digest"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a": "' + b"x" * oci_types.MAX_MANIFEST + b'"}', "too-large"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "malformed"),
        (b"[]", "malformed"),
    ],
)
def test_giant_and_deep_manifests_are_refused(registry: Registry, body: bytes, reason: str) -> None:
    registry.lies["/v2/team/h20/manifests/v1"] = (200, {"Content-Type": oci_types.MANIFEST}, body)
    with pytest.raises(Refusal) as caught:
        repository(registry).manifest("v1")
    assert refused(caught) == reason


def test_a_giant_blob_is_not_read_to_its_end(registry: Registry) -> None:
    digest = registry.add_blob(b"x" * 100_000)
    with pytest.raises(Refusal) as caught:
        repository(registry).blob(digest, limit=1000)
    assert refused(caught) == "too-large"


def test_the_error_message_of_the_registry_is_reported(registry: Registry) -> None:
    registry.refuse = ".*"
    with pytest.raises(NetworkError, match="500") as caught:
        repository(registry).manifest("v1")
    assert caught.value.hint == "NO: not now"


def test_a_registry_that_is_not_there_is_a_network_error() -> None:
    with pytest.raises(NetworkError, match="does not answer"):
        Repository(Reference.parse("127.0.0.1:1/a")).manifest("v1")


# credentials


def test_docker_s_credentials_open_a_registry(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.user, registry.password = "me", SECRET
    digest = registry.put(oci_types.MANIFEST, {"mediaType": oci_types.MANIFEST}, "v1")
    with pytest.raises(NetworkError, match="401") as caught:
        repository(registry).manifest("v1")
    assert caught.value.hint == f"docker login {registry.host}"
    registry_http_and_auth._docker_logins.cache_clear()
    docker_login(tmp_path, monkeypatch, **{registry.host: f"me:{SECRET}"})
    found = repository(registry).manifest("v1")
    assert found is not None
    assert found.digest == digest


def test_a_credential_helper_is_asked(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.user, registry.password = "me", SECRET
    registry.put(oci_types.MANIFEST, {"mediaType": oci_types.MANIFEST}, "v1")
    (tmp_path / "config.json").write_text(json.dumps({"credHelpers": {registry.host: "mine"}}), encoding="utf-8")
    helper = tmp_path / "docker-credential-mine"
    helper.write_text(
        f'#!/bin/sh\necho \'{{"ServerURL": "x", "Username": "me", "Secret": "{SECRET}"}}\'\n', encoding="utf-8"
    )
    helper.chmod(0o755)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert repository(registry).manifest("v1") is not None


def test_a_token_is_fetched_with_them(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.bearer = f"http://{registry.host}/token"
    registry.put(oci_types.MANIFEST, {"mediaType": oci_types.MANIFEST}, "v1")
    docker_login(tmp_path, monkeypatch, **{registry.host: f"me:{SECRET}"})
    assert repository(registry).manifest("v1") is not None
    shown = dict(registry.requests)
    assert shown["GET /token"].startswith("Basic ")
    assert shown["GET /v2/team/h20/manifests/v1"] == "Bearer t0ken"


def test_a_token_service_elsewhere_gets_no_credentials(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Registry()) as thief:
        registry.bearer = f"http://localhost:{thief.port}/token"
        registry.put(oci_types.MANIFEST, {"mediaType": oci_types.MANIFEST}, "v1")
        docker_login(tmp_path, monkeypatch, **{registry.host: f"me:{SECRET}"})
        repository(registry).manifest("v1")
        assert thief.requests == [("GET /token", "")]


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_takes_no_credentials_along(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    registry.user, registry.password = "me", SECRET
    docker_login(tmp_path, monkeypatch, **{registry.host: f"me:{SECRET}"})
    with serving(Registry()) as thief:
        digest = thief.add_blob(b"content")
        there = f"http://localhost:{thief.port}/v2/team/h20/blobs/{digest}"
        path = f"/v2/team/h20/blobs/{digest}"
        assert repository(registry).manifest("v1") is None  # logged in now
        registry.lies[path] = (code, {"Location": there}, b"")
        place = repository(registry)
        place.manifest("v1")
        assert place.blob(digest) == b"content"
        assert thief.requests == [(f"GET {path}", "")]
        assert dict(registry.requests)[f"GET {path}"].startswith("Basic ")


def test_an_upload_elsewhere_takes_no_credentials_along(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry.user, registry.password = "me", SECRET
    docker_login(tmp_path, monkeypatch, **{registry.host: f"me:{SECRET}"})
    with serving(Registry()) as thief:
        thief.sessions["/v2/team/h20/blobs/uploads/one"] = bytearray()
        there = f"http://localhost:{thief.port}/v2/team/h20/blobs/uploads/one"
        registry.lies["/v2/team/h20/blobs/uploads/"] = (202, {"Location": there}, b"")
        repository(registry).put_blob(b"content")
        assert thief.requests == [("PUT /v2/team/h20/blobs/uploads/one", "")]


def test_redirects_end(registry: Registry) -> None:
    path = "/v2/team/h20/manifests/v1"
    registry.lies[path] = (302, {"Location": path}, b"")
    with pytest.raises(Refusal, match="redirects more than") as caught:
        repository(registry).manifest("v1")
    assert refused(caught) == "redirect"
    assert [line for line, _ in registry.requests].count(f"GET {path}") == 6  # five redirects are followed


@pytest.mark.parametrize("where", ["http://r.example/x", "ftp://r.example/x", "file:///etc/passwd", ""])
def test_https_never_falls_back_to_http(where: str) -> None:
    place = registry_http_and_auth.Access(
        "r.example", "https://r.example", registry_http_and_auth.registry_session(None)
    )
    with pytest.raises(Refusal) as caught:
        place.inside(where)
    assert refused(caught) == "insecure"
    assert place.inside("https://cdn.example/x")


@pytest.mark.parametrize(
    "where",
    [
        "http://169.254.169.254/latest", "http://127.r.example/", "ftp://127.0.0.1/",
        "http://169.254.169.254\\@localhost/latest",  # urlsplit finds localhost, but urllib3 connects to the first host
    ],
)  # fmt: skip
def test_a_registry_of_this_machine_leads_to_no_other_over_http(where: str) -> None:
    place = registry_http_and_auth.Access(
        "127.0.0.1:5000", "http://127.0.0.1:5000", registry_http_and_auth.registry_session(None)
    )
    with pytest.raises(Refusal) as caught:
        place.inside(where)
    assert refused(caught) == "insecure"
    assert place.inside("http://localhost:5000/x") and place.inside("https://cdn.example/x")


@pytest.mark.parametrize("where", ["https://[", "//x:y/", "https://x:99999/", "//["])
def test_a_redirect_to_an_invalid_url_is_refused(registry: Registry, where: str) -> None:
    registry.lies["/v2/team/h20/manifests/v1"] = (302, {"Location": where}, b"")
    with pytest.raises(Refusal, match="invalid URL") as caught:
        repository(registry).manifest("v1")
    assert refused(caught) == "redirect"


@pytest.mark.parametrize("realm", ["https://[", "http://127.0.0.1:x/token"])
def test_a_token_service_at_no_address_is_refused(realm: str) -> None:
    with (
        serving(Registry(user="u", password="p", bearer=realm)) as registry,
        pytest.raises(Refusal, match="invalid URL"),
    ):
        repository(registry).manifest("v1")


def test_an_upload_to_an_invalid_url_is_refused(registry: Registry) -> None:
    registry.lies["/v2/team/h20/blobs/uploads/"] = (202, {"Location": "https://["}, b"")
    with pytest.raises(Refusal, match="invalid URL"):
        repository(registry).put_blob(b"x")


def test_only_this_very_machine_is_spoken_to_without_tls() -> None:
    assert Repository(Reference.parse("r.example/a"))._url == "https://r.example/v2/a"


def test_netrc_is_not_looked_at(registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login me password {SECRET}\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    repository(registry).manifest("v1")
    assert {shown for _, shown in registry.requests} == {""}


@pytest.mark.parametrize(
    ("registry", "service", "related"),
    [
        ("registry-1.docker.io", "auth.docker.io", True),
        ("registry.gitlab.com", "gitlab.com", True),
        ("ghcr.io", "ghcr.io", True),
        ("gitlab.r.example:5050", "gitlab.r.example", True),
        ("registry.team.example", "auth.team.example", True),
        ("a.co.uk", "login.a.co.uk", True),
        ("a.co.uk", "b.co.uk", False),
        ("a.github.io", "b.github.io", False),
        ("ghcr.io", "evil.io", False),
        ("r.example", "r.example:8443", False),
        ("r.example", "example", False),
        ("registry:5000", "registry", False),
        ("10.0.0.1:5000", "10.0.0.2", False),
        ("10.0.0.1:5000", "10.0.0.1", False),
        ("registry.gitlab.com", "gitlab.com.evil.io", False),
        ("127.0.0.1:5000", "localhost", False),
    ],
)
def test_services_that_may_receive_credentials_of_a_registry(registry: str, service: str, related: bool) -> None:
    assert registry_http_and_auth.related(f"https://{registry}", f"https://{service}/token") is related


def test_plain_http_is_never_related_to_tls() -> None:
    assert not registry_http_and_auth.related("https://r.example", "http://r.example:443/token")


@pytest.mark.parametrize("url", ["https://evil.example\\@r.example/t", "https://evil.example#@r.example/t"])
def test_a_url_is_judged_as_it_is_sent(url: str) -> None:
    """For the first URL, urlsplit gives the host r.example, but urllib3 connects to evil.example."""
    place = registry_http_and_auth.Access(
        "r.example", "https://r.example", registry_http_and_auth.registry_session(None)
    )
    assert urlsplit(place.inside(url)).hostname == "evil.example"


# statements attached to an image


@pytest.fixture
def signer(monkeypatch: pytest.MonkeyPatch) -> keys_and_signatures.Signer:
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE", SECRET)
    return keys_and_signatures.private(keys_and_signatures.generate(SECRET)[0], "key")


SUBJECT = Manifest(b'{"mediaType": "x"}', oci_types.MANIFEST)
WANTED = [("https://kind.example/a", b'{"a":1}'), ("https://kind.example/b", b'{"b":1}')]


@pytest.mark.parametrize("referrers", [True, False])
def test_both_forms_are_there_and_found_again(
    registry: Registry, signer: keys_and_signatures.Signer, referrers: bool
) -> None:
    registry.referrers = referrers
    assert registry_attestations.publish(repository(registry), SUBJECT, WANTED, signer) == 2
    found, bad = registry_attestations.fetch_envelopes(repository(registry), SUBJECT.digest)
    assert bad == []
    assert sorted(json.dumps(keys_and_signatures.signed_statement(one, [signer.public])) for one in found) == [
        '{"a": 1}',
        '{"b": 1}',
    ]
    assert ("sha256-" + SUBJECT.digest[7:] in registry.manifests) is not referrers
    for form in (".att", None):  # each form alone is enough
        with serving(Registry(referrers=referrers, blobs=registry.blobs)) as half:
            keep = registry.manifests.items()
            half.manifests = {k: v for k, v in keep if k.endswith(".att") == (form is not None)}
            assert len(registry_attestations.fetch_envelopes(repository(half), SUBJECT.digest)[0]) == 2


def test_a_second_push_writes_nothing(registry: Registry, signer: keys_and_signatures.Signer) -> None:
    registry_attestations.publish(repository(registry), SUBJECT, WANTED, signer)
    registry.requests.clear()
    assert registry_attestations.publish(repository(registry), SUBJECT, WANTED, signer) == 0
    assert registry.written() == []


@pytest.mark.parametrize("refuse", ["PUT .*att", "PUT /v2/team/h20/manifests/sha256:.*", "PUT .*uploads/.*"])
def test_an_interrupted_push_is_finished_by_the_next(
    registry: Registry, signer: keys_and_signatures.Signer, refuse: str
) -> None:
    registry.refuse = refuse
    with pytest.raises(NetworkError):
        registry_attestations.publish(repository(registry), SUBJECT, WANTED, signer)
    registry.refuse = ""
    assert registry_attestations.publish(repository(registry), SUBJECT, WANTED, signer) > 0
    assert len(registry_attestations.fetch_envelopes(repository(registry), SUBJECT.digest)[0]) == 2
    registry.requests.clear()
    registry_attestations.publish(repository(registry), SUBJECT, WANTED, signer)
    assert registry.written() == []


def test_attestations_of_others_stay(registry: Registry, signer: keys_and_signatures.Signer) -> None:
    other = keys_and_signatures.private(keys_and_signatures.generate(SECRET)[0], "key")
    registry_attestations.publish(repository(registry), SUBJECT, WANTED[:1], other)
    registry_attestations.publish(repository(registry), SUBJECT, [("https://kind.example/c", b"{}")], None)
    registry_attestations.publish(repository(registry), SUBJECT, WANTED, signer)
    found, _ = registry_attestations.fetch_envelopes(repository(registry), SUBJECT.digest)
    assert [len(keys_and_signatures.envelope_signatures(one)) for one in found] == [1, 0, 1, 1]


def test_a_signed_push_replaces_unsigned_statements_of_its_kinds(
    registry: Registry, signer: keys_and_signatures.Signer
) -> None:
    earlier = [(WANTED[0][0], b'{"a":0}'), WANTED[1]]
    registry_attestations.publish(repository(registry), SUBJECT, earlier, None)
    registry_attestations.publish(repository(registry), SUBJECT, WANTED, signer)
    found, _ = registry_attestations.fetch_envelopes(repository(registry), SUBJECT.digest)
    assert [keys_and_signatures.envelope_payload(one) for one in found] == [payload for _, payload in WANTED]
    assert all(keys_and_signatures.envelope_signatures(one) for one in found)


def test_without_a_key_it_is_the_older_form_without_signatures(registry: Registry) -> None:
    assert registry_attestations.publish(repository(registry), SUBJECT, WANTED, None) == 2
    found, _ = registry_attestations.fetch_envelopes(repository(registry), SUBJECT.digest)
    assert [keys_and_signatures.envelope_signatures(one) for one in found] == [[], []]
    assert registry_attestations.publish(repository(registry), SUBJECT, WANTED, None) == 0


def test_a_bundle_is_sigstores(signer: keys_and_signatures.Signer) -> None:
    sealed = keys_and_signatures.seal(b"{}", signer)
    made: Any = registry_attestations.bundle(registry_attestations.Attestation(sealed, "kind"), signer.public)
    assert made["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    assert made["verificationMaterial"] == {
        "publicKey": {"hint": signer.public.fingerprint}, "tlogEntries": []
    }  # fmt: skip
    assert [item["keyid"] for item in made["dsseEnvelope"]["signatures"]] == [""]


def test_bad_pieces_do_not_hide_the_others(registry: Registry, signer: keys_and_signatures.Signer) -> None:
    registry.referrers = True
    registry_attestations.publish(repository(registry), SUBJECT, WANTED[:1], signer)
    media, raw = registry.manifests[registry_attestations.att_tag(SUBJECT.digest)]
    document = json.loads(raw)
    bad = [registry.add_blob(b) for b in (b"[", b"{}", b'{"a": ' + b"[" * 9999 + b"]" * 9999 + b"}")]
    document["layers"] = [
        *({"mediaType": registry_attestations.ENVELOPE, "digest": d} for d in bad),
        *document["layers"],
    ]
    registry.put(media, document, registry_attestations.att_tag(SUBJECT.digest))
    found, refusals = registry_attestations.fetch_envelopes(repository(registry), SUBJECT.digest)
    assert len(found) == 1
    assert [refusal.reason.id for refusal in refusals] == ["malformed"] * 3


def test_a_bundle_about_another_image_is_refused(registry: Registry, signer: keys_and_signatures.Signer) -> None:
    registry_attestations.publish(repository(registry), SUBJECT, WANTED[:1], signer)
    other = f"sha256:{sha('other')}"
    registry.manifests[other.replace(":", "-")] = registry.manifests[SUBJECT.digest.replace(":", "-")]
    found, refusals = registry_attestations.fetch_envelopes(repository(registry), other)
    assert (found, [refusal.reason.id for refusal in refusals]) == ([], ["subject"])


def test_only_so_many_pieces_are_read(
    registry: Registry, signer: keys_and_signatures.Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry_attestations.publish(repository(registry), SUBJECT, WANTED, signer)
    monkeypatch.setattr(registry_attestations, "_MOST", 1)
    found, refusals = registry_attestations.fetch_envelopes(repository(registry), SUBJECT.digest)
    assert (len(found), {refusal.reason.id for refusal in refusals}) == (1, {"too-large"})


# the list of tags


def add_tags(registry: Registry, count: int) -> list[str]:
    names = [f"v{number}" for number in range(count)]
    registry.put(oci_types.MANIFEST, {"mediaType": oci_types.MANIFEST}, *names)
    return names


def test_tags_beyond_the_limit_are_left_out(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    names = add_tags(registry, 7)
    assert repository(registry).tags() == names
    with monkeypatch.context() as patched:
        patched.setattr(registry_client, "_TAG_PAGES", 2)
        assert repository(registry).tags() == names[:4]
    monkeypatch.setattr(registry_client, "_TAGS", 3)
    registry.requests.clear()
    assert repository(registry).tags() == names[:3]
    assert len([line for line, _ in registry.requests if line.endswith("tags/list")]) == 2


@pytest.mark.parametrize("limit", [None, 100])
def test_many_tags_are_requested_at_once(registry: Registry, limit: int | None) -> None:
    """Some registries refuse the number."""
    registry.tag_page, registry.tag_limit = 1000, limit
    names = add_tags(registry, 9)
    assert repository(registry).tags() == names
    assert registry.tag_pages == (["1000"] if limit is None else ["1000", None])


def test_a_token_service_that_refuses_the_list_of_tags_is_not_an_error(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker_login(tmp_path, monkeypatch, **{registry.host: f"me:{SECRET}"})
    challenge = f'Bearer realm="http://{registry.host}/token",service="s",scope="repository:team/h20:list"'
    registry.lies["/v2/team/h20/tags/list"] = (401, {"WWW-Authenticate": challenge}, b"{}")
    registry.lies["/token"] = (403, {}, b"{}")
    assert repository(registry).tags() == []


def test_an_invalid_link_in_the_list_of_tags_is_refused(registry: Registry) -> None:
    link = {"Link": '<https://[x/v2/team/h20/tags/list?last=a>; rel="next"'}
    registry.lies["/v2/team/h20/tags/list"] = (200, link, b'{"tags": ["a"]}')
    with pytest.raises(Refusal, match="not a URL"):
        repository(registry).tags()


def test_a_registry_behind_a_proxy_may_have_a_certificate_of_its_own_authority() -> None:
    authority = ssl.get_default_verify_paths().openssl_cafile
    adapter = registry_http_and_auth.registry_session(authority).get_adapter("https://r.io/")
    assert isinstance(adapter, HTTPAdapter)
    pool = adapter.proxy_manager_for("http://proxy.example:3128").connection_from_host("r.io", 443, "https")
    adapter.cert_verify(pool, "https://r.io/", True, None)  # type: ignore[no-untyped-call]
    assert pool.conn_kw["ssl_context"] is tls_context.trusting(authority, certifi.where())


def test_all_requests_of_an_upload_use_one_connection(registry: Registry) -> None:
    there = repository(registry)
    for raw in (b"one", b"two", b"two"):
        there.put_blob(raw)
    there.put_manifest("h20", Manifest(json.dumps({"mediaType": oci_types.MANIFEST}).encode(), oci_types.MANIFEST))
    adapter = there._writer._http.get_adapter(f"http://{registry.host}/")
    assert isinstance(adapter, HTTPAdapter)
    pools = adapter.poolmanager.pools
    assert [pools[key].num_connections for key in pools.keys()] == [1]  # noqa: SIM118


def test_a_failing_registry_is_an_error_of_the_list_of_tags(registry: Registry) -> None:
    registry.refuse = "GET /v2/.*/tags/list"
    with pytest.raises(NetworkError, match="500"):
        repository(registry).tags()


def test_a_download_can_be_stopped_before_and_after_a_pause(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, seen = b"x" * 100, list[object]()
    digest = registry.add_blob(raw)
    registry.cut_blobs = [40]
    monkeypatch.setattr("time.sleep", seen.append)
    monkeypatch.setattr(registry_client, "_BLOCK", 10)
    seen_blocks = repository(registry).unchecked_blocks(digest, 0, len(raw))
    for block in seen_blocks:
        seen.append(block)
    (pause,) = (position for position, item in enumerate(seen) if item == registry_client._PAUSES[0])
    assert seen[pause - 1] == seen[pause + 1] == b""
    assert b"".join(item for item in seen if isinstance(item, bytes)) == raw


def test_the_error_names_the_host_that_the_registry_redirects_to(registry: Registry) -> None:
    path, http = "/v2/team/h20/blobs/x", registry_http_and_auth.registry_session(None, tries=1)
    access = registry_http_and_auth.Access(registry.host, f"http://{registry.host}", http)
    with serving(Registry()) as gone:
        registry.lies[path] = (307, {"Location": f"http://user:secret@{gone.host}/"}, b"")
    with pytest.raises(HostUnreachable, match=f"^{gone.host} does not answer: ConnectionError$"):
        access.send("GET", f"http://{registry.host}{path}", "pull")


def test_the_error_names_the_host_whose_response_is_incomplete(registry: Registry) -> None:
    with serving(Registry()) as other:
        digest = other.add_blob(b"content")
        path = f"/v2/team/h20/blobs/{digest}"
        registry.lies[path] = (307, {"Location": f"http://{other.host}{path}"}, b"")
        other.cut_blobs = [3]
        with pytest.raises(NetworkError, match=f"^{other.host} does not answer: ChunkedEncodingError$"):
            repository(registry).blob(digest)


def test_the_certificate_of_another_host_is_trusted_through_the_folder_of_the_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise requests.exceptions.SSLError(ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED]"))

    http = registry_http_and_auth.registry_session(None)
    monkeypatch.setattr(http, "request", fail)
    access = registry_http_and_auth.Access("r.example", "https://r.example", http)
    with pytest.raises(NetworkError, match=r"^no TLS connection to cdn\.example: ") as caught:
        access.send("GET", "https://cdn.example/x", "pull")
    assert "/etc/docker/certs.d/r.example/ca.crt" in str(caught.value.hint)
