"""Errors of uv are assigned to the index (exit 7) or to a contradiction in the profile (3)."""

from __future__ import annotations

import pytest

from envbuild.fetch import uv_error_translator
from envbuild.util.errors import NetworkError, ProfileError
from envbuild.util.host_processes import Completed

# The messages of uv 0.13, except for the user, the password and the query, which uv may leave in.
REFUSED = """error: Request failed after 3 retries in 0.0s
  {cause}Failed to fetch: http://me:topsecret@index.example:9/simple/x/?token=abcdef
  {cause}error sending request for url (http://me:topsecret@index.example:9/simple/x/?token=abcdef)
  {cause}client error (Connect)
  {cause}tcp connect error
  {cause}Connection refused (os error 111)
"""
SERVER = """error: Failed to fetch: http://index.example/simple/err/
  cause: HTTP status server error (500 Internal Server Error) for url (http://index.example/simple/err/)
"""
MISMATCH = """error: Hash mismatch for package metadata at `http://me:topsecret@index.example/files/pip-26.3-py3-none-any.whl.metadata`

Expected:
  sha256:1111

Computed:
  sha256:e033
"""
BROKEN = """error: Received some unexpected JSON from `http://index.example/simple/eps/`
  cause: key must be a string at line 1 column 2
"""
DENIED = """error: Failed to download `alpha==1.0`
  cause: Failed to fetch: http://me:topsecret@index.example/files/alpha-1.0-py3-none-any.whl.metadata
  cause: HTTP status client error ({status}) for url (http://index.example/files/alpha-1.0-py3-none-any.whl.metadata)
"""
NO_PAGE = """error: No solution found when resolving dependencies
  cause: Because alpha was not found in the package registry and you require alpha, and so on.

hint: An index (http://me:topsecret@index.example/simple/) returned a {status} error. Check that the URL is correct.
"""
NONE = """error: No solution found when resolving dependencies
  cause: Because there are no versions of networkx and you require networkx, and so on.
"""


def refused(code: int, stderr: str) -> NetworkError | ProfileError:
    error = uv_error_translator.resolution_error(["x"], Completed(code, "", stderr))
    assert "topsecret" not in f"{error.message} {error.hint}" and "abcdef" not in f"{error.message} {error.hint}"
    return error


@pytest.mark.parametrize("cause", ["cause: ", "Caused by: "])
def test_an_index_that_does_not_answer_is_reported_with_its_host_and_the_cause(cause: str) -> None:
    error = refused(2, REFUSED.format(cause=cause))
    assert error.code == 7
    assert error.message == "the package index index.example:9 did not answer: Connection refused (os error 111)"
    assert "envbuild doctor" in str(error.hint).splitlines()[0]
    assert "http://index.example:9/simple/x/" in str(error.hint)


def test_a_servers_status_is_reported_with_its_address_once() -> None:
    assert refused(2, SERVER).message.endswith(
        "index index.example did not answer: HTTP status server error (500 Internal Server Error)"
    )


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        (MISMATCH, "index.example serves a different file than it announces: pip-26.3-py3-none-any.whl.metadata"),
        ("error: Hash mismatch for `alpha==1.0`\n", "serves a different file than it announces: alpha==1.0"),
        (BROKEN, "index.example answers with invalid JSON"),
    ],
)
def test_wrong_bytes_are_the_indexs_fault(stderr: str, words: str) -> None:
    error = refused(1, stderr)
    assert error.code == 7 and words in error.message


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
@pytest.mark.parametrize(("code", "stderr"), [(2, DENIED), (1, NO_PAGE)])
def test_refused_credentials_are_reported_as_refused(code: int, stderr: str, status: str) -> None:
    error = refused(code, stderr.format(status=status))
    assert (error.code, error.message) == (7, "authentication at the package index failed (401 or 403)")
    assert "index.example" in str(error.hint)


def test_a_contradiction_stays_the_profiles() -> None:
    error = refused(1, NONE)
    assert (error.code, error.message) == (3, "the packages cannot be resolved together")
    assert str(error.hint).startswith("Because there are no versions of networkx and you require networkx")
