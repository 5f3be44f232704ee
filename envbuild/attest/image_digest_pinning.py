"""References to `verified` images in other people's files, and the digests that they mean. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from envbuild.image.image_naming import VERIFIED

# A host with a dot or a port, or localhost: without one it is an image of the engine, which has no digest to pin.
_HOST = r"(?:localhost|[a-zA-Z0-9-]+(?:\.[a-zA-Z0-9-]+)+|[a-zA-Z0-9-]+(?=:[0-9]))(?::[0-9]{1,5})?"
_IMAGE = re.compile(
    rf"(?<![\w./:@-])(?P<image>{_HOST}(?:/[a-z0-9][a-z0-9._-]*)+):{VERIFIED}(?![\w.-])"
    r"(?P<digest>@sha256:[0-9a-f]{64})?"
)


@dataclass(frozen=True)
class ImagePin:
    """`line` counts from 1; `before` is the digest that stands there, None for none; `after` what it means now."""

    line: int
    image: str
    before: str | None
    after: str

    @property
    def current(self) -> bool:
        return self.before == self.after


def image_references(text: str) -> Iterator[tuple[int, str, str | None]]:
    """(line, image with its tag, digest) of every reference."""
    for match in _IMAGE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield line, f"{match['image']}:{VERIFIED}", match["digest"][1:] if match["digest"] else None


def pinned(text: str, digest: Callable[[str], str]) -> tuple[str, list[ImagePin]]:
    """The text with every reference at the digest that `digest` knows for it, and what stood there."""
    pins = [ImagePin(line, image, before, digest(image)) for line, image, before in image_references(text)]
    after = iter(pins)
    return _IMAGE.sub(lambda match: f"{match['image']}:{VERIFIED}@{next(after).after}", text), pins
