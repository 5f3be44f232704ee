"""The page of `envbuild show --html` in a real browser: its content, its widths, and its accessibility."""

from __future__ import annotations

import functools
import http.server
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("selenium", reason="selenium is not installed: pip install -e '.[dev]'")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from unit.conftest import forget
from unit.report import pages
from unit.report.browser import MISSING, Browser
from unit.served import served
from unit.support import envbuild

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no {' and no '.join(MISSING)} on PATH: scripts/browser")
NAMES = ("cpu", "lab", "h20", "wild")


@dataclass(frozen=True)
class Site:
    """Four pages, as files and from a server: `cpu` of a verified profile, `lab` of a profile whose self-test failed,
    `h20` of a profile that was never tested, and `wild`, which is `lab` with markup in every text of its evidence."""

    folder: Path
    address: str
    requests: list[str]

    def file(self, name: str) -> str:
        return (self.folder / f"{name}.html").as_uri()

    def put(self, name: str, text: str) -> str:
        (self.folder / f"{name}.html").write_text(text, encoding="utf-8")
        return self.file(name)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder, project = tmp_path_factory.mktemp("pages"), tmp_path_factory.mktemp("project")
    (project / "profiles").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("CACHE", "STATE", "CONFIG"):
            patch.setenv(f"XDG_{kind}_HOME", str(project / kind.lower()))
        patch.chdir(project)
        pages.share_templates_and_shipped_locks(patch)
        forget()
        pages.site_facts()
        pages.prove(*pages.cpu(project), pages.outcome("cpu"))
        pages.prove(*pages.lab(project), pages.outcome("gpu"))
        prints = ["--compare", *map(str, pages.PRINTS)]
        for name, more in (("cpu", []), ("lab", prints), ("h20", [])):
            assert envbuild("show", name, "--html", str(folder / f"{name}.html"), *more).code == 0
        pages.prove(*pages.lab(project), pages.hostile(), day=1)
        assert envbuild("show", "lab", "--html", str(folder / "wild.html"), *prints).code == 0
    requests: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *arguments: Any) -> None:
            requests.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    with served(server):
        yield Site(folder, f"http://127.0.0.1:{server.server_port}", requests)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    made = Browser(tmp_path_factory.mktemp("chromium"))
    yield made
    made.close()


def rows(browser: Browser, selector: str) -> list[list[str]]:
    """Return the text of the cells of each row with data, without the small print below it."""
    found: list[list[str]] = browser.run(
        """return [...document.querySelectorAll(arguments[0])].map(row => [...row.cells].map(cell => {
               const copy = cell.cloneNode(true);
               copy.querySelectorAll('.sub, .quiet, svg').forEach(one => one.remove());
               return copy.textContent.trim();
           }))""",
        f"{selector} tbody tr:not(.group)",
    )
    return found


def ratio(figure: dict[str, Any]) -> float:
    return float(figure["ratio"]) if not isinstance(figure["ratio"], str) else math.inf


# no external resources


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_loads_without_a_complaint_and_asks_for_nothing(browser: Browser, site: Site, name: str) -> None:
    for address in (site.file(name), f"{site.address}/{name}.html"):
        browser.requests()
        browser.open(address)
        assert browser.complaints() == []
        assert [url for url in browser.requests() if not url.endswith("/favicon.ico")] == [address]
    assert {path for path in site.requests if name in path} == {f"/{name}.html"}


def test_a_page_with_external_requests_is_detected(browser: Browser, site: Site) -> None:
    wanted = f"{site.address}/pixel.png"
    browser.requests()
    browser.open(site.put("bad", f"<img src='{wanted}'><script>console.error('no')</script>"))
    assert wanted in browser.requests()
    assert any("no" in line for line in browser.complaints())


