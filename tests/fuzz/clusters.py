"""Targets: the batch scripts and Kubernetes objects that are rendered from a site's settings, an image's name and a
command. Anybody may choose the name and the command.

Each script or object is rendered twice: with the chosen words and with harmless ones. As bash, sbatch and a YAML parser
read the two results, they may differ only in these words.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import yaml
from hypothesis import strategies as st
from unit.runners.scripts import CPU, ID, JOB

from envbuild.facts import database
from envbuild.runners.kubernetes import job_manifest, kubernetes_settings
from envbuild.runners.slurm import batch_script, slurm_settings
from envbuild.testrun.selftest_job import Job
from fuzz.strategies import TEXTS, trees
from fuzz.target import Target

NAME = "envbuild-sample-1"
# Placeholders for chosen texts: our own texts do not contain them, and no shell interprets them.
FOLDER, PROGRAM, WORD = "/standin/folder", "/standin/program", "standin-word"
DIGEST = f"sha256:{'5' * 64}"
IMAGE = f"standin.example/a/b@{DIGEST}"
# The settings that change which parts a script has; the harmless script gets them too.
_KINDS = ("container", "registry", "requeue")
_OPTION = re.compile(r'#SBATCH --([a-z-]+)(?:="([^"#\\$`\n]*)")?')

SLURM: list[Any] = [
    {"partition": "gpu", "account": "team", "constraint": "h20&nvlink", "time": "1:30:00", "grace": 5},
    {"container": "podman", "program": "/opt/bin/podman", "registry": "registry.example/x", "requeue": "yes"},
    {"container": "apptainer", "registry": "r", "gres": {"h20": "gpu:nvidia_h20"}, "folder": "/shared/envbuild"},
    {"container": "pyxis", "registry": "r", "time": 30},
    {"qos": "high", "reservation": "proofs", "cpus_per_task": 8, "mem": "64G", "queue": 30},
]
KUBERNETES: list[Any] = [
    {"namespace": "proofs", "registry": "registry.example/x", "runtime_class": "nvidia", "priority_class": "low",
     "pull_secrets": ["one", "two"], "tolerations": ["team=x:NoSchedule", "spot"], "queue": 30,
     "nodes": {"pool": "gpu", "zone.example/a": "b"}, "products": {"h20": ["NVIDIA-H20", "NVIDIA-H20-SHARED"]}},
    {"labels": {"kueue.x-k8s.io/queue-name": "team"}, "annotations": {"team.example/why": 'a "b": #1'}, "cpu": 8},
    {"context": "admin@cluster", "queue": "60", "products": {"h20": "NVIDIA-H20"}},
]  # fmt: skip


def _jobs(settings: list[Any]) -> st.SearchStrategy[dict[str, Any]]:
    words = [text for text in TEXTS if "\n" not in text and "\r" not in text]  # the words of a job have no line break
    good = st.sampled_from((ID, f"registry.example:5000/team/h20@{ID}", f"[::1]:5000/a@{ID}"))
    image = st.one_of(
        good,
        good,
        good,
        st.sampled_from(TEXTS).map(lambda text: f"{text}@{ID}"),
        st.sampled_from(TEXTS).map(lambda text: f"r/{text}/x@{ID}{text}"),
    )
    paths = st.sampled_from(TEXTS).map(lambda text: f"/shared/{text}")
    return st.fixed_dictionaries(
        {
            "settings": st.one_of(trees(settings), st.sampled_from(settings)),
            "image": image,
            "gpu": st.booleans(),
            "words": st.lists(st.sampled_from(words), min_size=1, max_size=3),
            "folder": st.one_of(*(st.just("/shared/envbuild"),) * 3, paths),
            "name": st.one_of(*(st.just(NAME),) * 3, st.sampled_from(TEXTS)),
        }
    )


def _job(drawn: Mapping[str, Any], words: list[str]) -> Job:
    return dataclasses.replace(JOB if drawn["gpu"] else CPU, argv=("python", "-I", *words))


def _settings(found: Any) -> Mapping[str, Any]:
    """Other types never reach a parser, because settings.py refuses them."""
    return found if isinstance(found, dict) and all(isinstance(key, str) for key in found) else {}


def _sbatch(drawn: dict[str, Any]) -> None:
    site = slurm_settings.parse(_settings(drawn["settings"]), {}, database.gpus().__contains__)
    job, folder = _job(drawn, drawn["words"]), PurePosixPath(drawn["folder"])
    text = batch_script.render(job, site, folder, drawn["name"], (drawn["image"],))
    judge_script(text, job, site, str(folder), drawn["name"], drawn["image"])


def judge_script(text: str, job: Job, site: slurm_settings.SlurmSite, folder: str, name: str, image: str) -> None:
    """Raises AssertionError unless the options are the requested ones, and the commands equal those of a harmless
    script in which its words are replaced by the requested ones."""
    plain = slurm_settings.SlurmSite(
        **{kind: getattr(site, kind) for kind in _KINDS}, program=PROGRAM if site.program else None, time="1"
    )
    words = [f"{WORD}-{number}" for number in range(len(job.argv) - 2)]
    standing = dataclasses.replace(job, argv=(*job.argv[:2], *words))
    skeleton = batch_script.render(standing, plain, PurePosixPath(FOLDER), NAME, (IMAGE,))
    lines, expected = text.split("\n"), skeleton.split("\n")
    options = dict(_options(lines))
    arguments = {"partition": site.partition, "account": site.account, "constraint": site.constraint, "time": site.time,
             "qos": site.qos, "reservation": site.reservation, "cpus-per-task": site.cpus_per_task}  # fmt: skip
    for key, value in arguments.items():
        assert key == "time" or options.get(key) == value, key
    assert site.mem is None or options["mem"] == site.mem
    assert options["job-name"] == name and options["output"] == f"{folder}/slurm.log"
    gres = f"{site.gres.get(job.models[0], f'gpu:{job.models[0]}')}:{job.count}" if job.gpus else None
    assert options.get("gres") == gres and ("requeue" in options) is site.requeue
    known = {"job-name", "output", "open-mode", "nodes", "ntasks", "mem", "time", "export", *arguments, "gres"}
    assert set(options) <= known | {"requeue", "no-requeue"}
    code, wanted = ([line for line in found if not line.startswith("#")] for found in (lines, expected))
    assert len(code) == len(wanted), "a line more or less"
    host, _, path = IMAGE.partition("/")
    real_host, _, real_path = image.partition("/")
    meant = {FOLDER: folder, PROGRAM: str(site.program), IMAGE: image, f"{host}#{path}": f"{real_host}#{real_path}"}
    meant |= dict(zip(words, job.argv[2:], strict=True))
    for line, plain_line in zip(code, wanted, strict=True):
        if line != plain_line:
            assert _words(line) == [_meant(word, meant) for word in _words(plain_line)], line


def _options(lines: list[str]) -> Iterator[tuple[str, str | None]]:
    """sbatch reads #SBATCH lines up to the first command; there must be no such line after that command."""
    assert lines[0] == "#!/bin/bash"
    begun = False
    for line in lines[1:]:
        begun = begun or not line.startswith("#")
        if line.startswith("#SBATCH"):
            match = _OPTION.fullmatch(line)
            assert match and not begun, f"no option of ours: {line!r}"
            yield match[1], match[2]


