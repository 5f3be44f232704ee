"""Lists package names that belong to an unrelated package on the index. They are refused wherever a package of the
index is named. Under `extensions`, which are built from source, such a name is allowed."""

from __future__ import annotations

import re

from packaging.utils import canonicalize_name

# The apex on the index is a web toolkit of 2013, and cannot be imported (NVIDIA/apex#1063, #1800).
_MEANT = {"apex": "the index's apex is an unrelated package; NVIDIA's is built from source: name it under extensions"}
_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:$|[\[<>=!~;@( ,])")
# A URL or path with the name: .../NVIDIA/apex.git@1a2b, ./apex, #egg=apex, apex-0.1-cp311-cp311-linux_x86_64.whl
_ADDRESS = re.compile(
    rf"(?:^|[/=:])({'|'.join(_MEANT)})(?:\.git|-[0-9][^/]*\.(?:whl|tar\.gz|zip))?/?(?:$|[@#\[?\s])", re.IGNORECASE
)


def refusal_reason(text: str) -> str | None:
    """Return why a requirement, a name or a URL must not be looked up on an index; None if it may be."""
    for match in (_NAME.match(text), _ADDRESS.search(text)):  # both: a file name also matches the pattern of a name
        if match and (why := _MEANT.get(canonicalize_name(match[1]))):
            return why
    return None
