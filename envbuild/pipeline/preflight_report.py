"""Describes what `make` would do with a profile on this machine, before anything is downloaded. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from envbuild.facts import database
from envbuild.util.errors import some
from envbuild.util.untrusted_input_errors import Reason

SELECTED = "selected-gpus"  # id of the reason: --gpus does not fit the profile or the machine
Provability = Literal["proved", "possible", "elsewhere", "impossible"]
"""proved: earlier evidence proves the image; possible: a self-test on this machine can prove it; elsewhere: a self-test
on a node of the cluster may prove it (the GPUs there are unknown here); impossible: this machine cannot prove it."""


@dataclass(frozen=True)
class ProofMachine:
    """The machine that would run the self-test. `runner`: local, slurm or kubernetes. `gpus`: the names of the whole
    GPUs that the self-test may use, empty if unknown. `selected`: how many GPUs --gpus names; 0: all may be used.
    `missing`: why the machine cannot run the self-test. `driver`: None if unknown, or ignored on purpose (`--locked`,
    CI)."""

    runner: str
    gpus: tuple[str, ...] = ()
    missing: Reason | None = None
    driver: str | None = None
    selected: int = 0


@dataclass(frozen=True)
class PlannedExtension:
    """Where the wheel of an extension will come from: the cache of this machine, the shared cache, or a compilation.
    `refused`: `--locked` will refuse the wheel of this machine. `fault`: why the shared cache cannot be used.
    `required_sha256`: the only wheel that `--locked` accepts, if the wheel is refused or must be compiled."""

    name: str
    source: Literal["cached", "fetched", "compiled", "refused"]
    bytes: int | None = None
    fault: str | None = None
    required_sha256: str | None = None


@dataclass(frozen=True)
class Preflight:
    """The document of `make --dry-run`. `line_reason`: why this CUDA line was chosen. `gpus`: the models that the
    profile is for; `gpu_count`: how many of them work together. `runner`: local, slurm or kubernetes. `registry`: the
    repository that gets the image, because no engine can be used; null if an engine gets it. `found_gpus`, `driver`:
    those of the machine that runs the self-test, as far as they are known. `lock_current`: whether the lock matches the
    profile; if not, the bytes are estimated from the outdated lock. `bytes_from`: the profile whose lock is the basis
    of the bytes, if this profile has no lock; null otherwise. `without_base_image`: whether the bytes lack those of a
    base image, whose manifest was not downloaded yet. `expected_from`: the profile whose earlier run on this
    machine is the basis of `expected_minutes`. `extensions`: where their wheels will come from; empty if the image is
    built already. `extension_cache`: the shared cache that the settings name, if the image is not built yet."""

    profile: str
    line_reason: str
    gpus: tuple[str, ...]
    gpu_count: int
    runner: str
    registry: str | None
    found_gpus: tuple[str, ...]
    driver: str | None
    needed_driver: str | None
    lock_current: bool
    fetch_bytes: int | None
    disk_bytes: int | None
    without_base_image: bool
    expected_minutes: float | None
    expected_from: str | None
    proof: Provability
    reasons: tuple[Reason, ...]
    extensions: tuple[PlannedExtension, ...] = ()
    extension_cache: str | None = None
    bytes_from: str | None = None

    @property
    def reasons_text(self) -> str:
        return "; ".join(reason.detail for reason in self.reasons)


def judge_proof(
    gpus: Sequence[str], count: int, machine: ProofMachine, refusal: str | None, proved: bool
) -> tuple[Provability, tuple[Reason, ...]]:
    """Judge whether a self-test on the machine can prove a profile for `gpus`, `count` of them together, and return the
    reasons too. `refusal`: why the profile does not work with the machine's driver; `proved`: whether earlier evidence
    proves the image."""
    if proved:
        return "proved", ()
    if machine.runner != "local":
        node = f", on a node that has {' or '.join(gpus)}" if gpus else ""
        return "elsewhere", (Reason("runner", f"on {machine.runner}{node}"),)
    if gpus and 0 < machine.selected < count:
        text = f"the profile uses {some(count, 'GPU')} together, and --gpus names {machine.selected}: name more"
        return "impossible", (Reason(SELECTED, text),)
    if machine.missing:
        return "impossible", (machine.missing,)
    reasons = [Reason("driver", refusal)] if refusal else []
    there = {gpu: _count(gpu, machine.gpus) for gpu in gpus} if machine.gpus else {}
    most = max(there.values(), default=0)
    if there and not most:
        text = f"this machine has {_listed(machine.gpus)}, and the profile is for {', '.join(gpus)}"
        reasons.append(Reason("gpu", text))
    elif there and most < count:
        text = f"the profile uses {some(count, 'GPU')} together, and this machine has {most}"
        reasons.append(Reason("gpu-count", text))
    if reasons:
        return "impossible", tuple(reasons)
    enough = [gpu for gpu in gpus if there.get(gpu, count) >= count]
    others = [gpu for gpu in gpus if gpu not in enough]
    only = f"only for {', '.join(enough)}; for {', '.join(others)}, use another machine"
    return "possible", (Reason("gpu", only),) if others else ()


def _count(gpu: str, names: Sequence[str]) -> int:
    """Count the GPUs in `names` that are of the same family as `gpu`: their evidence is valid for `gpu` too."""
    family = {one.id for one in database.family(database.gpus()[gpu])}
    models = (database.gpu_by_name(name) for name in names)
    return sum(model is not None and model.id in family for model in models)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"{number} x {name}" if number > 1 else name for name, number in Counter(names).items())


def preflight_lines(found: Preflight) -> Iterator[str]:
    """The preflight as lines of text."""
    if found.gpus:
        driver = f", driver {found.driver}" if found.driver else ""
        unseen = "not looked for" if found.proof == "proved" else "not seen"
        known = f"{_listed(found.found_gpus) or unseen}{driver}"
        yield f"GPU: {known}; the profile is for {', '.join(found.gpus)}"
        needed = f"; driver {found.needed_driver} or newer" if found.needed_driver else ""
        yield f"line: {found.profile}, {found.line_reason}{needed}"
    about = ", without the base image, whose size is not known yet" if found.without_base_image else ""
    outdated = "" if found.lock_current else ", estimated from an outdated lock"
    about += f", estimated from the lock of {found.bytes_from}" if found.bytes_from else outdated
    if found.fetch_bytes is None or found.disk_bytes is None:
        yield "to fetch and on disk: unknown, there is no lock yet"
    else:
        yield f"to fetch: {found.fetch_bytes / 1e9:.1f} GB; on disk: {found.disk_bytes / 1e9:.1f} GB{about}"
    for one in found.extensions:
        if one.source != "cached":
            yield f"extension: {_extension_text(one, found.extension_cache)}"
    for fault in dict.fromkeys(one.fault for one in found.extensions if one.fault):
        yield f"shared cache: {found.extension_cache} cannot be used: {fault}"
    if found.registry:
        here = f"it is uploaded to {found.registry}, and audited and tested on {found.runner}"
        yield f"image: no engine can be used, so {here}"
    if found.expected_minutes == 0:
        yield "time: nothing to do"
    elif found.expected_minutes is None:
        yield "time: unknown, no earlier run on this machine"
    else:
        yield f"time: about {_minutes(found.expected_minutes)}, from the last run of {found.expected_from}"
    yield f"proof: {_PROVABILITY[found.proof]}{': ' if found.reasons else ''}{found.reasons_text}"


def _extension_text(one: PlannedExtension, cache: str | None) -> str:
    if one.source == "fetched":
        return f"{one.name} will be fetched from the shared cache {cache}, {(one.bytes or 0) / 1e6:.0f} MB"
    lacks = f"; the shared cache {cache} does not have it" if cache and not one.fault else ""
    required = f"the recorded wheel {(one.required_sha256 or '')[:12]}"
    if one.source == "refused":
        return f"{one.name} will be refused: this machine's wheel differs, and --locked requires {required}{lacks}"
    only = f"; --locked accepts only {required}" if one.required_sha256 else ""
    return f"{one.name} will be compiled{lacks}{only}"


_PROVABILITY = {
    "proved": "verified already",
    "possible": "possible here",
    "elsewhere": "possible",
    "impossible": "not possible here",
}


def _minutes(minutes: float) -> str:
    return "a minute" if minutes < 1.5 else f"{minutes:.0f} minutes"
