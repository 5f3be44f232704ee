"""The preflight of `make`: looks at the lock, the caches, the engine and the GPUs before anything is fetched."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from envbuild.doctor import parallel_tasks_with_time_limit
from envbuild.evidence import profile_proofs_and_image_states
from envbuild.image import extension_wheel_build, shared_extension_cache
from envbuild.image.oci import disk_space_needs
from envbuild.image.shared_extension_cache import SharedCache
from envbuild.lock import lock_file
from envbuild.lock.lock_entry_types import LockedExtension
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import (
    cuda_line_selection_for_machine,
    layer_steps,
    preflight_report,
    runner_selection,
    step_durations,
)
from envbuild.pipeline.image_stores.image_store import ImageStore
from envbuild.pipeline.image_stores.image_store_selection import require_image_store
from envbuild.pipeline.model import Options, StepResult
from envbuild.pipeline.preflight_report import SELECTED, PlannedExtension, Preflight, ProofMachine
from envbuild.pipeline.selftest_steps import is_proved
from envbuild.pipeline.step_context import StepContext
from envbuild.pipeline.step_durations import BUILD_STEPS, TEST_STEPS
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.profile.model import Profile
from envbuild.resolve import cuda_line_choice, cuda_line_lookup, minimum_driver
from envbuild.resolve.plan_resolver import Plan
from envbuild.runners import docker_runner
from envbuild.util import process_locks, settings
from envbuild.util.errors import EngineError, NotProved
from envbuild.util.json_output_types import plain
from envbuild.util.untrusted_input_errors import Reason

if TYPE_CHECKING:
    from envbuild.doctor.machine_readings import GpuReading

Agree = Callable[[str], bool]
"""Asks the user whether to go on without a proof."""


def run_preflight(
    context: StepContext,
    images: ImageStore | EngineError,
    loaded: LoadedProfile,
    plan: Plan,
    options: Options,
    agree: Agree,
) -> StepResult[Preflight]:
    """Look at the machine and show what `make` will do.

    Raises NotProved if no proof is possible here, unless the options allow that or the user agrees. The user is not
    asked if `--gpus` names too few GPUs, or a GPU that this machine lacks. Raises EngineError if nothing can hold the
    image: no engine responds, and no cluster has a registry. If this run can make evidence, raises FileError if the
    configured key cannot be used, and UsageError if its passphrase is missing. With `--locked`, a missing or stale lock
    is not an error here: the next step reports it.
    """
    found = examine(images, loaded, plan, options)
    if not options.unproved and any(reason.id == SELECTED for reason in found.reasons):
        raise not_provable(loaded, found)  # a mistake in the command, whatever else is wrong
    if options.locked and not found.lock_current:
        return StepResult(found, note="the lock is missing or out of date")
    require_image_store(images)
    lines = list(preflight_report.preflight_lines(found))
    if found.proof != "proved" and process_locks.PARALLEL not in os.environ:  # the parent process has shown them
        for line in lines:
            context.progress.say(line)
    if found.proof == "impossible" and not options.unproved and not agree(_question(found)):
        raise not_provable(loaded, found)
    if found.proof in ("possible", "elsewhere"):
        context.require_signer()
    return StepResult(found, cached=found.proof == "proved", note=lines[-1])


def _question(found: Preflight) -> str:
    return f"{found.profile} cannot be proved here ({found.reasons_text}). Build it without a proof?"


def not_provable(loaded: LoadedProfile, found: Preflight) -> NotProved:
    """The error for a profile that cannot be proved here, before anything is fetched."""
    error = NotProved(
        f"{loaded.name} cannot be proved here: {found.reasons_text}",
        hint="\n".join([*_other_line(loaded, found), _ANYWAY.format(loaded.known)]),
    )
    error.partial = {"profile": loaded.name, "reasons": plain(found.reasons)}
    return error


_ANYWAY = "prove it on a machine that can, or build without a proof: --allow-unproved, or envbuild build {}"


def _other_line(loaded: LoadedProfile, found: Preflight) -> list[str]:
    """If the driver is a reason, a hint with the line that supports it, or with the drivers needed; otherwise empty."""
    lines = cuda_line_lookup.lines_for(loaded)
    own = next((one for one in lines if one.profile == loaded.name), None)
    if own is None or found.driver is None or own.refusal(found.driver) is None:
        return []
    return [cuda_line_choice.other_line(lines, own, found.driver)]


def examine(images: ImageStore | EngineError, loaded: LoadedProfile, plan: Plan, options: Options) -> Preflight:
    """The preflight of a profile. If nothing can hold the image, it counts as not built, and cannot be proved on this
    machine. Raises UsageError if --gpus is used with a cluster."""
    registry = None if isinstance(images, EngineError) else images.registry
    profile, lock = loaded.profile, lock_file.read(loaded.known_lock)
    current = lock is not None and not lock.stale(plan)
    proved = built = False
    if not isinstance(images, EngineError) and lock and current and not options.no_cache:
        image = images.find(lock)
        built = image is not None and images.holds(image)
        if image:
            proved = is_proved(profile_proofs_and_image_states.proofs_of(image.id, loaded.name, profile, lock))
    machine = ProofMachine("local") if proved else _machine(images, profile, options)
    line = cuda_line_lookup.as_line(loaded.name, cuda_line_choice.CURRENT, profile)
    refused = line.refusal(machine.driver) if machine.driver else None
    proof, reasons = preflight_report.judge_proof(profile.gpus, profile.gpu_count, machine, refused, proved)
    cache = shared_extension_cache.configured_cache() if lock and lock.extensions and not built else None
    extensions = () if lock is None or built else _plan_extensions(lock, cache, options)
    compiling = any(one.source == "compiled" for one in extensions)
    bytes_from = None
    if lock is None:
        extensions = tuple(PlannedExtension(name, "compiled") for name, source in plan.extensions.items() if source)
        compiling = bool(extensions)
        if similar := lock_file.similar_lock(loaded):
            bytes_from, lock = similar
    fetch = 0 if built else disk_space_needs.fetched_bytes(lock, compiling) if lock else None
    if fetch is not None:
        fetch += sum(one.bytes or 0 for one in extensions if one.source == "fetched")
    disk = 0 if built else disk_space_needs.needed_bytes(lock, compiling) if lock else None
    disk = fetch if registry else disk  # then this machine keeps only what is downloaded
    done = ({"lock"} if current else set()) | (set() if compiling else {"extensions"})
    steps = (set() if built else BUILD_STEPS - done) | (TEST_STEPS if proof == "possible" else set())
    expected = _expected(loaded.name, lock, steps)
    return Preflight(
        profile=loaded.name,
        line_reason=options.line_reason,
        gpus=tuple(profile.gpus),
        gpu_count=profile.gpu_count,
        runner=machine.runner,
        registry=registry,
        found_gpus=machine.gpus,
        driver=machine.driver,
        needed_driver=minimum_driver.oldest(profile),
        lock_current=current,
        fetch_bytes=fetch,
        disk_bytes=disk,
        without_base_image=lock is not None and not built and disk_space_needs.lacks_base_image(lock),
        extensions=extensions,
        extension_cache=cache.location if cache else None,
        bytes_from=bytes_from,
        expected_minutes=expected.minutes if expected else None if steps else 0.0,
        expected_from=expected.profile if expected else None,
        proof=proof,
        reasons=reasons,
    )


def _machine(images: ImageStore | EngineError, profile: Profile, options: Options) -> ProofMachine:
    """Describe the machine that will run the self-test."""
    runner = settings.setting("on") or "local"
    if runner != "local":
        runner_selection.refuse_selected_gpus(runner, options.request)
        return ProofMachine(runner, driver=settings.setting("driver"))
    selected = options.request.gpus if profile.gpus else ()
    found, missing = ProofMachine(runner, selected=len(selected)), None
    if profile.gpus and cuda_line_selection_for_machine.runs_here():
        from envbuild.doctor import nvml_reader  # not needed for the CPU, nor for a proved image

        read = nvml_reader.read()
        usable = [gpu for gpu in read.cards if not selected or {str(gpu.index), gpu.uuid} & {*selected}]
        whole = [gpu for gpu in usable if not (gpu.mig and gpu.mig.enabled)]
        missing = _missing_gpus(read.cards, usable, whole, selected)
        hidden = (
            options.locked or cuda_line_selection_for_machine.in_ci()
        )  # such a build must not depend on this machine's driver
        found = replace(found, gpus=tuple(gpu.name for gpu in whole), driver=None if hidden else read.version)
    if isinstance(images, EngineError):
        return replace(found, missing=Reason("engine", images.message))
    if missing or not profile.gpus:
        return replace(found, missing=missing)
    try:
        docker_runner.look_for_gpu(images.engine)
    except NotProved as error:
        return replace(found, missing=Reason("no-gpu", error.message))
    return found


def _missing_gpus(
    present: Sequence[GpuReading], usable: Sequence[GpuReading], whole: Sequence[GpuReading], selected: Sequence[str]
) -> Reason | None:
    """Why the GPUs that the machine has cannot be used: --gpus names other GPUs, or all GPUs of the machine are split
    into MIG slices."""
    unknown = [name for name in selected if not any(name in (str(gpu.index), gpu.uuid) for gpu in usable)]
    if present and unknown:
        indices = ", ".join(str(gpu.index) for gpu in present)
        return Reason(SELECTED, f"--gpus names {', '.join(unknown)}, and this machine has the GPUs {indices}")
    if usable and not whole:
        sliced = ", ".join(str(gpu.index) for gpu in usable)
        return Reason(
            "mig", f"the profile needs whole GPUs, but MIG is on for GPU {sliced}; to turn it off: nvidia-smi -mig 0"
        )
    return None


def _plan_extensions(lock: Lock, cache: SharedCache | None, options: Options) -> tuple[PlannedExtension, ...]:
    """Find out where the wheels of a lock's extensions will come from. A shared cache that does not answer in time
    counts as one that cannot be used."""
    planned, asked = dict[str, PlannedExtension](), list[LockedExtension]()
    for one in lock.extensions:
        lock_record = lock.recorded_wheel(one.name, extension_wheel_build.key(lock, one))
        local = extension_wheel_build.find_wheel(lock, one)
        accepted = local is not None and (lock_record is None or local.sha256 == lock_record.sha256)
        planned[one.name] = PlannedExtension(one.name, "cached" if local else "compiled")
        if lock_record and not accepted and options.wheel_records == "require":
            source: Literal["refused", "compiled"] = "refused" if local else "compiled"
            planned[one.name] = PlannedExtension(one.name, source, required_sha256=lock_record.sha256)
        if cache and not accepted:
            asked.append(one)
    if cache and asked:
        tasks = [partial(_plan_fetch, cache, lock, one, planned[one.name]) for one in asked]
        answers = parallel_tasks_with_time_limit.run_in_parallel(tasks, layer_steps.CACHE_SECONDS)
        late = f"no answer in {layer_steps.CACHE_SECONDS:.0f} s"
        planned |= {
            one.name: answer or replace(planned[one.name], fault=late)
            for one, answer in zip(asked, answers, strict=True)
        }
    return tuple(planned.values())


def _plan_fetch(cache: SharedCache, lock: Lock, one: LockedExtension, otherwise: PlannedExtension) -> PlannedExtension:
    """Ask the shared cache for a wheel. `otherwise`: what happens if it does not have the wheel."""
    try:
        lock_record = lock.recorded_wheel(one.name, extension_wheel_build.key(lock, one))
        description = shared_extension_cache.find_description(cache, lock, one, lock_record)
    except layer_steps.CACHE_ERRORS as error:
        return replace(otherwise, fault=error.message)
    return PlannedExtension(one.name, "fetched", description.bytes) if description else otherwise


def _expected(profile: str, lock: Lock | None, steps: Set[str]) -> step_durations.Estimate | None:
    if lock is None:
        return None
    return step_durations.estimate(step_durations.read_durations(), profile, disk_space_needs.needed_bytes(lock), steps)
