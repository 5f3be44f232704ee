"""`envbuild show --html`: the contents of the page, and that evidence is only shown as text."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from envbuild.lock import lock_file
from envbuild.report import profile_page_contents, profile_page_html
from unit.report import pages
from unit.support import PROFILE, envbuild, lock_for, plan_of, profile_of, whole_lock, write_profile


class Tags(HTMLParser):
    """Collects the elements of a page, their attributes and their text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    pages.share_templates_and_shipped_locks(monkeypatch)


@pytest.fixture
def world(project: Path) -> Path:
    """A verified profile for the CPU, and a profile for four GPUs whose self-test failed."""
    pages.site_facts()
    pages.prove(*pages.cpu(project), pages.outcome("cpu"))
    pages.prove(*pages.lab(project), pages.outcome("gpu"))
    return project


def page(name: str, *more: str) -> dict[str, Any]:
    done = envbuild("show", name, "--html", "page.html", *more, "--json")
    assert done.code == 0, done.stderr
    return done.document


# contents


def test_the_page_of_a_verified_profile_has_machine_and_date(world: Path) -> None:
    status = page("cpu")
    assert (status["state"], status["reasons"]) == ("verified", ["cpu: proved on the CPU, 2026-11-21"])
    text = (world / "page.html").read_text(encoding="utf-8")
    assert "<title>cpu: verified</title>" in text
    assert all(
        part in text
        for part in (
            status["images"][0],
            status["lock"],
            Path(status["evidence"][0]["statement"]).name.partition(".")[0],
        )
    )


def test_the_page_of_a_failed_profile_names_the_probes(world: Path) -> None:
    status = page("lab")
    assert status["state"] == "failed"
    assert "gemm.crash, gemm.accuracy" in status["reasons"][0]


def test_a_fault_of_the_run_is_shown(world: Path, project: Path) -> None:
    outcome = pages.outcome("cpu")
    pages.prove(*pages.cpu(project), outcome, ("the container ran out of memory",), day=1)
    assert page("cpu")["state"] == "failed"
    assert "the container ran out of memory" in (world / "page.html").read_text(encoding="utf-8")


def test_each_gpu_of_a_fleet_has_its_own_run(project: Path) -> None:
    cards = {"a100": "NVIDIA A100-SXM4-80GB", "h20": "NVIDIA H20"}
    loaded = profile_of(project, {"extends": "h20-cu12", "gpus": [*cards, "l40s"], "apt": []}, "mixed")
    made = whole_lock(plan_of(project, {"extends": "h20-cu12", "gpus": [*cards, "l40s"], "apt": []}, "mixed"))
    lock_file.write(made, loaded.lock_file, "mixed")
    for day, card in enumerate(cards.values()):
        pages.prove(loaded, made, json.loads(json.dumps(pages.outcome("gpu")).replace(pages.CARD, card)), day=day)
    found = page("mixed")
    assert [run["gpu"] for run in found["runs"]] == list(cards.values())
    assert [(row["model"], row["state"]) for row in found["evidence"]] == [
        ("a100", "failed"), ("h20", "failed"), ("l40s", "missing")
    ]  # fmt: skip
    text = (project / "page.html").read_text(encoding="utf-8")
    assert re.findall(r'<h2 id="run\d-title">Self-test on (.*?)</h2>', text) == list(cards.values())
    assert "l40s: unverified" in text


def test_a_profile_that_was_never_built_is_missing(project: Path) -> None:
    found = page("h20")
    assert (found["state"], found["runs"]) == ("missing", [])
    assert found["reasons"] == ["h20: unverified", "no image was built from its lock"]
    text = (project / "page.html").read_text(encoding="utf-8")
    assert "there are no measurements" in text
    assert "Next:</span> <code>envbuild make h20</code>, on a machine with h20" in text


def test_a_profile_without_a_lock_says_so(project: Path) -> None:
    write_profile(project, PROFILE)
    found = page("sample")
    assert (found["state"], found["layers"]) == ("missing", None)
    assert (found["next_command"], found["next_place"]) == ("envbuild make sample", "")
    assert {pin["name"] for pin in found["pins"]} >= {"python", "torch"}


@pytest.mark.slow
def test_the_headline_has_the_next_command(world: Path) -> None:
    """With several GPUs, the headline names the GPUs without evidence."""
    found = page("cpu")
    assert (found["state"], found["next_command"]) == ("verified", "docker run --rm -it envbuild/cpu:verified")
    assert found["next_place"] == ""
    failed = page("lab")
    assert (failed["state"], failed["next_command"]) == ("failed", "envbuild test lab")
    assert failed["next_place"] == "on a machine with lab"


def test_an_extension_that_is_left_out_is_listed(project: Path) -> None:
    (left,) = page("h20-cu12")["left_out"]
    assert left["name"] == "apex" and "nvcc of this CUDA" in left["reason"]
    text = (project / "page.html").read_text(encoding="utf-8")
    assert "Extensions that are left out" in text and "nvcc of this CUDA" in text
    assert page("cpu")["left_out"] == []


