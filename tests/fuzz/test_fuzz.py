"""A part of the campaign with the same inputs every time, and a test that the campaign finds planted faults."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import seed
from hypothesis import strategies as st
from unit.runners.scripts import CPU, ID, JOB

from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.runners.kubernetes import job_manifest, kubernetes_settings
from envbuild.runners.slurm import batch_script, slurm_settings
from envbuild.util.errors import UsageError
from fuzz import clusters, plans, renderers, runner, target
from fuzz.renderers import RENDERERS
from fuzz.runner import around, campaign
from fuzz.strategies import as_yaml
from fuzz.target import Hang, Target, sandbox, tried
from fuzz.targets import TARGETS

SLICE = 5_000  # inputs in total, or somewhat more: each target gets at least LEAST
LEAST = 75


@pytest.fixture(autouse=True)
def folder() -> Iterator[None]:
    with sandbox():
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
def test_no_input_is_a_traceback_or_a_hang(name: str) -> None:
    """Hypothesis shrinks an input that causes a traceback or a hang, and prints the input."""
    one = TARGETS[name]
    shares = sum(other.share for other in TARGETS.values())

    def each(value: Any) -> None:
        tried(one, value)

    around(one, max(LEAST, SLICE * one.share // shares), derandomize=True)(each)()


def test_the_shares_are_parts_of_the_whole() -> None:
    assert all(one.share > 0 for one in TARGETS.values())
    assert len(TARGETS) >= 20


# the campaign itself


def raising(error: BaseException) -> Callable[[Any], None]:
    def run(value: Any) -> None:
        raise error

    return run


def sleeping(value: Any) -> None:
    time.sleep(60)


def hoarding(value: Any) -> None:
    bytearray(target.MEMORY + (64 << 20))


def shouting(value: Any) -> None:
    raise UsageError("")


FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {
    "a traceback": (raising(KeyError("x")), "KeyError"),
    "a recursion": (raising(RecursionError("x")), "RecursionError"),
    "an exit": (raising(SystemExit(3)), "SystemExit"),
    "a hang": (sleeping, "Hang"),
    "memory": (hoarding, "MemoryError"),
    "an error without a word": (shouting, "AssertionError"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_kept_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "DEADLINE", 0.05)
    run, kind = FAULTS[name]
    found = campaign(Target("x", st.integers(0, 50), run, 1), 3, 1)
    ((message, _),) = found.faults
    assert (message, found.tried, found.accepted) == (kind, 3, 0)
    assert [fault.times for fault in found.faults.values()] == [3]


def test_an_interruption_ends_the_campaign() -> None:
    with pytest.raises(KeyboardInterrupt):
        campaign(Target("x", st.none(), raising(KeyboardInterrupt()), 1), 1, 1)


def test_no_two_seeds_of_the_campaign_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []

    def seeded(number: int) -> Callable[[Any], Any]:
        batches.append(number)
        return seed(number)

    monkeypatch.setattr(runner, "seed", seeded)
    for start in (1, 2):
        campaign(Target("x", st.none(), lambda value: None, 1), 1000, start)  # one input a batch: no others exist
    assert len(batches) == len(set(batches)) == 100


def test_an_error_of_ours_is_an_answer() -> None:
    assert tried(Target("x", st.none(), lambda value: None, 1), None)
    assert not tried(Target("x", st.none(), raising(UsageError("no")), 1), None)


def test_a_hang_is_not_swallowed_on_the_way() -> None:
    assert not issubclass(Hang, Exception)


@pytest.fixture
def sample() -> Lock:
    data = next(seed for seed in plans.lock_seeds() if seed["content"]["apt"] and len(seed["content"]["wheels"]) > 1)
    return lock_file.parse(as_yaml(data).decode(), "a lock")


SMUGGLED: dict[str, tuple[str, Callable[[str], str]]] = {
    "an instruction": ("Dockerfile", lambda text: text.replace("\nLABEL", "\nRUN evil\nLABEL")),
    "a variable": ("Dockerfile", lambda text: text.replace("\nLABEL", '\nENV LD_PRELOAD="/x"\nLABEL')),
    "a directive": ("Dockerfile", lambda text: f"# syntax=evil\n{text}"),
    "a command": ("Dockerfile", lambda text: text.replace("-m venv --without-pip", "-m evil", 1)),
    "another command": ("Dockerfile", lambda text: text.replace("rm -rf /tmp/tools", "evil; rm -rf /tmp/tools")),
    "another mount": ("Dockerfile", lambda text: text.replace("target=/etc/pip.conf", "target=/opt/venv/pip.conf")),
    "another hash": ("Dockerfile", lambda text: text.replace("--hash=sha256:", "--hash=sha256:0", 1)),
    "a package": ("Dockerfile", lambda text: text.replace("\nPACKAGES\n", "\nevil=1\nPACKAGES\n")),
    "an entry point": ("Dockerfile", lambda text: text.replace("CMD [", 'ENTRYPOINT ["evil"]\nCMD [')),
    "a shell": ("Dockerfile for extensions", lambda text: text.replace("RUN -", "RUN sh -c id\nRUN -", 1)),
    "the network": ("Dockerfile for extensions", lambda text: text.replace("network=none", "network=default", 1)),
    "a mount": ("Dockerfile for extensions", lambda text: text.replace("source=bin,", "source=/,", 1)),
    "an argument": (
        "Dockerfile for extensions",
        lambda text: text.replace('"debs", \\', '"debs", \\\n     "x", \\', 1),
    ),
    "a wheel's hash": ("Dockerfile for extensions", lambda text: text.replace("hash=sha256:", "hash=sha256:0", 1)),
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_the_oracle_sees_what_is_smuggled_into_a_dockerfile(sample: Lock, name: str) -> None:
    kind, smuggle = SMUGGLED[name]
    (renderer,) = (one for one in RENDERERS if one.name == kind)
    text = renderer.render(sample)
    renderer.judge(text, sample)
    spoiled = smuggle(text)
    assert spoiled != text
    with pytest.raises(AssertionError):
        renderer.judge(spoiled, sample)


@pytest.mark.parametrize("line", ["evil", "--index-url https://evil.example", "numpy==1.0 ; evil", "-r evil.txt"])
def test_the_oracle_sees_what_is_smuggled_into_a_requirement_file(sample: Lock, line: str) -> None:
    for renderer in RENDERERS[1:3]:
        text = renderer.render(sample)
        renderer.judge(text, sample)
        with pytest.raises(AssertionError):
            renderer.judge(f"{text}{line}\n", sample)


SCRIPTS: dict[str, Callable[[str], str]] = {
    "an option": lambda text: text.replace("\nset -u", "\n#SBATCH --uid=0\nset -u", 1),
    "an option later": lambda text: f"{text}\n#SBATCH --uid=0",
    "a command": lambda text: text.replace("\nset -u", "\nset -u\nevil", 1),
    "a command of a word": lambda text: text.replace("--read-only", "--read-only; evil", 1),
    "the network": lambda text: text.replace("--network none", "--network host", 1),
    "a capability": lambda text: text.replace("--cap-drop ALL", "--cap-drop NONE", 1),
    "a mount": lambda text: text.replace("--interactive", "--interactive --volume /:/host", 1),
    "another image": lambda text: text.replace("1" * 64, "2" * 64),
    "another partition": lambda text: text.replace('partition="gpu"', 'partition="all"'),
}
MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "privileges": lambda spec: spec["containers"][0]["securityContext"].update(privileged=True),
    "the host's network": lambda spec: spec.update(hostNetwork=True),
    "another container": lambda spec: spec["containers"].append({"name": "evil", "image": "evil"}),
    "a mount": lambda spec: spec["volumes"].append({"name": "host", "hostPath": {"path": "/"}}),
    "another image": lambda spec: spec["containers"][0].update(image="evil"),
    "a command": lambda spec: spec["containers"][0]["command"].insert(5, "evil"),
    "an expansion": lambda spec: spec["containers"][0]["command"].__setitem__(6, "$(HOSTNAME)"),
    "a token": lambda spec: spec.update(automountServiceAccountToken=True),
    "a toleration": lambda spec: spec["tolerations"].append({"operator": "Exists"}),
    "another node": lambda spec: spec["nodeSelector"].update({"other": "node"}),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_oracle_sees_what_is_smuggled_into_a_batch_script(name: str) -> None:
    job, site, folder = CPU, slurm_settings.SlurmSite(partition="gpu"), "/shared/envbuild"
    text = batch_script.render(job, site, PurePosixPath(folder), clusters.NAME, (ID,))
    clusters.judge_script(text, job, site, folder, clusters.NAME, ID)
    spoiled = SCRIPTS[name](text)
    assert spoiled != text
    with pytest.raises((AssertionError, ValueError)):
        clusters.judge_script(spoiled, job, site, folder, clusters.NAME, ID)


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_oracle_sees_what_is_smuggled_into_a_job(name: str) -> None:
    job, site = JOB, kubernetes_settings.KubernetesSite(registry="r", nodes={"pool": "gpu"})
    made = job_manifest.render(job, site, clusters.NAME, clusters.IMAGE)
    clusters.judge_job(made, job, site, clusters.NAME, clusters.IMAGE)
    MANIFESTS[name](made[1]["spec"]["template"]["spec"])
    with pytest.raises((AssertionError, KeyError)):
        clusters.judge_job(made, job, site, clusters.NAME, clusters.IMAGE)


def test_every_lock_of_the_campaign_is_judged_by_every_renderer(sample: Lock) -> None:
    def forget(text: str, found: Lock) -> None:
        raise AssertionError("asked")

    added = dataclasses.replace(RENDERERS[-1], judge=forget)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError, match="asked"):
        patch.setattr(renderers, "RENDERERS", (*RENDERERS, added))
        plans.TARGETS[1].run(as_yaml(plans.lock_seeds()[0]))
