"""Checks the driver and the GPUs of a machine. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from envbuild.doctor.check_result import LATE, Check, Status, counted, gib, ok, skipped_check, worst_check
from envbuild.doctor.machine_readings import GpuReading, Host, Xid
from envbuild.doctor.profile_hardware_needs import Need
from envbuild.facts import database, mixed_gpu_settings
from envbuild.facts.fact_field_types import is_version
from envbuild.facts.gpu_fact_types import Gpu

FREE = 0.9
"""The fraction of a GPU's memory that must be free for a self-test, because its probes init.alloc and memory fill
it."""
DRAIN = "drain the GPU and reset it (nvidia-smi --gpu-reset)"


def check_gpus(host: Host, needs: Sequence[Need]) -> Iterator[Check]:
    """Yield all checks of the driver and the GPUs. These checks are skipped on a machine without GPUs."""
    checks: dict[str, Callable[[], Check]] = {
        "gpu.driver": lambda: check_driver(host, needs),
        "gpu.answers": lambda: check_answers(host),
        "gpu.runtime": lambda: check_container_runtime(host),
        "gpu.models": lambda: check_models(host.driver.cards),
        "gpu.equal": lambda: check_same_settings(host.driver.cards),
        "gpu.mig": lambda: check_mig(host.driver.cards),
        "gpu.ecc": lambda: check_ecc(host.driver.cards),
        "gpu.compute-mode": lambda: check_compute_mode(host.driver.cards),
        "gpu.memory": lambda: check_free_memory(host.driver.cards),
        "gpu.fabric": lambda: check_fabric(host),
        "gpu.xid": lambda: check_xids(host),
    }
    about_cards = tuple(checks)[2:-1]  # a GPU that fell off the bus may appear only in the log
    for name, check in checks.items():
        if "NVML" in host.late and name != "gpu.xid":
            detail = "NVML does not answer: the driver hangs"
            remedy = "see the kernel's log; reboot if the problem persists"
            yield Check(name, "fail", detail, remedy) if name == "gpu.driver" else skipped_check(name, detail)
        elif not host.driver.cards and name in about_cards:
            yield skipped_check(name, "NVML reports no GPU")
        else:
            yield check()


def check_driver(host: Host, needs: Sequence[Need]) -> Check:
    """Checks that the driver is new enough for at least one profile of each GPU model here that has a profile. Lists
    the profiles that need a newer driver."""
    name, found = "gpu.driver", host.driver
    if found.fault and not host.pci:
        return skipped_check(name, f"no NVIDIA GPU: {found.fault}")
    if found.fault:
        remedy = (
            "install NVIDIA's driver, load it (modprobe nvidia), or reboot after an update; in a container: --gpus all"
        )
        return Check(name, "fail", f"the PCI bus has NVIDIA GPUs ({host.pci}), but NVML fails: {found.fault}", remedy)
    if not found.cards and not found.lost:
        return skipped_check(name, "NVML reports no GPU")
    if found.version is None or not is_version(found.version):
        return Check(name, "warn", "NVML does not report the driver's version", "update the driver")
    here = {gpu.id for gpu in _known(found.cards)}
    mine = [need for need in needs if here & set(need.gpus)]
    runs = [need for need in mine if need.runs_on(found.version)]
    old = [need for need in mine if need not in runs]
    served = {gpu for need in runs for gpu in need.gpus}
    unserved = {gpu for need in old for gpu in need.gpus} & here - served
    excluded = ", ".join(f"{need.profile} ({need.driver} or newer)" for need in old)
    none = "no profile is for these GPUs" if len(needs) != 1 else f"{needs[0].profile} is not for these GPUs"
    words = [
        f"{found.version}{f' (CUDA up to {found.cuda})' if found.cuda else ''}",
        f"new enough for {', '.join(need.profile for need in runs)}" if runs else "",
        f"too old for {excluded}" if old else "" if runs else none,
    ]
    detail = "; ".join(filter(None, words))
    if not unserved:
        return ok(name, detail)
    serves = all(database.gpus()[gpu].datacentre for gpu in unserved)  # on other GPUs CUDA fails with error 804
    libraries = ", or bring compatibility libraries (driver.compat in the profile)" if serves else ""
    return Check(name, "fail", detail, f"update the driver{libraries}")


def check_answers(host: Host) -> Check:
    """Checks that every NVIDIA GPU on the PCI bus answers NVML."""
    cards, name = host.driver.cards, "gpu.answers"
    if host.driver.lost:
        remedy = f"see gpu.xid and the kernel's log; {DRAIN}, or reboot"
        return Check(name, "fail", "; ".join(host.driver.lost), remedy)
    if not cards:
        return skipped_check(name, "NVML reports no GPU")
    if host.pci is not None and host.pci > len(cards):
        remedy = "see the kernel's log; this is normal if the container or the job got only these GPUs"
        return Check(name, "warn", f"{host.pci} NVIDIA GPUs on the PCI bus, but NVML reports {len(cards)}", remedy)
    return ok(name, f"{len(cards)} of {len(cards)} GPUs")


def check_container_runtime(host: Host) -> Check:
    """Checks that the engine can give GPUs to a container, as `docker run --gpus` does."""
    name, engine = "gpu.runtime", host.engine
    if engine.version is None:
        return skipped_check(name, "no engine")
    if "nvidia" in engine.runtimes or "nvidia-container-runtime-hook" in engine.hooks:
        return ok(name, "NVIDIA's container toolkit")
    setup = (
        "install nvidia-container-toolkit, then: nvidia-ctk runtime configure --runtime=docker, and restart the engine"
    )
    if engine.cdi or "nvidia-cdi-hook" in engine.hooks:
        text = "the engine has GPUs only as CDI devices; docker run --gpus accepts these if it contains moby/moby#50228"
        return Check(name, "warn", text, f"if a self-test finds no GPU: {setup}")
    return Check(name, "fail", "the engine has neither NVIDIA's runtime nor CDI devices of its GPUs", setup)


def check_models(cards: Sequence[GpuReading]) -> Check:
    unknown = [card.name for card in cards if database.gpu_by_name(card.name) is None]
    if unknown:
        remedy = "add a row for it to facts.d/, or update envbuild"
        return Check("gpu.models", "warn", f"unknown GPU model: {counted(unknown)}", remedy)
    return ok("gpu.models", counted(card.name for card in cards))


def check_same_settings(cards: Sequence[GpuReading]) -> Check:
    """Checks that all GPUs are of one model with one size of memory."""
    found: list[tuple[Status, str, str]] = []
    if len({card.name for card in cards}) > 1:
        gpus = list(dict.fromkeys(_known(cards)))
        together = ", ".join(f"{item.variable}={item.value}" for item in mixed_gpu_settings.mixed_gpu_settings(gpus))
        remedy = f"a profile with gpus: [{', '.join(gpu.id for gpu in gpus)}] sets the variables for this mix"
        remedy += f" ({together})" if together else ""
        found.append(("warn", f"unequal GPUs: {counted(card.name for card in cards)}", f"{remedy}; or --gpus"))
    for name in dict.fromkeys(card.name for card in cards):
        sizes = [gib(card.memory_total) for card in cards if card.name == name and card.memory_total is not None]
        if len(set(sizes)) > 1:
            remedy = "plan for the smallest memory, or choose GPUs with --gpus"
            found.append(("warn", f"unequal memory: {name} with {counted(sizes)}", remedy))
    return worst_check("gpu.equal", found, "one model, one size of memory" if len(cards) > 1 else "one GPU")


def check_mig(cards: Sequence[GpuReading]) -> Check:
    found: list[tuple[Status, str, str]] = []
    for card in cards:
        if card.mig and card.mig.enabled != card.mig.pending:
            change = "on" if card.mig.pending else "off"
            found.append(("warn", f"GPU {card.index}: MIG will be {change} after a reset", "nvidia-smi --gpu-reset"))
        if card.mig and card.mig.enabled and not card.mig.slices:
            remedy = "make instances (nvidia-smi mig -cgi ... -C), or turn MIG off (nvidia-smi -mig 0)"
            found.append(("fail", f"GPU {card.index}: MIG is on and has no instance: CUDA sees no device", remedy))
        elif card.mig and card.mig.enabled:
            remedy = "to use whole or several GPUs, and to prove a profile for whole GPUs: nvidia-smi -mig 0"
            found.append(("warn", f"GPU {card.index}: MIG is on, {card.mig.slices} instances", remedy))
    return worst_check("gpu.mig", found, "off" if any(card.mig for card in cards) else "not supported by these GPUs")


def check_ecc(cards: Sequence[GpuReading]) -> Check:
    found: list[tuple[Status, str, str]] = []
    for card in cards:
        who, known = f"GPU {card.index}", database.gpu_by_name(card.name)
        if card.ecc.uncorrected:
            text = f"{who}: {card.ecc.uncorrected} uncorrected memory errors since the driver was loaded"
            found.append(("fail", text, DRAIN))
        if card.ecc.pending:
            found.append(("fail", f"{who}: faulty memory is waiting to be replaced", DRAIN))
        if card.ecc.failed:
            found.append(("fail", f"{who}: faulty memory could not be replaced", "take the GPU out of service"))
        if card.ecc.enabled is False and known and known.datacentre:
            found.append(("warn", f"{who}: ECC is off", "nvidia-smi -e 1, then reset the GPU"))
    with_ecc = [card for card in cards if card.ecc.enabled is not None]
    return worst_check("gpu.ecc", found, "no uncorrected errors" if with_ecc else "these GPUs have no ECC")


_MODES: dict[str, tuple[Status, str]] = {
    "default": ("ok", ""),
    "exclusive process": ("warn", "one process at a time can use it: a second rank, probe or worker on the GPU fails"),
    "exclusive thread": ("warn", "one thread at a time can use it"),
    "prohibited": ("fail", "no process may use it"),
}


def check_compute_mode(cards: Sequence[GpuReading]) -> Check:
    found: list[tuple[Status, str, str]] = []
    for card in cards:
        status, means = _MODES.get(card.compute_mode or "default", ("warn", "unknown to envbuild"))
        if status != "ok":
            found.append((status, f"GPU {card.index}: {card.compute_mode}: {means}", "nvidia-smi -c DEFAULT"))
    return worst_check("gpu.compute-mode", found, "default")


def check_free_memory(cards: Sequence[GpuReading]) -> Check:
    """Checks that at least the share FREE of every GPU's memory is free, and lists the processes that use memory."""
    found: list[tuple[Status, str, str]] = []
    for card in cards:
        if card.memory_total and card.memory_free is not None and card.memory_free < FREE * card.memory_total:
            held = f"GPU {card.index}: {gib(card.memory_free)} of {gib(card.memory_total)} free"
            found.append(
                (
                    "warn",
                    f"{held}, used by {_holders(card)}",
                    "end the processes that use it, or choose other GPUs with --gpus",
                )
            )
    sizes = counted(gib(card.memory_total) for card in cards if card.memory_total)
    return worst_check("gpu.memory", found, f"free: {sizes}")