def test_a_lock_that_no_longer_fits_is_out_of_date(project: Path) -> None:
    made = whole_lock(plan_of(project, {**PROFILE, "packages": ["einops"]}))
    write_profile(project, PROFILE)
    lock_file.write(made, project / "profiles" / "sample.lock.yaml", "sample")
    pages.build(profile_of(project, PROFILE), made)
    status = page("sample")
    assert (status["state"], status["reasons"][0]) == (
        "stale", "wheels changed in the profile since it was locked"
    )  # fmt: skip


def test_the_pins_are_those_of_show(world: Path) -> None:
    shown = envbuild("show", "lab", "--json").document
    listed = {pin["name"]: (pin["version"], pin["reason"]) for pin in page("lab")["pins"]}
    assert listed == {
        name: (version, shown["reasons"][name] or "") for name, version in shown["pins"].items() if version
    }


def test_advisories_come_with_state_reason_remedy_and_sources(world: Path) -> None:
    advice = {item["id"]: item for item in page("lab")["advisories"]}
    assert advice["cublas-hopper-fpe"]["state"] == "accepted"
    assert advice["cublas-hopper-fpe"]["reason"] == "no product of these shapes is known in the project"
    assert advice["rmsnorm-half-torch-2.4"]["state"] == "warned"
    text = (world / "page.html").read_text(encoding="utf-8")
    assert 'href="https://github.com/pytorch/pytorch/issues/133548"' in text


def test_a_fleet_says_why_its_variables_are_set(project: Path) -> None:
    reasons = {item["name"]: item["reason"] for item in page("fleet")["environment"]}
    assert reasons["ENVBUILD_DTYPE"]
    assert reasons["LANG"] == ""


def test_layers_are_shared_where_diff_says_that_they_are_the_same(world: Path) -> None:
    own = {item["title"] for item in page("lab")["layers"]["layers"] if not item["shared"]}
    new = {item["title"] for item in envbuild("diff", "xdit", "lab", "--json").document["layers"]}
    assert own == new == {"nvidia-cublas-cu12", "packages"}
    sizes = [item["bytes"] for item in page("lab")["layers"]["layers"]]
    assert sizes == sorted(sizes, reverse=True)


def test_the_size_of_a_base_image_by_digest_is_not_known(project: Path) -> None:
    base = {"image": f"example/base@sha256:{'0' * 64}"}
    data = {**PROFILE, "base": base, "apt": []}
    lock_file.write(lock_for(plan_of(project, data)), project / "profiles" / "sample.lock.yaml", "sample")
    layers = page("sample")["layers"]["layers"]
    assert {item["title"]: item["bytes"] for item in layers if not item["bytes"]} == {
        f"base {base['image']}": None, "virtual environment": 0
    }  # fmt: skip
    shown = (project / "page.html").read_text(encoding="utf-8")
    assert "not known" in shown


def test_layers_above_a_base_image_have_no_numbers(project: Path) -> None:
    """The lock does not state how many layers the base image has."""
    for name, base in (("sample", {"image": f"example/base@sha256:{'0' * 64}"}), ("debian", PROFILE["base"])):
        plan = plan_of(project, {**PROFILE, "base": base, "apt": []}, name)
        lock_file.write(lock_for(plan), project / "profiles" / f"{name}.lock.yaml", name)
        layers = page(name)["layers"]["layers"]
        own = len(layers) - 1
        shown = (project / "page.html").read_text(encoding="utf-8")
        if name == "sample":
            assert {layer["number"] for layer in layers} == {None}
            assert f"to fetch in a base image and {own} layers." in shown and ">number " not in shown
        else:
            assert {layer["number"] for layer in layers} == set(range(1, own + 2))
            assert f"to fetch in {own + 1} layers." in shown and ">number 1 ·" in shown


def test_a_lock_of_another_profile_that_cannot_be_read_is_passed_over(project: Path) -> None:
    (project / "profiles" / "broken.lock.yaml").write_text("[", encoding="utf-8")
    assert page("cpu")["layers"]["compared"] == len(list((pages.ROOT / "profiles").glob("**/*.lock.yaml"))) - 1


def test_two_fingerprints_are_compared_as_compare_does(project: Path) -> None:
    found = page("cpu", "--compare", *map(str, pages.PRINTS))["comparison"]
    compared = envbuild("diff", *map(str, pages.PRINTS), "--json").document
    assert {key: found[key] for key in ("state", "operations")} == {
        key: compared[key] for key in ("state", "operations")
    }


