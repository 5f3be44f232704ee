"""Several profiles in one make: the exit code, the order, and the effect of a failure; processes are stand-ins."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envbuild.image.engine_endpoint_and_errors import UnusableEngine
from envbuild.pipeline import multi_profile_make, preflight_steps, progress_events
from envbuild.pipeline.model import MakeResult, Options
from envbuild.pipeline.preflight_report import Preflight, ProofMachine, Provability, judge_proof
from envbuild.pipeline.progress_events import (
    Event,
    Note,
    ProbeEnded,
    ProbesPlanned,
    Step,
    StepAborted,
    StepBegan,
    StepEnded,
)
from envbuild.pipeline.step_context import StepContext
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.util import process_locks
from envbuild.util.errors import EngineError, Interrupted
from envbuild.util.host_processes import Completed
from envbuild.util.json_output_types import plain
from envbuild.util.untrusted_input_errors import Reason
from unit.evidence.runs import NAMES, ended_probe
from unit.support import PROFILE, configure, envbuild, write_profile

GPU = {"extends": "h20"}
CONCURRENT = {process_locks.PARALLEL: "1"}


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([0, 4], 4),
        ([4, 8, 0], 8),
        ([3, 7], 7),
        ([7, 6, 3], 6),
        ([4, 5, 6], 5),
        ([5, 130], 130),
        ([5, 77], 77),
    ],
)
def test_the_exit_code_is_the_worst(codes: list[int], code: int) -> None:
    assert multi_profile_make.worst_exit_code(codes) == multi_profile_make.worst_exit_code(codes[::-1]) == code


def test_no_unit_is_in_two_hands_and_all_are_used() -> None:
    pool, lock = multi_profile_make.ResourcePool(("0", "1", "2")), threading.Lock()
    held: set[str] = set()
    seen: set[str] = set()
    pairs = threading.Barrier(3)

    def one(count: int) -> None:
        with pool.taking(count) as units:
            with lock:
                assert len(units) == min(count, 3) and not held & set(units)
                held.update(units)
                seen.update(units)
            if count == 1:
                pairs.wait(20)  # three processes at once, otherwise all wait
            with lock:
                held.difference_update(units)

    with ThreadPoolExecutor(9) as threads:
        list(threads.map(one, (1, 1, 1, 2, 3, 4, 2, 3, 4)))
    assert seen == {"0", "1", "2"}


class Children:
    """Stands in for the child processes: records their commands; `answers` has the results by profile and verb."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.answers: dict[tuple[str, str], Completed] = {}
        self.environments: dict[str, Mapping[str, str]] = {}
        self.stderr: tuple[str, ...] = ()
        self.events: tuple[Event, ...] = ()
        self.provability: dict[str, tuple[Provability, tuple[Reason, ...]]] = {}  # else proved already
        self.reasons: list[str] = []
        self._lock = threading.Lock()
        self._testing = 0
        self.most = 0

    def __call__(self, argv: Sequence[str], *, env: Mapping[str, str], listeners: Any, stop: Any) -> Completed:
        stop.check()
        words = [str(word) for word in argv][3:]
        assert words[0] == "envbuild" and words[-2] == "--" and "--json" in words
        with self._lock:
            self.commands.append(words[1:])
            self.environments[words[1]] = env
            self._testing += words[1] == "make"
            self.most = max(self.most, self._testing)
        threading.Event().wait(0.05)
        with self._lock:
            self._testing -= words[1] == "make"
        ended = StepEnded(Step("lock", 0.0, True, "x")), StepEnded(Step(words[1], 1.0, False, "x"))
        for event in (StepBegan("lock"), *ended, *self.events):
            listeners.events(progress_events.event_line(event).decode())
        for line in self.stderr:
            listeners.stderr(line)
        steps = [{"name": name, "seconds": 1.0, "cached": words[1] == "make"} for name in ("lock", words[1])]
        document: dict[str, Any] = {
            **MADE,
            "profile": words[-1],
            "state": "built" if words[1] == "build" else "verified",
            "steps": steps,
        }
        document["notes"] = ["another image"] if words[1] == "build" else []  # the second process finds it built
        return self.answers.get((words[-1], words[1]), Completed(0, json.dumps(document), ""))

    def examine(self, engine: object, loaded: LoadedProfile, plan: object, options: Options) -> Preflight:
        self.reasons.append(options.line_reason)
        machine = ProofMachine("local", selected=len(options.request.gpus))
        judged = judge_proof(loaded.profile.gpus, loaded.profile.gpu_count, machine, None, proved=False)
        proof, reasons = self.provability.get(loaded.name, judged if judged[0] == "impossible" else ("proved", ()))
        gpus = tuple(loaded.profile.gpus)
        return Preflight(loaded.name, options.line_reason, gpus, 1, "local", None, (), None, None, True, 0, 0, False,
                         1.0, loaded.name, proof, reasons)  # fmt: skip

    def options(self, name: str, verb: str) -> list[str]:
        (found,) = [words[1:-2] for words in self.commands if (words[-1], words[0]) == (name, verb)]
        return found