def _holders(card: GpuReading) -> str:
    if not card.holders:
        return "a process that is not visible here (in another container, or hung)"
    named = []
    for holder in card.holders[:5]:
        size = f", {gib(holder.memory)}" if holder.memory else ""
        named.append(f"{holder.name or 'a process not visible here'} (pid {holder.pid}{size})")
    return ", ".join(named) + (f" and {len(card.holders) - 5} more" if len(card.holders) > 5 else "")


def check_fabric(host: Host) -> Check:
    """Checks that the fabric manager has registered every GPU. Until then, CUDA fails with error 802 on machines with
    NVSwitches."""
    name, states = "gpu.fabric", {card.index: card.fabric for card in host.driver.cards}
    remedy = "systemctl start nvidia-fabricmanager; its version must equal the driver's"
    bad = {index: state for index, state in states.items() if state not in (None, "none", "completed")}
    if bad:
        return Check(name, "fail", "; ".join(f"GPU {index}: fabric {state}" for index, state in bad.items()), remedy)
    if host.switches is None and "completed" not in states.values():
        return skipped_check(name, LATE)
    if host.switches and host.fabric_manager is False:
        return Check(
            name, "fail", "this machine has NVSwitches, and no fabric manager runs: CUDA fails with error 802", remedy
        )
    if host.switches and host.fabric_manager is None and "completed" not in states.values():
        return skipped_check(
            name, "this machine has NVSwitches; it is not visible here whether the fabric manager runs"
        )
    if host.switches or "completed" in states.values():
        return ok(
            name,
            "every GPU has joined the NVSwitch fabric" if "completed" in states.values() else "the fabric manager runs",
        )
    return skipped_check(name, "no NVSwitch")