def _words(line: str) -> list[str]:
    return shlex.split(line.removesuffix("\\"))


def _meant(word: str, meant: Mapping[str, str]) -> str:
    """Replace the stand-ins, the longest first, because a stand-in may be a prefix of another stand-in."""
    pattern = "|".join(map(re.escape, sorted(meant, key=len, reverse=True)))
    return re.sub(pattern, lambda match: meant[match[0]], word)


def _manifest(drawn: dict[str, Any]) -> None:
    site = kubernetes_settings.parse(_settings(drawn["settings"]), {}, database.gpus().__contains__)
    job = _job(drawn, drawn["words"])
    made = job_manifest.render(job, site, drawn["name"], drawn["image"])
    judge_job(made, job, site, drawn["name"], drawn["image"])


def judge_job(
    made: tuple[dict[str, Any], dict[str, Any]],
    job: Job,
    site: kubernetes_settings.KubernetesSite,
    name: str,
    image: str,
) -> None:
    """Raises AssertionError unless the objects equal those of a harmless job except for the requested words, each in
    its own place, and unless the objects are the same after they are written as YAML and read again."""
    assert list(yaml.safe_load_all(yaml.safe_dump_all(made, sort_keys=False))) == list(made)
    made = copy.deepcopy(made[0]), copy.deepcopy(made[1])  # copied separately, because they share parts
    standing = dataclasses.replace(job, argv=(*job.argv[:2], *(WORD for _ in job.argv[2:])))
    harmless = kubernetes_settings.KubernetesSite(registry=site.registry and "r", queue=site.queue)
    first, second = job_manifest.render(standing, harmless, NAME, IMAGE)
    plain = copy.deepcopy(first), copy.deepcopy(second)
    spec, bare = (found[1]["spec"]["template"]["spec"] for found in (made, plain))
    command = spec["containers"][0].pop("command")
    before = bare["containers"][0].pop("command")
    # a kubelet replaces $$ by $, and expands $(NAME)
    assert re.fullmatch(r"(?:[^$]|\$\$)*", "\0".join(command), re.DOTALL)
    read = [word.replace("$$", "$") for word in command]
    assert read[:7] == [word.replace("$$", "$") for word in before[:7]] and read[-1] == before[-1]
    assert read[5:-1] == list(job.argv)
    own = {
        "runtimeClassName": site.runtime_class,
        "priorityClassName": site.priority_class,
        "imagePullSecrets": [{"name": one} for one in site.pull_secrets],
    }
    for key, value in own.items():
        assert spec.pop(key, None) == (value or None), key
    limits = spec["containers"][0]["resources"]["limits"]
    assert limits.pop("cpu", None) == (str(site.cpu) if site.cpu else None)
    for meta in (made[1]["metadata"], made[1]["spec"]["template"]["metadata"]):
        assert meta.pop("annotations", {}) == site.annotations
        assert {key: meta["labels"].pop(key) for key in site.labels} == site.labels
    placed = {key: spec.pop(key, None) for key in ("nodeSelector", "affinity", "tolerations")}
    _placed(placed, job, site)
    for key in placed:
        bare.pop(key, None)
    assert spec["containers"][0].pop("image") == image and bare["containers"][0].pop("image") == IMAGE
    assert spec["volumes"][0]["configMap"].pop("name") == name and bare["volumes"][0]["configMap"].pop("name") == NAME
    for one, other in zip(made, plain, strict=True):
        assert one["metadata"].pop("name") == name and other["metadata"].pop("name") == NAME
    assert made == plain


def _placed(placed: Mapping[str, Any], job: Job, site: kubernetes_settings.KubernetesSite) -> None:
    """Return the node selection: the labels and tolerations of the site, and those of the GPU."""
    names = list(site.products.get("h20", ())) or [one.replace(" ", "-") for one in database.gpus()["h20"].all_names]
    one = {job_manifest.PRODUCT: names[0]} if job.gpus and len(names) == 1 else {}
    assert (placed["nodeSelector"] or {}) == {**site.nodes, **one}
    listed = [node["matchExpressions"][0] for node in (placed["affinity"] or {}).get("nodeAffinity", {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", ())]  # fmt: skip
    several = [{"key": job_manifest.PRODUCT, "operator": "In", "values": names}] if job.gpus and not one else []
    assert listed == several
    effects = {str(one.get("effect")) for one in placed["tolerations"] or ()}
    assert effects <= {"NoSchedule", "NoExecute", "None"}
    assert len(placed["tolerations"] or ()) == len(site.tolerations) + job.gpus


TARGETS = (
    Target("batch script", _jobs(SLURM), _sbatch, 9),
    Target("Job", _jobs(KUBERNETES), _manifest, 9),
)
