"""The patterns for references to base images accept what `Reference.parse` accepts, with a digest or a tag."""

from __future__ import annotations

import itertools
import re

import pytest
from pydantic import TypeAdapter, ValidationError

from envbuild.profile.value_types import ImageReference, PinnedImage
from envbuild.registry.image_reference_patterns import BY_DIGEST, BY_DIGEST_OR_TAG, BY_TAG, REGISTRY
from envbuild.registry.oci_types import Reference
from envbuild.util.errors import UsageError

DIGEST = f"@sha256:{'a' * 64}"
FIRST = (
    "", "localhost/", "localhost:5000/", "Localhost/", "registry.example/", "REGISTRY.example/", "Team/", "team/",
    "host:5000/", "Host:5000/", "host:500000/", "host:/", "[::1]/", "[::1]:5000/", "[::g]/", "a_b.c/", "a-.b/",
    "a..b/", ".a/", "a./", "-a/", "10.0.0.1:5000/", "http://r.io/", "/", "//", "../", "user@r.io/", "a--b/", "a__b/",
    "a.b_c/", "a b/", "r.io:5000:1/", "a_b.c:5000/", "a_b:5000/", "a.-b/", "a.b-/", "a-b.c-d/",
)  # fmt: skip
NAMES = (
    "python", "Python", "python/", "/python", "a//b", "a/b", "a/B", "a.b", "a..b", "a_b", "a__b", "a___b", "a--b", "a-",
    "-a", "a/../b", "..", "", "a:b:c", "a b", "a\n",
)  # fmt: skip
TAGS = ("", ":", ":3.11", ":Latest", ":_x", ":.x", ":-x", ":" + "x" * 128, ":" + "x" * 129, ":a/b", ":a:b")


def is_reference(text: str) -> bool:
    try:
        Reference.parse(text)
        return True
    except UsageError:
        return False


@pytest.mark.parametrize("first", FIRST)
def test_exactly_what_a_registry_accepts_may_be_named(first: str) -> None:
    for name, tag, digest in itertools.product(NAMES, TAGS, ("", DIGEST, DIGEST[:-1], DIGEST.upper(), DIGEST * 2)):
        text = f"{first}{name}{tag}{digest}"
        valid = is_reference(text)
        assert bool(re.fullmatch(BY_DIGEST, text)) == (valid and bool(digest)), text
        assert bool(re.fullmatch(BY_TAG, text)) == (valid and bool(tag) and not digest), text
        assert bool(re.fullmatch(BY_DIGEST_OR_TAG, text)) == (valid and bool(tag or digest)), text
        assert bool(re.fullmatch(REGISTRY[0], text)) == (valid and not tag and not digest), text


@pytest.mark.parametrize("host", ["a_b.c", "a.b_c:5000", "a_b:5000", "a..b", "a-.b", "a.-b", "a.b-"])
def test_a_host_that_docker_refuses_is_refused(host: str) -> None:
    with pytest.raises(UsageError, match="is not a reference to an image in a registry") as caught:
        Reference.parse(f"{host}/team/python:1")
    assert "without _ in HOST" in (caught.value.hint or "")
    assert not re.fullmatch(REGISTRY[0], f"{host}/team/python")


@pytest.mark.parametrize("name", ["Team/python", "Team//python", "team//python", "r.io/Python", "a:b:c", "r.io:x/a"])
def test_a_name_that_no_registry_accepts_is_refused_when_profile_and_lock_are_read(name: str) -> None:
    for kind, text in ((ImageReference, name + DIGEST), (ImageReference, f"{name}:1"), (PinnedImage, name + DIGEST)):
        with pytest.raises(ValidationError):
            TypeAdapter(kind).validate_python(text)


@pytest.mark.parametrize("name", ["python", "team/python", "[::1]:5000/a", "localhost:5000/a/b", "R.io/a"])
def test_other_names_are_accepted(name: str) -> None:
    for text in (f"{name}:1", name + DIGEST, f"{name}:1{DIGEST}"):
        assert TypeAdapter(ImageReference).validate_python(text) == text
    assert TypeAdapter(PinnedImage).validate_python(name + DIGEST) == name + DIGEST