def check_xids(host: Host) -> Check:
    """Reports the Xid errors that the driver has written to the kernel's log since the machine started."""
    if host.log is None:
        return skipped_check("gpu.xid", LATE)
    if host.log.fault:
        return skipped_check(
            "gpu.xid", f"the kernel's log cannot be read ({host.log.fault}): sudo envbuild doctor, or dmesg | grep Xid"
        )
    if not host.log.xids and not host.log.partial and not host.driver.cards:
        return skipped_check("gpu.xid", "NVML reports no GPU")
    known = database.xids()
    groups: dict[tuple[str, int], list[Xid]] = {}
    for item in host.log.xids:
        groups.setdefault((item.card, item.number), []).append(item)
    found: list[tuple[Status, str, str]] = []
    for (card, number), items in groups.items():
        fact = known.get(number)
        text = f"{card}: Xid {number}{f', {fact.title}' if fact else ''}, {len(items)} times, last: {items[-1].text}"
        if fact and fact.application:
            found.append(("warn", text, "caused by a program (the kernel's log names it); the GPU is not damaged"))
        else:
            found.append(("fail", text, f"{DRAIN}, or reboot; the log still has entries from before the reset"))
    if host.log.partial:
        text = "the kernel's log was read only in part: newer Xid errors may be missing"
        found.append(("warn", text, "run envbuild doctor again, or dmesg | grep Xid"))
    return worst_check("gpu.xid", found, "none since this boot")


def _known(cards: Sequence[GpuReading]) -> list[Gpu]:
    return [gpu for card in cards if (gpu := database.gpu_by_name(card.name))]
