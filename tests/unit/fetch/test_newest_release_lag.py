"""How far a version is behind, with the reason; and what the page of an index lists for a package."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from envbuild.fetch import index_config, index_pages, newest_release_lag, wheel_resolution_and_download
from envbuild.fetch.index_pages import Listed
from envbuild.util.errors import NetworkError
from unit.conftest import forget
from unit.support import Index, quick_pip, serving, write_wheel

TAGS = wheel_resolution_and_download.tags("3.11", "2.36")


def on(day: int) -> datetime.datetime:
    return datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(days=day)


def found(*files: Listed, chosen: str = "1.0", wanted: str = "") -> newest_release_lag.Lag | None:
    return newest_release_lag.lag(
        "a", chosen, SpecifierSet(wanted), newest_release_lag.matching_releases(files, "3.11", TAGS)
    )


def wheel_file(version: str, day: int | None = None, requires: str = "", tag: str = "py3-none-any") -> Listed:
    return Listed(f"a-{version}-{tag}.whl", None, requires, on(day) if day is not None else None)


@pytest.mark.parametrize(
    ("days", "far"), [(newest_release_lag.MOST_DAYS, False), (newest_release_lag.MOST_DAYS + 1, True)]
)
def test_eighteen_months_are_the_limit(days: int, far: bool) -> None:
    lag = found(wheel_file("1.0", 0), wheel_file("2.0", days))
    assert (lag.refused if lag else False) is far


def test_prereleases_yanked_releases_and_other_ranges_do_not_count() -> None:
    old = wheel_file("1.0", 0)
    assert found(old, wheel_file("2.0rc1", 5000)) is None
    assert found(old, Listed("a-2.0-py3-none-any.whl", None, "", on(5000), yanked=True)) is None
    assert found(old, wheel_file("2.0", 5000), wanted="<2") is None


@pytest.mark.parametrize(
    ("newer", "reason"),
    [
        (wheel_file("2.0", 5000, tag="cp312-cp312-win_amd64"), "no wheel"),
        (Listed("a-2.0.tar.gz", None, "", on(5000)), "no wheel"),
        (wheel_file("2.0", 5000, requires=">=3.12"), "python"),
        (wheel_file("2.0", 5000), "incompatible"),
    ],
)
def test_the_reason_is_the_true_one(newer: Listed, reason: str) -> None:
    lag = found(wheel_file("1.0", 0), newer)
    assert lag and lag.far
    assert (lag.reason, lag.refused) == (reason, reason != "python")


def test_a_marker_that_does_not_hold_asks_for_nothing() -> None:
    lines = ['alpha<2; python_version < "3.9"', 'alpha>=1; sys_platform == "linux"', "beta==1"]
    assert str(newest_release_lag.specifier("alpha", lines, "3.11")) == ">=1"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    quick_pip(monkeypatch)
    with serving(Index(tmp_path / "served")) as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.address)
        yield found


def test_pages_say_the_same_as_html_and_as_json(served: Index) -> None:
    file = write_wheel(served.folder, "alpha", "1.0")
    write_wheel(served.folder, "alpha-more", "1.0")
    (html,) = index_pages.listed_files("alpha")
    served.dates = {file.name: "2020-01-01T00:00:00Z"}
    served.requires = {file.name: ">=3.9"}
    forget()
    (one,) = index_pages.listed_files("alpha")
    assert (one.file, one.sha256) == (html.file, html.sha256) and html.sha256
    assert (html.uploaded, one.uploaded, one.requires_python) == (None, on(0), ">=3.9")
    assert index_pages.listed_files("nosuch") == ()


def test_an_invalid_link_does_not_hide_the_others(tmp_path: Path) -> None:
    page = tmp_path / "links.html"
    links = ("http://[x", "https://[::1/alpha-2.0-py3-none-any.whl", "https://x.example/alpha-1.0-py3-none-any.whl",
             "https:/alpha-1.1-py3-none-any.whl", f"alpha-{'9' * 5000}-py3-none-any.whl",
             " https://x.example/alpha-1.2-py3-none-any.whl")  # fmt: skip
    page.write_text("".join(f'<a href="{link}">x</a>' for link in links), encoding="utf-8")
    assert [(one.file, one.address) for one in index_pages.listed_at(str(page), "alpha")] == [
        ("alpha-1.0-py3-none-any.whl", links[2]), ("alpha-1.1-py3-none-any.whl", ""),
        ("alpha-1.2-py3-none-any.whl", links[-1].strip()),
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["&#" + "9" * 5000 + ";", "<![x[ ]]>"])
def test_a_page_that_is_not_html_is_an_error(tmp_path: Path, text: str) -> None:
    page = tmp_path / "links.html"
    page.write_text(f'<a href="alpha-1.0-py3-none-any.whl">x</a><a title="{text}">{text}</a>', encoding="utf-8")
    with pytest.raises(NetworkError, match="not valid HTML"):
        index_pages.listed_at(str(page), "alpha")


def test_the_first_index_that_has_a_name_answers_for_it(
    served: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site's internal package is not compared with an unrelated package of the same name."""
    write_wheel(served.folder, "alpha", "9.0")
    write_wheel(tmp_path / "own", "alpha", "1.0")
    with serving(Index(tmp_path / "own")) as own:
        monkeypatch.setenv("UV_INDEX", own.address)
        assert [one.file for one in index_pages.listed_files("alpha")] == ["alpha-1.0-py3-none-any.whl"]
        monkeypatch.setenv("UV_INDEX_STRATEGY", "unsafe-best-match")
        forget()
        assert len(index_pages.listed_files("alpha")) == 2
    assert index_config.first_only() is False


def test_an_index_that_does_not_answer_is_an_error(served: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(index_config, "Retry", lambda **options: 0)
    with pytest.raises(NetworkError, match=r"127\.0\.0\.1:9 did not answer for alpha"):
        index_pages.listed_files("alpha")


def test_a_page_that_is_cut_off_is_an_error(served: Index) -> None:
    write_wheel(served.folder, "alpha", "1.0")
    served.cut["alpha"] = 1
    with pytest.raises(NetworkError, match="did not answer for alpha: ChunkedEncodingError"):
        index_pages.listed_files("alpha")
