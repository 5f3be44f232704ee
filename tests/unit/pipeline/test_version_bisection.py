"""The bisection of a pin: what is tried, what is cleaned up, and what is reported. Images and runs are stand-ins.

Releases are found by the real uv, in an index and a folder of tiny wheels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from envbuild.cli.console import Console
from envbuild.facts import database
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import image_steps, make_build_and_test, version_bisection
from envbuild.pipeline.model import BuiltImage, MakeResult, Options, SelfTestOrder, StepResult
from envbuild.pipeline.step_context import StepContext
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.profile.project_test_shapes_and_script import Script
from envbuild.resolve.plan_resolver import Plan, pinned_distribution, resolve
from envbuild.runners import docker_runner
from envbuild.testrun.run_result import TestRun
from envbuild.testrun.selftest_job import RunRequest
from envbuild.util import user_folders
from envbuild.util.errors import NetworkError, NotProved, ProfileError, UsageError
from unit.evidence.runs import documents, judged, lines, passed_run, probe
from unit.support import (
    PROFILE,
    CommandResult,
    Index,
    envbuild,
    image_of,
    lock_for,
    plan_of,
    profile_of,
    quick_pip,
    serving,
    write_profile,
    write_wheel,
)

VERSIONS = [f"1.{minor}" for minor in range(10)]
RELEASES = ("1.0", "1.9", "1.10", "2.0.post1", "2.1")


class Workbench:
    """Stands in for the engine. `outcomes`: the result by version. The stand-in records the requests."""

    def __init__(self, outcomes: Mapping[str, str], folder: Path) -> None:
        self.outcomes = outcomes
        self.made: list[str] = []
        self.options: list[Any] = []
        self.discarded: list[str] = []
        self.kept: list[str] = []
        self.lock = lock_for(plan_of(folder, PROFILE))

    def locked(self, context: StepContext, loaded: LoadedProfile, plan: Plan, options: Options) -> StepResult[Lock]:
        version = options.pins["numpy"]
        self.made.append(version)
        context.progress.begin("build")
        self.options.append(options)
        if self.outcomes[version] == "unmakable":
            raise ProfileError("the packages cannot be resolved together")
        return StepResult(self.lock)

    def selftest(self, context: StepContext, order: SelfTestOrder, runner: object) -> TestRun:
        context.progress.begin("self-test")
        outcome = self.outcomes[self.made[-1]]
        if outcome == "skipped":
            run = judged(lines(documents(probe("gemm.crash", "skipped"))), ["gemm.crash"])
        else:
            run = passed_run(*(probe(name, outcome) for name in order.request.probes))
        return run

    def discard(self, context: StepContext, made: MakeResult, *, image: bool = True) -> None:
        assert made.name == "sample"
        (self.discarded if image else self.kept).append(self.made[-1])


def bench(monkeypatch: pytest.MonkeyPatch, project: Path, outcomes: Mapping[str, str]) -> Workbench:
    write_profile(project, PROFILE)
    made = Workbench(outcomes, project)
    monkeypatch.setattr(StepContext, "engine", None)
    monkeypatch.setattr(version_bisection, "lock_profile", made.locked)
    monkeypatch.setattr(make_build_and_test, "render_and_build", lambda *_: BuiltImage(image_of(made.made[-1])))
    monkeypatch.setattr(make_build_and_test, "run_selftest", made.selftest)
    monkeypatch.setattr(version_bisection, "discard_build", made.discard)
    monkeypatch.setattr(version_bisection, "releases_between", lambda *_: list(outcomes))
    return made


def passing_from(first: str) -> dict[str, str]:
    return {v: "passed" if VERSIONS.index(v) >= VERSIONS.index(first) else "failed" for v in VERSIONS}


def hunted(*more: str) -> CommandResult:
    return envbuild("bisect", "sample", "--pin", "numpy", "--probe", "gemm.crash", *more)


def test_the_first_that_passes_is_found_with_few_tries(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    made = bench(monkeypatch, project, passing_from("1.6"))
    result = hunted()
    assert (result.code, result.stdout) == (0, "numpy 1.6 is the first that passes; 1.5 before it fails\n")
    assert made.made[:2] == ["1.0", "1.9"]
    assert len(made.made) <= 6
    assert "10 of numpy, 1.0 to 1.9: at most 6 tries if each can be built" in result.stderr
    assert made.discarded == made.made
    lines = [" ".join(line.split()[:2]) for line in result.stderr.splitlines()[3:]]
    outcomes = [text for text in lines if not text.endswith((" lock", " build", " self-test"))]
    assert [text.split()[0] for text in outcomes] == made.made
    assert lines[:4] == ["1.0: lock", "1.0: build", "1.0: self-test", outcomes[0]]
    assert all(options.tolerant and options.trial for options in made.options)
    assert {options.request for options in made.options} == {RunRequest(probes=("gemm.crash",))}


def test_the_tries_are_reported_as_json(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    made = bench(monkeypatch, project, {**passing_from("1.6"), "1.5": "unmakable"})
    document = hunted("--json").document
    assert (document["passing_version"], document["change"]) == ("1.6", {"before": "1.4", "after": "1.6"})
    assert document["versions"] == VERSIONS
    assert [item["version"] for item in document["tries"]] == made.made
    tries = {item["version"]: item for item in document["tries"]}
    assert (tries["1.5"]["state"], tries["1.5"]["reason"]) == ("not-built", "the packages cannot be resolved together")
    assert (tries["1.0"]["state"], tries["1.0"]["reason"]) == ("failed", "gemm.crash: signal at a step: why")
    assert "1.5 between them could not be tried" in hunted().stdout


def test_a_failure_on_the_way_keeps_the_tries_so_far(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    made = bench(monkeypatch, project, passing_from("1.6"))

    def lock(*given: Any) -> Any:
        if len(made.made) == 2:
            raise NetworkError("the index does not answer")
        return made.locked(*given)

    monkeypatch.setattr(version_bisection, "lock_profile", lock)
    result = hunted("--json")
    document = result.document
    assert (result.code, document["error"]["kind"]) == (NetworkError.code, "network")
    assert [(item["version"], item["state"]) for item in document["tries"]] == [("1.0", "failed"), ("1.9", "passed")]
    assert (document["passing_version"], document["versions"], document["state"]) == (None, VERSIONS, "unknown")


@pytest.mark.parametrize(
    ("outcomes", "code", "words"),
    [
        (dict.fromkeys(VERSIONS, "passed"), 0, "numpy 1.0, the oldest, already passes"),
        (dict.fromkeys(VERSIONS, "failed"), 5, "no version of numpy is known to pass: the oldest and the newest fail"),
        (dict.fromkeys(VERSIONS, "unmakable"), 5, "no image could be made with any of 10 versions of numpy"),
        (
            {"1.0": "passed", "1.1": "passed", "1.2": "failed"},
            0,
            "numpy 1.2 is the first that fails; 1.1 before it passes",
        ),
        ({"1.0": "failed"}, 5, "fail (1.0)"),
    ],
)
def test_the_message_if_nothing_changes_or_in_the_other_direction(
    monkeypatch: pytest.MonkeyPatch, project: Path, outcomes: dict[str, str], code: int, words: str
) -> None:
    bench(monkeypatch, project, outcomes)
    result = hunted()
    assert result.code == code
    assert words in result.stdout + result.stderr
    assert (hunted("--json").document["passing_version"] is None) is (code == 5)


def test_a_probe_that_cannot_run_here_decides_nothing(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    made = bench(monkeypatch, project, dict.fromkeys(VERSIONS, "skipped"))
    assert hunted().code == 4
    assert made.made == made.discarded == ["1.0"]


def test_images_are_kept_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    made = bench(monkeypatch, project, passing_from("1.6"))
    assert hunted("--keep").code == 0
    assert (made.discarded, made.kept) == ([], made.made)


def test_an_interrupted_bisection_is_cleaned_up(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    made = bench(monkeypatch, project, passing_from("1.6"))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(make_build_and_test, "run_selftest", interrupted)
    assert hunted().code == 130
    assert made.discarded == ["1.0"]


def test_a_script_may_decide(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    made = bench(monkeypatch, project, passing_from("1.6"))
    (project / "a smoke.py").write_text("the_script", encoding="utf-8")
    document = envbuild("bisect", "sample", "--pin", "numpy", "--script", "a smoke.py", "--json").document
    assert (document["passing_version"], document["script"]) == ("1.6", "a smoke.py")
    assert {options.script for options in made.options} == {Script("a_smoke.py", "the_script")}
    assert {options.request for options in made.options} == {RunRequest(probes=("own.script",))}
    assert document["tries"][0]["reason"] == "own.script: signal at a step: why"


def test_the_script_of_a_try_is_the_one_given(project: Path) -> None:
    write_profile(project, PROFILE)
    loaded = image_steps.load_profile("sample", options=Options(script=Script("smoke.py", "pass"))).value
    assert loaded.profile.selftest.script == Script("smoke.py", "pass")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"x = (", "smoke.py:1: invalid Python"),
        (b"\xff", "is not UTF-8"),
        (b"#" * (257 << 10), "is larger than"),
        (None, "error: smoke.py cannot be read: No such file or directory\n"),
    ],
)
def test_a_script_that_cannot_run_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch, project: Path, content: bytes | None, words: str
) -> None:
    made = bench(monkeypatch, project, passing_from("1.6"))
    if content is not None:
        (project / "smoke.py").write_bytes(content)
    result = envbuild("bisect", "sample", "--pin", "numpy", "--script", "smoke.py")
    assert (result.code, words in result.stderr, made.made) == (3, True, []), result.stderr


def on_a_card(monkeypatch: pytest.MonkeyPatch, project: Path, outcomes: Mapping[str, str]) -> Workbench:
    made = bench(monkeypatch, project, outcomes)
    write_profile(project, {**PROFILE, "gpus": ["h20"], "torch": "2.7.1"})
    return made


def test_without_a_gpu_nothing_is_made(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    made = on_a_card(monkeypatch, project, passing_from("1.6"))

    def nowhere(engine: object) -> None:
        raise NotProved("the engine has no GPU")

    monkeypatch.setattr(docker_runner, "look_for_gpu", nowhere)
    monkeypatch.setattr(version_bisection, "releases_between", lambda *_: pytest.fail("the index was asked first"))
    assert (hunted().code, made.made) == (4, [])
    mistyped = envbuild("bisect", "sample", "--pin", "nosuch", "--probe", "gemm.crash")
    assert (mistyped.code, "nosuch is neither" in mistyped.stderr) == (2, True), "reported without a GPU, too"


def test_on_another_gpu_no_outcome_counts(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    """All versions would fail on that GPU, and this says nothing about the pin."""
    made = on_a_card(monkeypatch, project, dict.fromkeys(VERSIONS, "failed"))
    monkeypatch.setattr(version_bisection, "require_gpu", lambda context: StepResult(None))
    result = hunted()
    assert (result.code, made.made, made.discarded) == (4, ["1.0"], ["1.0"])
    assert "the GPU here is not one of sample's" in result.stderr
    assert made.options[0].request == RunRequest(probes=("env.identity", "gemm.crash"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pin", "nosuch", "--probe", "gemm.crash"], "nosuch is neither torch, nor a package of sample"),
        (["--pin", "numpy", "--probe", "gemm.crsh"], "did you mean gemm.crash?"),
        (["--pin", "numpy", "--probe", "env.identity"], "needs a GPU; sample is for the CPU"),
        (
            ["--pin", "numpy", "--probe", "gemm.crash", "--from", "new"],
            "'new' is not a version; write a release, as in --from 12",
        ),
        (["--pin", "numpy", "--probe", "gemm.crash", "--from", "2", "--to", "1"], "hint: --from 1 --to 2"),
        (["--pin", "numpy==1.5", "--probe", "gemm.crash"], "hint: --pin numpy --from 1.5"),
        (["--pin", "numpy"], "--probe NAME or --script FILE"),
        (
            ["--pin", "numpy", "--probe", "gemm.crash", "--script", "profiles/sample.yaml"],
            "give one of --probe and --script",
        ),
        (["--probe", "gemm.crash"], "hint: envbuild bisect h20 --pin cublas --probe gemm.crash --from 12.1.3.1"),
    ],
)
def test_a_range_that_cannot_be_bisected_is_refused(
    monkeypatch: pytest.MonkeyPatch, project: Path, arguments: list[str], words: str
) -> None:
    bench(monkeypatch, project, passing_from("1.6"))
    result = envbuild("bisect", "sample", *arguments)
    assert (result.code, words in result.stderr) == (2, True), result.stderr


def test_no_release_within_the_bounds(monkeypatch: pytest.MonkeyPatch, project: Path) -> None:
    bench(monkeypatch, project, {})
    result = hunted("--from", "9")
    assert (result.code, "give released versions, as in --from 12.1.3.1" in result.stderr) == (2, True)


# trials


def test_a_pin_is_torch_a_package_or_a_library(project: Path) -> None:
    plan = resolve(profile_of(project, {**PROFILE, "gpus": ["h20"], "torch": "2.7.1", "packages": ["Foo_Bar[x]>=1"]}))
    assert [pinned_distribution(plan, pin) for pin in ("torch", "foo-bar", "cublas")] == [
        "torch",
        "foo-bar",
        "nvidia-cublas-cu12",
    ]
    with pytest.raises(UsageError, match="cubals is neither"):
        pinned_distribution(plan, "cubals")


def test_a_known_fault_is_tried_all_the_same(project: Path) -> None:
    """Otherwise it would be impossible to find the version that fixes it."""
    loaded = profile_of(project, {**PROFILE, "gpus": ["h20"], "torch": "2.3.1", "pins": {"cublas": "12.1.3.1"}})
    with pytest.raises(ProfileError):
        resolve(loaded)
    tolerant = loaded.accepting((item.id for item in database.advisories()), "only tried")
    choice = resolve(tolerant).choice
    assert "cublas-hopper-fpe" in {item.id for item in choice.advisories if item.state == "accepted"}


@pytest.mark.parametrize("cached", [True, False])
def test_only_what_was_made_is_discarded(monkeypatch: pytest.MonkeyPatch, project: Path, cached: bool) -> None:
    removed: list[str] = []

    class Engine:
        def remove(self, reference: str) -> None:
            removed.append(reference)

    context = StepContext(Console())
    context.engine = Engine()  # type: ignore[assignment]
    locked = lock_for(plan_of(project, PROFILE))
    context.step("build", lambda: StepResult(None, cached))
    folder = user_folders.cache_folder("contexts") / "sample"
    (folder / "wheels").mkdir(parents=True)
    image_steps.discard_build(context, MakeResult("sample", lock=locked))
    assert not folder.exists()
    tag = f"envbuild/sample:{locked.short}"
    assert removed == ([] if cached else [tag, f"{tag}-layers"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--probe", "gemm.crash", "--script", "smoke.py"], "give one of --probe and --script"),
        (["--probe", "gemm.crash", "--from", "2.10", "--to", "2.9"], "--from is newer than --to: 2.10, 2.9"),
        ([], "no test given"),
    ],
)
def test_options_that_do_not_go_together_are_named(project: Path, options: list[str], words: str) -> None:
    (project / "smoke.py").write_text("", encoding="utf-8")
    done = envbuild("bisect", "cpu", "--pin", "torch", *options)
    assert done.code == 2 and words in done.stderr


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    quick_pip(monkeypatch)
    folder, links = tmp_path / "served", tmp_path / "links"
    for version in RELEASES:
        write_wheel(folder, "thing", version)
    write_wheel(folder, "thing", "3.0rc1")
    write_wheel(folder, "thing", "1.5", tag="cp27-cp27m-win_amd64")
    write_wheel(links, "thing", "2.2+cpu")
    write_wheel(links, "thing", "2.2")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with serving(Index(folder)) as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.address)
        yield found


def found_releases(oldest: str | None = None, newest: str | None = None, name: str = "thing") -> list[str]:
    return version_bisection.releases_between(name, "3.11", "2.36", oldest, newest)


def test_releases_that_fit_come_oldest_first_from_every_place(served: Index) -> None:
    assert found_releases() == [*RELEASES, "2.2+cpu"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("oldest", "newest", "expected"),
    [
        ("1.9", "2.1", ["1.9", "1.10", "2.0.post1", "2.1"]),
        ("1.9.1", "2.0", ["1.10"]),
        (None, "1.9", ["1.0", "1.9"]),
        ("2.2", None, ["2.2+cpu"]),
        (None, "2.2+cpu", [*RELEASES, "2.2+cpu"]),
        ("3", None, []),
        (None, "0.1", []),
    ],
)
def test_the_bounds_of_releases_are_included(
    served: Index, oldest: str | None, newest: str | None, expected: list[str]
) -> None:
    assert found_releases(oldest, newest) == expected


def test_a_name_that_no_index_has_gives_no_releases(served: Index) -> None:
    assert found_releases(name="nosuch") == []


def test_an_unreachable_index_raises_a_network_error(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_pip(monkeypatch)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(NetworkError):
        found_releases()
