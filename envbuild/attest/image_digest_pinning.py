"""Finds references to images with the tag `verified` in a text, and pins them to digests. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from envbuild.image.image_naming import VERIFIED

# A host with a dot or a port, or localhost. A name without a host is a local image of the engine, which has no digest
# to pin.
_HOST = r"(?:localhost|[a-zA-Z0-9-]+(?:\.[a-zA-Z0-9-]+)+|[a-zA-Z0-9-]+(?=:[0-9]))(?::[0-9]{1,5})?"
_IMAGE = re.compile(
    rf"(?<![\w./:@-])(?P<image>{_HOST}(?:/[a-z0-9][a-z0-9._-]*)+):{VERIFIED}(?![\w.-])"
    r"(?P<digest>@sha256:[0-9a-f]{64})?"
)


@dataclass(frozen=True)
class ImagePin:
    """A pinned reference. `line` counts from 1; `image` includes the tag; `before`: the digest in the original text, or
    None; `after`: the digest that it is pinned to."""

    line: int
    image: str
    before: str | None
    after: str

    @property
    def current(self) -> bool:
        return self.before == self.after


def image_references(text: str) -> Iterator[tuple[int, str, str | None]]:
    """Yield (line number from 1, image with its tag, digest or None) for every reference."""
    for match in _IMAGE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield line, f"{match['image']}:{VERIFIED}", match["digest"][1:] if match["digest"] else None


def pinned(text: str, digest: Callable[[str], str]) -> tuple[str, list[ImagePin]]:
    """Return the text with every reference pinned to the digest that `digest` returns for it, and the list of pins."""
    pins = [ImagePin(line, image, before, digest(image)) for line, image, before in image_references(text)]
    after = iter(pins)
    return _IMAGE.sub(lambda match: f"{match['image']}:{VERIFIED}@{next(after).after}", text), pins
