"""Where an engine may write an entry of a layer: its path, resolved through symbolic links. Pure.

Engines differ. containerd follows a link of a lower layer; Docker's overlay2 driver unpacks a layer alone, and a folder
takes the link's place. Within one layer both follow. `Links.places` therefore returns every path that one of them may
write to, and a link counts even if a later entry replaces it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping

from envbuild.proof.reasons import Refusal

_LONGEST = 4096  # PATH_MAX of Linux
_HOPS = 40  # links that Linux follows in one path
_STEPS = 2000  # of resolving one path; ordinary images take a handful
_TOTAL = 64 << 20  # characters of all links


class Links:
    """The symbolic links of an image. `known`: link -> target, as `add` takes them."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._targets: dict[str, set[str]] = {}
        self._total = 0
        for path, target in known.items():
            self.add(path, target)

    def add(self, path: str, target: str) -> None:
        """A link at `path`, relative to the root. Raises Refusal where there are too many."""
        self._total += len(path) + len(target)
        if self._total > _TOTAL:
            raise Refusal("too-large", "the layers have too many symbolic links")
        self._targets.setdefault(path, set()).add(target)

    def places(self, path: str) -> set[str]:
        """Every path to which an entry may be written; the last part is not followed, since an engine replaces it."""
        if len(path) > _LONGEST:
            raise Refusal("layer", f"a layer has a path of {len(path)} characters")
        folder, name = posixpath.split(path)
        return {f"{place}/{name}" if place else name for place in self._folders(folder)}

    def _folders(self, path: str) -> set[str]:
        found = set()
        todo = [("", path.split("/"), 0)]
        steps = 0
        while todo:
            at, rest, hops = todo.pop()
            for index, name in enumerate(rest):
                steps += 1
                if steps > _STEPS:
                    raise Refusal("layer", f"the symbolic links in a layer's path are too many: /{path[:200]}")
                if name == "..":
                    at = posixpath.dirname(at)
                elif name not in ("", "."):
                    at = f"{at}/{name}" if at else name
                    for target in self._targets.get(at, ()) if hops < _HOPS else ():
                        start = "" if target.startswith("/") else posixpath.dirname(at)
                        todo.append((start, [*target.split("/"), *rest[index + 1 :]], hops + 1))
            found.add(at)
        return found
