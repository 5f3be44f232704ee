"""The releases of a distribution, by the real uv from an index and a folder of tiny wheels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from envbuild.errors import NetworkError
from envbuild.plan.releases import releases
from unit.support import Index, quick_pip, serving, write_wheel

VERSIONS = ("1.0", "1.9", "1.10", "2.0.post1", "2.1")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    quick_pip(monkeypatch)
    folder, links = tmp_path / "served", tmp_path / "links"
    for version in VERSIONS:
        write_wheel(folder, "thing", version)
    write_wheel(folder, "thing", "3.0rc1")
    write_wheel(folder, "thing", "1.5", tag="cp27-cp27m-win_amd64")
    write_wheel(links, "thing", "2.2+cpu")
    write_wheel(links, "thing", "2.2")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with serving(Index(folder)) as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.address)
        yield found


def of(oldest: str | None = None, newest: str | None = None, name: str = "thing") -> list[str]:
    return releases(name, "3.11", "2.36", oldest, newest)


def test_all_that_fit_oldest_first_from_every_place(served: Index) -> None:
    assert of() == [*VERSIONS, "2.2+cpu"]


@pytest.mark.parametrize(
    ("oldest", "newest", "expected"),
    [
        ("1.9", "2.1", ["1.9", "1.10", "2.0.post1", "2.1"]),
        ("1.9.1", "2.0", ["1.10"]),
        (None, "1.9", ["1.0", "1.9"]),
        ("2.2", None, ["2.2+cpu"]),
        (None, "2.2+cpu", [*VERSIONS, "2.2+cpu"]),
        ("3", None, []),
        (None, "0.1", []),
    ],
)
def test_the_bounds_are_included(served: Index, oldest: str | None, newest: str | None, expected: list[str]) -> None:
    assert of(oldest, newest) == expected


def test_a_name_that_no_index_has_gives_none(served: Index) -> None:
    assert of(name="nosuch") == []


def test_an_index_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_pip(monkeypatch)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(NetworkError):
        of()
