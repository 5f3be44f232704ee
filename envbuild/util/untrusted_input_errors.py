"""Errors for invalid input from a server, and for invalid signed input. Each has a reason id that does not change
between versions."""

from __future__ import annotations

from dataclasses import dataclass

from envbuild.util.errors import CheckFailed


@dataclass(frozen=True)
class Reason:
    id: str
    detail: str

    def __str__(self) -> str:
        return f"{self.id}: {self.detail}"


class Refusal(CheckFailed):
    """Input from a server, or signed input, is invalid."""

    def __init__(self, reason: str, detail: str, *, hint: str | None = None) -> None:
        super().__init__(detail, hint=hint)
        self.reason = Reason(reason, detail)


class Malformed(Refusal):
    """The input is not a document of the expected kind."""

    def __init__(self, detail: str) -> None:
        super().__init__("malformed", detail)
