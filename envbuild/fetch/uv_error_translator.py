"""Translates a failure of uv to an error: conflicting requirements, or a problem of the index. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from envbuild.facts import database, misleading_packages
from envbuild.util import url_redaction, user_folders, yaml_and_project_paths
from envbuild.util.errors import NetworkError, ProfileError
from envbuild.util.host_processes import Completed

_UNAUTHORIZED = ("401 Unauthorized", "403 Forbidden", "lack of valid authentication")
_CAUSE = re.compile(r"^\s*(?:cause|Caused by): ", re.MULTILINE)
_ANOTHER = re.compile(r"Hash mismatch for ([^\n]*)")
_NO_PAGE = re.compile(r"Received some unexpected ([A-Za-z]+) from")
_DOCTOR = "envbuild doctor checks every configured index"


def resolution_error(requirements: Sequence[str], done: Completed) -> ProfileError | NetworkError:
    """The error for a failed run of uv. uv exits with 1 if the requirements conflict or an index refuses access, with 2
    if a request failed. The error quotes uv's messages without the users, passwords and queries of URLs."""
    stderr = url_redaction.struck(done.stderr.strip())
    if any(words in stderr for words in _UNAUTHORIZED):
        return NetworkError("authentication at the package index failed (401 or 403)", hint=stderr[:600])
    if done.code == 2:
        causes = _CAUSE.split(stderr)
        why = re.sub(r" for url \(.*\)$", "", causes[-1].strip().split("\n")[0].removeprefix("error: "))
        return NetworkError(f"the package index{_at(stderr)} did not answer: {why[:200]}", hint=_hint(_DOCTOR, stderr))
    if another := _ANOTHER.search(stderr):
        return NetworkError(
            f"the package index{_at(stderr)} serves a different file than it announces: {_file(another[1])}",
            hint=_hint("try again; if it fails again, fix the index or the proxy cache in front of it", stderr),
        )
    if page := _NO_PAGE.search(stderr):
        return NetworkError(
            f"the package index{_at(stderr)} answers with invalid {page[1]}", hint=_hint(_DOCTOR, stderr)
        )
    local = [r for r in map(Requirement, requirements) if any("+" in s.version for s in r.specifier)]
    for requirement in local:
        if f"no version of {requirement}" in stderr or re.search(
            rf"\b{re.escape(requirement.name)} was not found in", stderr
        ):
            return NetworkError(
                f"no configured index or find-links has {requirement}", hint=local_build(str(requirement))
            )
    cause = _CAUSE.split(stderr, maxsplit=1)[-1]
    meant = {
        found
        for word in re.findall(r"[A-Za-z0-9._-]+", stderr)
        for found in [misleading_packages.refusal_reason(word)]
        if found
    }
    return ProfileError("the packages cannot be resolved together", hint="\n".join([cause[:1200], *sorted(meant)]))


def local_build(requirement: str) -> str:
    """How to find a build with a local label, such as torch==2.13.0+cpu, that no configured index has."""
    own = (
        "PyTorch's own index has such builds; to use it: --torch-index pytorch (in a checkout: make PROFILE "
        f"TORCH_INDEX=pytorch), or torch_index: pytorch in "
        f"{yaml_and_project_paths.display(user_folders.config_file())}; otherwise "
        if canonicalize_name(Requirement(requirement).name) in database.torch_index().packages
        else "a version with a local label (+...) is not in the public index: "
    )
    return (
        f"{own}add the folder or page that has it to pip's find-links setting "
        "(pip config set global.find-links ...) or to UV_FIND_LINKS"
    )


def _hint(todo: str, stderr: str) -> str:
    return f"{todo}\n{stderr[:600]}"


def _at(stderr: str) -> str:
    """The host of the first URL in the text, after a space; empty if the text has no URL."""
    found = url_redaction.IN_TEXT.search(stderr)
    place = re.split(r"[/?#]", found[0].partition("://")[2])[0] if found else ""
    return f" {place}" if place else ""


def _file(named: str) -> str:
    """The file name in a URL, otherwise uv's own name for it."""
    found = url_redaction.IN_TEXT.search(named)
    return found[0].rstrip("/").rpartition("/")[2] if found else named.strip("`: ")