def test_injected_content_of_a_page_neither_runs_nor_is_fetched(browser: Browser, site: Site) -> None:
    text = (site.folder / "cpu.html").read_text(encoding="utf-8")
    wanted = f"{site.address}/slipped.png"
    slipped = f"<script>document.title = 'run'</script><img src='{wanted}'><p id=s style='color:red'>x</p></main>"
    browser.open(site.put("slipped", text.replace("</main>", slipped)))
    assert browser.driver.title == "cpu: verified"
    assert browser.run("return getComputedStyle(s).color") != "rgb(255, 0, 0)"
    assert len(browser.complaints()) == 3
    assert "/slipped.png" not in site.requests


# measurements


@pytest.mark.parametrize(("name", "golden"), [("cpu", "cpu"), ("lab", "gpu")])
def test_the_errors_are_those_of_the_evidence(browser: Browser, site: Site, name: str, golden: str) -> None:
    browser.open(site.file(name))
    worst_errors = {
        item["probe"]: max(map(ratio, item["figures"]), default=None)
        for item in pages.outcome(golden)["results"]
        if item["figures"] or item["status"] == "failed"
    }
    shown = {cells[0]: cells[1] for cells in rows(browser, ".probes")}
    assert list(shown) == list(worst_errors)
    for probe, worst in worst_errors.items():
        expected = "–" if worst is None else "infinite" if worst == math.inf else pytest.approx(worst, rel=5e-3)
        assert (shown[probe] if isinstance(expected, str) else float(shown[probe])) == expected, probe


@pytest.mark.parametrize("wide", [360, 1400])
def test_a_marker_is_beyond_the_bounds_line_where_the_error_is(browser: Browser, site: Site, wide: int) -> None:
    """The positions are those of the drawing: markers are ordered as the errors, and the line is at the same place in
    all rows."""
    browser.open(site.file("lab"), wide)
    drawn = browser.run(
        """const drawn = [...document.querySelectorAll('.probes tbody tr')].filter(row => row.querySelector('.worst'));
           return drawn.map(row => {
               const box = one => row.querySelector(one).getBoundingClientRect();
               const [mark, line, whole] = [box('.worst'), box('line.bound'), row.getBoundingClientRect()];
               return [row.cells[1].textContent.trim(), (mark.left + mark.right) / 2, line.left,
                       whole.height - line.height, row.querySelector('.worst').classList.contains('off')];
           })"""
    )
    numbers = [math.inf if text == "infinite" else float(text) for text, *_ in drawn]
    assert len(numbers) > 10
    for number, (_, mark, line, gap, off) in zip(numbers, drawn, strict=True):
        assert (mark > line + 0.5, off) == (number > 1, number > 1)
        assert abs(gap) <= 2
    assert len({round(line) for _, _, line, *_ in drawn}) == 1
    by_place = [number for _, number in sorted(zip([row[1] for row in drawn], numbers, strict=True))]
    assert by_place == sorted(numbers)


def test_the_speeds_are_those_of_the_evidence(browser: Browser, site: Site) -> None:
    browser.open(site.file("lab"))
    traits = {item["probe"]: item["traits"] for item in pages.outcome("gpu")["results"]}
    sheet = {"fp16": 148, "bf16": 148, "tf32": 74, "copy": 4000}
    wanted = []
    for card, memory in zip(traits["perf.gemm"]["TFLOP/s"], traits["perf.memory"]["GB/s"], strict=True):
        for name, reached in {**card, **memory}.items():
            if name != "card":
                wanted.append((name, reached, f"{reached / sheet[name]:.0%}" if name in sheet else "–"))
    shown = [(cells[0], float(cells[1].replace(",", "")), cells[2]) for cells in rows(browser, ".speeds")]
    assert len(shown) == len(wanted) == 20
    for at in range(0, 20, 5):  # for each GPU, in any order
        both = zip(sorted(shown[at : at + 5]), sorted(wanted[at : at + 5]), strict=True)
        for (name, reached, part), (wanted_name, wanted_reached, wanted_part) in both:
            assert (name, part) == (wanted_name, wanted_part)
            assert reached == pytest.approx(wanted_reached, rel=5e-3)


