"""Types for a wheel file, and for a wheel in a lock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wheel:
    """One wheel file, without its URL: any index may serve it."""

    name: str
    version: str
    file: str
    sha256: str

    def hashed_pin(self, separator: str = " ") -> str:
        """Return the requirement of exactly this file, as pip and uv read it. `separator`: the text before the hash."""
        return f"{self.name}=={self.version}{separator}--hash=sha256:{self.sha256}"


@dataclass(frozen=True)
class LockedWheel:
    """A wheel, its size, and the layer it is installed in."""

    wheel: Wheel
    bytes: int
    layer: str

    @property
    def content(self) -> dict[str, Any]:
        return {**vars(self.wheel), "bytes": self.bytes, "layer": self.layer}