def test_the_same_evidence_gives_the_same_page(world: Path) -> None:
    page("lab")
    before = (world / "page.html").read_bytes()
    page("lab")
    assert (world / "page.html").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["show", "cpu", "a100", "--html", "x.html"], 2),
        (["show", "cpu", "--compare", "a.json", "b.json"], 2),
        (["show", "nosuch", "--html", "x.html"], 3),
        (["show", "cpu", "--html", "x.html", "--compare", "a.json"], 2),
        (["show", "cpu", "--html", "x.html", "--compare", "a.json", "b.json"], 3),
        (["show", "cpu", "--html", "."], 2),
    ],
)
def test_a_failed_write_leaves_nothing(project: Path, arguments: list[str], code: int) -> None:
    assert envbuild(*arguments).code == code
    assert not (project / "x.html").exists()


# presentation


@pytest.mark.parametrize(
    ("ratio", "at"), [(0.0, 3.0), (-1.0, 3.0), (1e-9, 11.0), (1e-6, 11.0), (1.0, 69.5), (1e2, 89.0), (1e9, 89.0)]
)
def test_a_ratio_has_its_place_on_the_one_scale(ratio: float, at: float) -> None:
    assert profile_page_html.scale_position(ratio) == at
    assert profile_page_html.scale_position(float("inf")) == profile_page_html.scale_position(float("nan")) == 96.0


def test_the_scale_rises() -> None:
    found = [profile_page_html.scale_position(10 ** (power / 10)) or 0 for power in range(-60, 21)]
    assert all(a < b for a, b in itertools.pairwise(found))


def test_marks_of_one_place_are_one_mark_and_taller() -> None:
    assert profile_page_html.marks([1.0]) == [(69.5, 1.0)]
    assert profile_page_html.marks([1.0] * 100 + [0.0]) == [(3.0, 1.0), (69.5, 3.0)]


@pytest.mark.parametrize(
    "cited", ["javascript:alert(1)", "http://example.org/", "https://x/<b>", "a/b", "a/b#c", "https://u@h/", "data:,x"]
)
def test_only_an_address_or_a_thread_becomes_a_link(cited: str) -> None:
    assert "<a " not in profile_page_html.link(cited)
    assert [tag for tag, _ in Tags(profile_page_html.link(cited)).found] == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), (0.98765, "0.988"), (1234.5, "1,234"), (2e7, "2e+07"), (float("inf"), "infinite"), ("nan", "no number"),
     (None, "–"), ("", "–"), ("<b>", "<b>")],
)  # fmt: skip
def test_numbers_have_three_digits(value: Any, expected: str) -> None:
    assert profile_page_html.three_digits(value) == expected


def test_nothing_in_the_evidence_is_more_than_text(world: Path, project: Path) -> None:
    page("lab")
    tame = Tags((world / "page.html").read_text(encoding="utf-8"))
    pages.prove(*pages.lab(project), pages.hostile(), day=1)
    found = page("lab")
    text = (world / "page.html").read_text(encoding="utf-8")
    wild = Tags(text)
    assert {tag for tag, _ in wild.found} <= {tag for tag, _ in tame.found}
    assert not {name for _, attributes in wild.found for name in attributes if name.startswith("on")}
    assert "<script>alert(1)</script>" in "".join(wild.words)
    assert not set(text) & {"\x1b", "\u202e"}
    assert found["runs"][0]["probes"][6]["reason"].startswith("died of SIGFPE</code>")


def test_the_page_allows_its_own_style_and_nothing_else(world: Path) -> None:
    page("lab", "--compare", *map(str, pages.PRINTS))
    text = (world / "page.html").read_text(encoding="utf-8")
    style = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert len(style) == 1
    hashed = base64.b64encode(hashlib.sha256(style[0].encode()).digest()).decode()
    policy = next(a["content"] for tag, a in Tags(text).found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == f"default-src 'none'; style-src 'sha256-{hashed}'; base-uri 'none'; form-action 'none'"
    assert not [a for tag, a in Tags(text).found if tag in ("script", "img", "link", "iframe") or "style" in a]
    assert not re.search(r"url\(|@import", style[0])


def test_every_table_has_a_caption_and_headed_columns(world: Path) -> None:
    page("lab", "--compare", *map(str, pages.PRINTS))
    text = (world / "page.html").read_text(encoding="utf-8")
    tables = re.findall(r"<table.*?</table>", text, re.DOTALL)
    assert len(tables) == 9
    assert all("<caption>" in table and 'scope="col"' in table and 'scope="row"' in table for table in tables)
    assert text.count("<svg") == text.count('aria-hidden="true"', 0) - text.count('<span aria-hidden="true"') + len(
        re.findall(r'<svg x="', text)
    )


def test_json_holds_no_number_that_json_has_not(world: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(word)

    done = envbuild("show", "lab", "--html", "page.html", "--json")
    found = json.loads(done.stdout, parse_constant=refuse)
    assert found["file"] == "page.html"
    assert list(found) == [field.name for field in dataclasses.fields(profile_page_contents.PageDocument)]
    assert found["runs"][0]["probes"][14]["shares"][-1] == "inf"