def test_the_matrix_is_that_of_the_evidence(browser: Browser, site: Site) -> None:
    browser.open(site.file("lab"))
    stages = next(i for i in pages.outcome("gpu")["results"] if i["probe"] == "dist.staged")["traits"]["stages"]
    wanted = []
    for stage in stages:
        members = stage["stage"].split()[1].split("+")
        blamed = {str(fault["member"]) for fault in stage["faults"]}
        marks = ["" if m not in members else "✓" if stage["passed"] else "✗" if m in blamed else "○" for m in "0123"]
        wanted.append(["+".join(members), *marks])
    shown = [[cell[:1] if at else cell for at, cell in enumerate(cells[:5])] for cells in rows(browser, ".matrix")]
    assert sorted(shown) == sorted(wanted)


def test_the_layers_are_those_of_the_lock(browser: Browser, site: Site) -> None:
    browser.open(site.file("cpu"))
    locked = yaml.safe_load((pages.ROOT / "profiles" / "cpu.lock.yaml").read_text(encoding="utf-8"))["content"]
    sizes: dict[str, int] = {"base bookworm": sum(deb["bytes"] for deb in locked["base"]["packages"])}
    for wheel in locked["wheels"]:
        sizes[wheel["layer"]] = sizes.get(wheel["layer"], 0) + wheel["bytes"]
    shown = {cells[0]: cells[1] for cells in rows(browser, ".layers")}
    assert shown == {
        **{name: f"{size / 1e6:,.0f} MB" for name, size in sizes.items()},
        "virtual environment": "0",
    }
    widths = browser.run(
        "return [...document.querySelectorAll('.layers rect')].map(r => r.getBoundingClientRect().width)"
    )
    largest = max(sizes.values())
    parts = sorted((size / largest for size in sizes.values()), reverse=True)
    assert [width / widths[0] for width in widths] == pytest.approx([*parts, 0], abs=5e-3)


def test_the_comparison_is_that_of_compare(browser: Browser, site: Site) -> None:
    browser.open(site.file("lab"))
    done = envbuild("diff", *map(str, pages.PRINTS), "--json").document
    for number, name in enumerate(("teacher-forced", "free-running")):
        wanted = [
            (one["operation"], one["a"]["ratio"], one["b"]["ratio"])
            for op in done["operations"]
            for one in op["passes"]
            if one["pass_name"] == name and one["kind"] != "identical"
        ]
        table = f"#compared table:nth-of-type({number + 1})"
        shown = rows(browser, table)
        assert [cells[0] for cells in shown] == [op for op, *_ in wanted]
        for cells, (_, *ratios) in zip(shown, wanted, strict=True):
            assert [float(cell) for cell in cells[1:3]] == pytest.approx(ratios, rel=5e-3)


# accessibility


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("wide", [360, 1400])
def test_it_fits_and_can_be_read(
    browser: Browser, site: Site, tmp_path: Path, name: str, scheme: str, wide: int
) -> None:
    """There is no horizontal scrolling, and all text has a contrast of 4.5 to 1, as WCAG level AA requires."""
    browser.open(site.file(name), wide, scheme)
    browser.shoot(tmp_path / f"{name}-{wide}-{scheme}.png")
    assert browser.run("return document.documentElement.scrollWidth") == wide
    grounds = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert grounds == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(18, 21, 27)")
    low = [f"{text}: {contrast(ink, on):.2f}" for text, ink, on in browser.run(_TEXTS) if contrast(ink, on) < 4.5]
    assert low == []


# Text, colour and background colour of every element that contains text itself.
_TEXTS = """
const solid = one => { for (; one; one = one.parentElement) {
    const colour = getComputedStyle(one).backgroundColor; if (!/, 0\\)$/.test(colour)) return colour; } };
return [...document.body.querySelectorAll('*')].filter(one => [...one.childNodes].some(
    node => node.nodeType === 3 && node.textContent.trim()) && one.getBoundingClientRect().width > 1).map(
    one => [one.textContent.trim().slice(0, 40),
            getComputedStyle(one)[one.closest('svg') ? 'fill' : 'color'], solid(one)]);
"""