MADE: dict[str, Any] = plain(MakeResult("").document())  # every key


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch, project: Path) -> Iterator[Children]:
    found = Children()
    monkeypatch.setattr(multi_profile_make, "run", found)
    monkeypatch.setattr(StepContext, "engine", SimpleNamespace(cpus=8, memory_bytes=1 << 40))
    monkeypatch.setattr(preflight_steps, "examine", found.examine)
    for name in ("a", "b", "c"):
        write_profile(project, PROFILE, name)
    for name in ("gpu-a", "gpu-b", "gpu-c"):
        write_profile(project, GPU, name)
    yield found


def test_a_cluster_with_a_registry_needs_no_engine(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(context: StepContext) -> None:
        raise UnusableEngine("no Docker Engine answers")

    monkeypatch.setattr(StepContext, "engine", property(connect))
    refused = envbuild("make", "a", "b")
    assert refused.code == EngineError.code and children.commands == []
    configure("on: slurm\nslurm: {registry: registry.example/team/x}\n")
    assert envbuild("make", "a", "b").code == 0
    assert sorted(words[0] for words in children.commands) == ["build", "build", "make", "make"]


def failure(code: int, kind: str, message: str) -> Completed:
    error = {"code": code, "kind": kind, "message": message, "hint": "do this\ndo that", "faults": []}
    built: dict[str, Any] = {"image": f"sha256:{'1' * 64}", "tags": [], "selftest": None} if code == 4 else {}
    return Completed(code, json.dumps({"state": "failed", **built, "error": error}), "")


def test_each_is_built_then_proved_and_listed_in_a_table(children: Children) -> None:
    result = envbuild("make", "a", "b", "--locked", "--no-cache", "--builder", "farm", "--allow-unproved")
    assert result.code == 0, result.stderr
    assert [line.split()[:2] for line in result.stdout.splitlines()] == [
        ["PROFILE", "STATE"], ["a", "verified"], ["b", "verified"],
    ]  # fmt: skip
    assert children.options("a", "build") == ["--json", "--no-cache", "--locked", "--builder=farm"]
    assert children.options("b", "make") == ["--json", "--allow-unproved", "--locked", "--builder=farm"]
    assert result.stderr.count("lock ") == 2  # the second process' repetition is not shown
    lines = {f"{name}  {step:<13} {took:>10}  x" for name in "ab" for step, took in
             (("lock", "up to date"), ("build", "1.00 s"), ("make", "1.00 s"))}  # fmt: skip
    assert set(result.stderr.splitlines()) == lines


def test_events_of_both_processes_are_shown_as_those_of_one_profile_are(children: Children) -> None:
    failed = ended_probe("own.script", "failed", output="loss is nan", reason="a note\x1b[2J")
    children.events = Note("locked: a 1\x1b[2J"), ProbesPlanned(NAMES), ProbeEnded(failed), StepAborted()
    result = envbuild("make", "a", "b")
    assert "\x1b" not in result.stderr
    for name in "ab":
        own = [line[1:].strip() for line in result.stderr.splitlines() if line.startswith(name)]
        assert own.count("locked: a 1\N{REPLACEMENT CHARACTER}[2J") == 2, "a note of each process"
        assert next(line.split()[:2] for line in own if "own.script" in line) == ["failed", "own.script"]
        assert own.count("loss is nan") == 2 and f"interrupted during {NAMES[1]}" in own


def test_output_of_a_process_between_its_events_is_shown_whole(children: Children) -> None:
    """A traceback has several lines with the same beginning."""
    frame = '  File "/a/very/long/path/{}.py", line {}, in work'
    children.stderr = (
        "Traceback (most recent call last):",
        frame.format("a", 1),
        frame.format("b", 2),
        "    x()",
        "    x()",
    )
    result = envbuild("make", "a", "b")
    frames = [line for line in result.stderr.splitlines() if "File " in line or "x()" in line]
    assert len(frames) == 4 * 4, result.stderr  # of two profiles with two processes each


def test_only_who_signs_gets_the_passphrase(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []

    def prompt() -> dict[str, str]:
        prompts.append("passphrase")
        return {"TYPED": "a secret"}

    monkeypatch.setattr("envbuild.attest.keys_and_signatures.for_children", prompt)
    assert envbuild("make", "a", "b").code == 0
    assert children.environments == {"build": CONCURRENT, "make": CONCURRENT}
    assert not prompts, "nothing is tested, so nothing is signed"
    children.provability["a"] = ("possible", ())
    assert envbuild("make", "a", "b").code == 0
    assert children.environments == {"build": CONCURRENT, "make": {"TYPED": "a secret", **CONCURRENT}}
    assert len(prompts) == 1


def test_all_takes_every_profile_of_the_folder_and_json_has_each(children: Children) -> None:
    result = envbuild("make", "--all", "--json")
    names = ["a", "b", "c", "gpu-a", "gpu-b", "gpu-c"]
    assert [(row["profile"], "error" in row) for row in result.document["profiles"]] == [
        (name, False) for name in names
    ]
    assert [step["name"] for step in result.document["profiles"][0]["steps"]] == ["lock", "build", "make"]
    assert [step["cached"] for step in result.document["profiles"][0]["steps"]] == [False, False, True]
    assert [row["notes"] for row in result.document["profiles"]] == [["another image"]] * 6


def test_one_that_fails_stops_no_other(children: Children, project: Path) -> None:
    write_profile(project, {"torhc": 1}, "wrong")
    children.answers[("a", "build")] = failure(7, "network", "no index")
    children.answers[("b", "make")] = failure(5, "check", "the self-test of b failed: \x1b[2Jgemm")
    result = envbuild("make", "a", "wrong", "b", "c", "--json")
    found = {
        row["profile"]: (row["state"], row.get("error", {"code": 0})["code"]) for row in result.document["profiles"]
    }
    assert found == {"a": ("failed", 7), "wrong": ("failed", 3), "b": ("failed", 5), "c": ("verified", 0)}
    assert (result.code, result.document["error"]["code"]) == (5, 5)
    assert [words[0] for words in children.commands if words[-1] == "a"] == ["build"]
    plain = envbuild("make", "a", "wrong", "b", "c")
    assert (plain.code, len(plain.stdout.splitlines())) == (5, 5)
    assert "3 of 4 profiles failed: wrong, a, b" in plain.stderr
    assert "torhc: unknown key" in plain.stderr and "do this" in plain.stderr
    why = {row.split()[0]: row for row in plain.stdout.splitlines()}
    assert "no index; do this" in why["a"] and "3 more: envbuild show wrong" in why["wrong"]
    assert "do that" not in plain.stdout
    assert "\x1b" not in plain.stdout + plain.stderr


def test_the_last_step_of_a_silently_dead_process_is_named(children: Children) -> None:
    children.events = (Note("fetching"), StepBegan("audit"))
    children.answers[("a", "build")] = Completed(-9, "", "")
    found = {row["profile"]: row for row in envbuild("make", "a", "b", "--json").document["profiles"]}
    assert found["a"]["error"]["hint"] == "the last step that began: audit"


@pytest.mark.parametrize(
    ("done", "words"),
    [
        (Completed(-9, "", "x\nKilled by something\n"), "signal 9"),
        (Completed(1, "Traceback", ""), "exit code 1"),
        (Completed(0, "[]", ""), "exit code 0"),
        (Completed(6, '{"state": "built"}', ""), "exit code 6"),
    ],
)
def test_a_process_that_says_nothing_is_not_believed(children: Children, done: Completed, words: str) -> None:
    children.answers[("a", "build")] = done
    result = envbuild("make", "a", "b", "--json")
    found = {row["profile"]: row for row in result.document["profiles"]}
    assert (result.code, found["a"]["error"]["code"], "error" in found["b"]) == (6, 6, False)
    assert words in found["a"]["error"]["message"]


def test_profiles_that_are_only_unproved_end_with_4(children: Children) -> None:
    children.answers[("gpu-a", "make")] = failure(4, "not-proved", "no card")
    result = envbuild("make", "gpu-a", "a")
    assert (result.code, "1 of 2 profiles built, but not proved: gpu-a" in result.stderr) == (4, True)


@pytest.mark.parametrize(
    ("names", "cpus", "memory", "most"),
    [
        (("a", "b", "c"), 8, 1 << 40, 3),
        (("a", "b", "c"), 4, 1 << 40, 3),
        (("a", "b", "c"), 2, 1 << 40, 1),
        (("a", "b", "c"), 1, 1 << 40, 1),
        (("a", "b", "c"), 8, 1 << 30, 1),
        (("a", "b", "c"), 4, 25276076032, 3),  # the memory that a machine with 24 GiB reports
        (("a", "b", "c"), 4, 20 << 30, 2),
        (("gpu-a", "gpu-b", "gpu-c"), 8, 1 << 40, 1),
    ],
)
def test_self_tests_take_turns(
    children: Children, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], cpus: int, memory: int, most: int
) -> None:
    monkeypatch.setattr(StepContext, "engine", SimpleNamespace(cpus=cpus, memory_bytes=memory))
    assert envbuild("make", *names).code == 0
    assert children.most <= most
    if most == 1:
        assert children.most == 1


def test_gpus_that_are_named_are_handed_out_and_only_to_who_needs_one(children: Children, project: Path) -> None:
    write_profile(project, {**GPU, "gpu_count": 2}, "gpu-two")
    assert envbuild("make", "gpu-a", "gpu-b", "gpu-two", "a", "--gpus", "3,5").code == 0
    taken = [children.options(name, "make")[-1] for name in ("gpu-a", "gpu-b")]
    assert set(taken) <= {"--gpus=3", "--gpus=5"}
    assert children.options("gpu-two", "make")[-1] in ("--gpus=3,5", "--gpus=5,3")
    assert children.options("a", "make") == ["--json"]
    assert envbuild("make", "a", "b", "--gpus", "0").code == 2


def test_too_few_gpus_are_reported_before_anything_is_built(children: Children, project: Path) -> None:
    write_profile(project, {**GPU, "gpu_count": 2}, "gpu-two")
    result = envbuild("make", "gpu-a", "gpu-two", "--gpus", "0")
    assert result.code == 4 and {words[-1] for words in children.commands} == {"gpu-a"}
    assert "gpu-two cannot be proved here: the profile uses 2 GPUs together, and --gpus names 1" in result.stdout
    assert "1 of 2 profiles failed: gpu-two" in result.stderr
    assert envbuild("make", "gpu-a", "gpu-two", "--gpus", "0", "--allow-unproved").code == 0
    assert children.options("gpu-two", "make")[-1] == "--gpus=0"


NO_GPU: tuple[Provability, tuple[Reason, ...]] = ("impossible", (Reason("no-gpu", "the engine has no GPU"),))


def test_a_profile_that_cannot_be_proved_here_is_not_built_unless_allowed(children: Children) -> None:
    children.provability["gpu-a"] = NO_GPU
    result = envbuild("make", "gpu-a", "a")
    assert (result.code, {words[-1] for words in children.commands}) == (4, {"a"})
    assert "gpu-a cannot be proved here: the engine has no GPU" in result.stdout
    assert "1 of 2 profiles failed: gpu-a" in result.stderr
    assert "proof: not possible here: the engine has no GPU" in result.stderr
    assert envbuild("make", "gpu-a", "a", "--allow-unproved").code == 0
    assert {words[-1] for words in children.commands} == {"gpu-a", "a"}


def test_the_line_is_chosen_for_each_profile(children: Children, project: Path) -> None:
    write_profile(project, GPU, "gpu-a-cu12")
    assert envbuild("make", "gpu-a", "a", "--line", "cu12").code == 2  # a has no lines
    assert {words[-1] for words in children.commands} == {"gpu-a-cu12"}
    children.commands.clear()
    assert envbuild("make", "--all").code == 0
    assert {"gpu-a", "gpu-a-cu12"} <= {words[-1] for words in children.commands}
    assert envbuild("make", "--all", "--line", "cu12").code == 2


def test_the_hint_for_a_profile_given_by_path_names_the_path(children: Children, project: Path) -> None:
    (project / "my dir").mkdir()
    (project / "my dir" / "odd.yaml").write_text("torhc: 1\npyton: 2\n", encoding="utf-8")
    assert "more: envbuild show 'my dir/odd.yaml'" in envbuild("make", "a", "my dir/odd.yaml").stdout


def test_a_profile_that_is_named_twice_is_made_once(children: Children) -> None:
    assert envbuild("make", "a", "profiles/a.yaml").code == 0
    assert [words[0] for words in children.commands] == ["build", "make"]


@pytest.mark.parametrize("arguments", [[], ["--all", "a"], ["a", "b", "--pin", "cublas=1"], ["a", "b", "--write"]])
def test_invalid_combinations_of_arguments_are_refused(children: Children, arguments: list[str]) -> None:
    assert (envbuild("make", *arguments).code, children.commands) == (2, [])


def test_an_interruption_ends_all_and_starts_nothing_more(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    class Stop:
        def __call__(self) -> None:
            stopped.append(True)

        def check(self) -> None:
            if stopped:
                raise Interrupted("interrupted")

    monkeypatch.setattr(multi_profile_make, "_batch_run", lambda *_: SimpleNamespace(make=interrupted, stop=Stop()))
    assert (envbuild("make", "a", "b").code, stopped) == (130, [True])


def test_names_and_profiles_that_are_none_are_rows_and_the_others_are_made(children: Children, project: Path) -> None:
    write_profile(project, {"torhc": 1}, "wrong")
    names = ("a", "gpu-aa", "wrong", "b", "nothing-like-it", "nothing-like-it", "./none.yaml")
    result = envbuild("make", *names)
    assert result.code == 3
    rows = {line.split()[0]: line for line in result.stdout.splitlines()[1:]}
    assert {name: row.split()[1] for name, row in rows.items()} == {
        "a": "verified", "b": "verified", "gpu-aa": "failed", "wrong": "failed", "nothing-like-it": "failed",
        "./none.yaml": "failed",
    }  # fmt: skip
    assert (
        "unknown profile 'gpu-aa'" in rows["gpu-aa"] and "did you mean gpu-a or gpu-c or gpu-b or cpu?" in result.stderr
    )
    document = envbuild("make", *names, "--json").document
    assert [row["error"]["code"] if "error" in row else 0 for row in document["profiles"]] == [3, 3, 3, 3, 0, 0]
    assert document["error"]["code"] == 3


def test_where_none_is_a_profile_all_are_rows(children: Children) -> None:
    result = envbuild("make", "none", "neither", "--gpus", "0", "--json")
    assert (result.code, children.commands, result.document["error"]["kind"]) == (3, [], "profiles")
    assert [(row["profile"], row["state"]) for row in result.document["profiles"]] == [
        ("none", "failed"), ("neither", "failed"),
    ]  # fmt: skip


def test_a_built_image_is_not_reported_as_not_made(children: Children) -> None:
    children.answers[("gpu-a", "make")] = failure(4, "not-proved", "no card")
    children.answers[("b", "build")] = failure(6, "build", "no space")
    result = envbuild("make", "a", "gpu-a", "b")
    assert result.code == 6 and "1 of 3 profiles failed: b; 1 built, but not proved: gpu-a" in result.stderr


@pytest.mark.parametrize("concurrent", [True, False])
def test_a_waiting_profile_names_who_it_may_wait_for(monkeypatch: pytest.MonkeyPatch, concurrent: bool) -> None:
    if concurrent:
        monkeypatch.setenv(process_locks.PARALLEL, "1")
    notes: list[str] = []
    with ThreadPoolExecutor(1) as threads:
        with process_locks.exclusive("_x", "compiles an extension", notes.append):
            waiting = threads.submit(_turn, notes)
            while not notes:
                threading.Event().wait(0.01)
        waiting.result(20)
    who = "another profile of this make, or another envbuild," if concurrent else "another envbuild"
    assert notes == [f"{who} compiles an extension; waiting for it"]


def _turn(notes: list[str]) -> None:
    with process_locks.exclusive("_x", "compiles an extension", notes.append):
        pass
