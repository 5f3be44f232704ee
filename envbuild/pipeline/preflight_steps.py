"""The preflight of `make`: looks at the lock, the caches, the engine and the GPUs before anything is fetched."""

from __future__ import annotations

import os
from collections.abc import Callable, Set
from dataclasses import replace

from envbuild.doctor import nvml_reader
from envbuild.evidence import profile_proofs
from envbuild.image import dockerfile_renderer, extension_wheel_build, image_build
from envbuild.image.docker_engine import Engine
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import line_lookup, preflight, step_durations
from envbuild.pipeline.model import Options, StepResult
from envbuild.pipeline.preflight import Preflight, ProofMachine
from envbuild.pipeline.selftest_steps import is_proved
from envbuild.pipeline.step_context import StepContext
from envbuild.pipeline.step_durations import BUILD_STEPS, TEST_STEPS
from envbuild.profile.loaded_profile import Source
from envbuild.resolve import line_selection, minimum_driver
from envbuild.resolve.plan_resolver import Plan
from envbuild.runners import docker_runner
from envbuild.util import process_locks, settings
from envbuild.util.errors import EngineError, NotProved

Agree = Callable[[str], bool]
"""Asks the user whether to go on without a proof."""


def run_preflight(
    context: StepContext, source: Source, plan: Plan, options: Options, agree: Agree
) -> StepResult[Preflight]:
    """Look at the machine and show what `make` will do. Raises NotProved if no proof is possible here, unless the
    options allow that or the user agrees; EngineError if no engine responds: nothing can be built then; FileError or
    UsageError if evidence cannot be signed with the configured key. With `--locked`, a missing or stale lock is left
    to the next step, whose error names it."""
    found = examine(lambda: context.engine, source, plan, options)
    if options.locked and not found.lock_current:
        return StepResult(found, note="the lock is missing or out of date")
    _, fault = _connected(lambda: context.engine)
    if fault:
        raise fault
    lines = list(preflight.preflight_lines(found))
    if found.proof != "proved" and process_locks.PARALLEL not in os.environ:  # there, the parent has shown them
        for line in lines:
            context.progress.say(line)
    if found.proof == "impossible" and not options.unproved and not agree(_question(found)):
        raise not_provable(source, found)
    if found.proof in ("possible", "elsewhere"):
        _ = context.signer  # raises now what it would raise after the build
    return StepResult(found, cached=found.proof == "proved", note=lines[-1])


def _question(found: Preflight) -> str:
    return f"{found.profile} cannot be proved here ({'; '.join(found.reasons)}). Build it without a proof?"


def not_provable(source: Source, found: Preflight) -> NotProved:
    """The error for a profile that cannot be proved here, before anything is fetched."""
    error = NotProved(
        f"{source.name} cannot be proved here: {'; '.join(found.reasons)}",
        hint="\n".join([*_other_line(source, found), _ANYWAY.format(source.known)]),
    )
    error.partial = {"profile": source.name}
    return error


_ANYWAY = "run it on a machine with the GPU, or build without a proof: --allow-unproved, or envbuild build {}"


def _other_line(source: Source, found: Preflight) -> list[str]:
    """The line that supports the driver, or the drivers needed, if the driver is a reason."""
    lines = line_lookup.related_lines(source)
    own = next((one for one in lines if one.profile == source.name), None)
    if own is None or found.driver is None or own.refusal(found.driver) is None:
        return []
    return [line_selection.other_line(lines, own, found.driver)]


def examine(engine: Callable[[], Engine], source: Source, plan: Plan, options: Options) -> Preflight:
    """The preflight of a profile. `engine`: connects to the engine. Without one the image counts as missing, and no
    proof is possible."""
    profile, lock = source.profile, lock_file.read(source.known_lock)
    current = lock is not None and not lock.stale(plan)
    connected, fault = _connected(engine)
    proved = built = False
    if connected and lock and current and not options.no_cache:
        image = image_build.existing_image(connected, lock, dockerfile_renderer.render(lock, source.name))
        built = image is not None
        if image:
            proved = is_proved(profile_proofs.proofs_of(image.id, source.name, profile, lock))
    machine = ProofMachine("local", missing=fault.message if fault else None)
    if not proved and profile.gpus:
        machine = _machine(connected, fault, options)
    line = line_lookup.as_line(source.name, line_selection.CURRENT, profile)
    refused = line.refusal(machine.driver) if machine.driver else None
    selected = options.request.gpus
    proof, reasons = preflight.judge_proof(profile.gpus, profile.gpu_count, machine, refused, proved, selected)
    compiling = bool(lock and current and _compiles(lock))
    fetch = 0 if built else image_build.fetched_bytes(lock, compiling) if lock else None
    disk = 0 if built else image_build.needed_bytes(lock, compiling) if lock else None
    done = ({"lock"} if current else set()) | (set() if compiling else {"extensions"})
    steps = (set() if built else BUILD_STEPS - done) | (TEST_STEPS if proof == "possible" else set())
    expected = _expected(source.name, lock, steps)
    return Preflight(
        profile=source.name,
        line_reason=options.line_reason,
        gpus=tuple(profile.gpus),
        found_gpus=machine.gpus,
        driver=machine.driver,
        needed_driver=minimum_driver.oldest(profile),
        lock_current=current,
        fetch_bytes=fetch,
        disk_bytes=disk,
        expected_minutes=0.0 if proved else expected.minutes if expected else None,
        expected_from=expected.profile if expected and not proved else None,
        proof=proof,
        reasons=reasons,
    )


def _connected(engine: Callable[[], Engine]) -> tuple[Engine | None, EngineError | None]:
    try:
        return engine(), None
    except EngineError as error:
        return None, error


def _machine(engine: Engine | None, fault: EngineError | None, options: Options) -> ProofMachine:
    """The machine that runs the self-test. `fault`: why there is no engine."""
    runner = settings.setting("on") or "local"
    if runner != "local":
        return ProofMachine(runner, driver=settings.setting("driver"))
    found = ProofMachine(runner)
    if line_lookup.runs_here():
        read = nvml_reader.read()
        hidden = options.locked or line_lookup.in_ci()
        found = replace(found, gpus=tuple(card.name for card in read.cards), driver=None if hidden else read.version)
    if engine is None:
        return replace(found, missing=fault.message if fault else None)
    try:
        docker_runner.look_for_gpu(engine)
    except NotProved as error:
        return replace(found, missing=error.message)
    return found


def _compiles(lock: Lock) -> bool:
    """Whether an extension must be compiled: it is not in the cache."""
    return any(extension_wheel_build.find_wheel(lock, one) is None for one in lock.extensions)


def _expected(profile: str, lock: Lock | None, steps: Set[str]) -> step_durations.Estimate | None:
    if lock is None:
        return None
    return step_durations.estimate(step_durations.read_durations(), profile, image_build.needed_bytes(lock), steps)