def contrast(ink: str, ground: str) -> float:
    """Return the contrast as defined by WCAG 2, of two colours as returned by getComputedStyle."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(ink), luminance(ground)))
    return (light + 0.05) / (dark + 0.05)


def test_the_contrast_is_wcags() -> None:
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgb(118, 118, 118)", "rgb(255, 255, 255)") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("wide", [360, 1400])
def test_tab_reaches_all_that_can_be_used_in_order_and_shows_where_it_is(
    browser: Browser, site: Site, wide: int
) -> None:
    browser.open(site.file("lab"), wide)
    usable = "return [...document.querySelectorAll('a[href], summary, [tabindex=\"0\"]')]"
    wanted = browser.run(f"{usable}.map((one, at) => [one.dataset.at = at, one.tagName])")
    assert {tag for _, tag in wanted} == {"A", "SUMMARY", "DIV"}
    body = browser.driver.find_element(By.TAG_NAME, "body")
    for at, tag in wanted:
        (body if at == 0 else browser.driver.switch_to.active_element).send_keys(Keys.TAB)
        reached, outline, left, right = browser.run(
            """const one = document.activeElement, box = one.getBoundingClientRect(), style = getComputedStyle(one);
               return [one.dataset.at, style.outlineStyle + ' ' + style.outlineWidth, box.left, box.right];"""
        )
        assert (reached, outline) == (str(at), "solid 3px"), tag
        assert left >= 0 and right <= wide


def test_it_has_landmarks_headings_in_order_and_named_tables(browser: Browser, site: Site) -> None:
    """Read from the accessibility tree."""
    browser.open(site.file("lab"), 360)
    role = browser.accessible()
    landmarks = ("banner", "navigation", "main", "contentinfo")
    assert sorted(name for name, _ in role if name in landmarks) == sorted(landmarks)
    assert ("navigation", "Contents") in role
    tables = [name for kind, name in role if kind == "table"]
    assert len(tables) >= 8
    assert all(tables)
    levels = browser.run("return [...document.querySelectorAll('h1, h2, h3, h4, h5, h6')].map(one => +one.tagName[1])")
    assert len(levels) == len([name for name, _ in role if name == "heading"])
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert not [name for kind, name in role if kind in ("image", "img", "graphics-document")]


def test_state_is_never_shown_by_colour_alone(browser: Browser, site: Site) -> None:
    browser.open(site.file("lab"))
    toned = "[...document.querySelectorAll('.good, .bad, .warn')]"
    assert browser.run(f"return {toned}.filter(one => !one.textContent.trim()).length") == 0
    drawn = "[...document.querySelectorAll('.worst')]"
    marks = browser.run(f"return {drawn}.map(one => [one.classList.contains('off'), one.getAttribute('d')])")
    assert len({shape for off, shape in marks if off}) == len({shape for off, shape in marks if not off}) == 1
    assert len({shape for _, shape in marks}) == 2


@pytest.mark.parametrize("name", NAMES)
def test_it_prints_light_whole_and_without_its_menu(browser: Browser, site: Site, name: str) -> None:
    browser.open(site.file(name), 720, "dark", "print")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.run("return getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.run("return document.documentElement.scrollWidth") == 720
    folded = "[...document.querySelectorAll('details > :not(summary)')]"
    heights = browser.run(f"return {folded}.map(one => one.getBoundingClientRect().height)")
    assert all(height > 20 for height in heights)
    assert bool(heights) == (name != "h20")


@pytest.mark.slow
def test_evidence_that_is_markup_stays_text(browser: Browser, site: Site) -> None:
    tags = "return [...new Set([...document.querySelectorAll('*')].map(one => one.tagName))].sort()"
    browser.open(site.file("lab"))
    tame = browser.run(tags)
    browser.open(site.file("wild"))  # an alert would make the next command fail
    assert set(browser.run(tags)) <= set(tame)
    assert "<script>alert(1)</script>" in browser.run("return document.body.textContent")
