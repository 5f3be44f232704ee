"""Checks everything except the GPUs: engine, memory, disks, network, clock. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from envbuild.doctor.check_result import LATE, Check, Status, gib, ok, skipped_check, worst_check
from envbuild.doctor.machine_readings import Answer, Disk, Host
from envbuild.doctor.profile_hardware_needs import Need
from envbuild.testrun.selftest_job import Limits

SHM = Limits.shm
"""Bytes of shared memory in the self-test's container. With Docker's default, 64 MiB, DataLoader workers and NCCL
fail."""
SKEW = 60.0
"""Seconds. A registry also accepts a token that expired at most this long ago, or becomes valid within this time
(distribution/distribution, registry/auth/token)."""
DRIFT = 5.0
"""Seconds. The rounding of a Date header and the network's delay cannot explain a larger difference."""


def check_system(host: Host, needs: Sequence[Need]) -> Iterator[Check]:
    """Yields all checks that do not concern GPUs. `needs`: of the requested profile, or of all profiles."""
    yield check_engine(host)
    yield check_buildx(host)
    yield check_shm(host)
    yield check_rdma(host)
    yield check_disk(host, needs)
    yield check_reached("index", host.indexes, "the package indexes" in host.late, _INDEX)
    yield check_reached(
        "registry", (*host.mirrors, *host.registries), "the registries" in host.late, "docker login; check the network"
    )
    yield check_proxy(host)
    yield check_ca(host)
    yield check_clock(host)
    yield check_settings(host)


_INDEX = "check the network, and the settings of pip (`pip config list`) and uv"
_START = "start a Docker Engine (in a checkout: make engine), or point DOCKER_HOST or a docker context at one"


def check_engine(host: Host) -> Check:
    """Checks that an engine can be used. If not, this is only a warning where the settings name the registry of a
    cluster, because that registry can receive the images instead."""
    found = host.engine
    if found.version is None:
        text = found.fault or "the engine does not answer in time"
        return Check("engine", "warn" if _clusters(host) else "fail", f"{text}{_instead(host)}", _START)
    return ok("engine", f"Docker {found.version} at {found.host}")


def check_buildx(host: Host) -> Check:
    if host.engine.buildx is None:
        remedy = "install docker-buildx (or docker-buildx-plugin); in a checkout: make engine"
        text = host.engine.buildx_fault or "the client does not answer in time"
        optional = host.engine.version is None and _clusters(host)
        return Check("buildx", "warn" if optional else "fail", text, remedy)
    return ok("buildx", host.engine.buildx)


def _clusters(host: Host) -> tuple[str, ...]:
    """The clusters whose registry can receive the images instead of an engine."""
    return host.site.clusters_with_registry if host.site else ()


def _instead(host: Host) -> str:
    """The end of a message that names these clusters; empty if there are none."""
    names = " or ".join(_clusters(host))
    return f"; with --on {names}, the registry of the cluster receives images instead" if names else ""


def check_shm(host: Host) -> Check:
    if host.shm is None:
        return skipped_check("shm", LATE)
    if host.shm == 0:
        return Check("shm", "warn", "/dev/shm is missing", "mount a tmpfs there")
    if host.shm < SHM:
        remedy = "mount -o remount,size=50% /dev/shm; for a container: --shm-size or --ipc=host"
        return Check("shm", "warn", f"/dev/shm has {gib(host.shm)}: too small for data loaders and NCCL", remedy)
    return ok("shm", f"/dev/shm has {gib(host.shm)}")


def check_rdma(host: Host) -> Check:
    """Checks that an RDMA port is active, and that processes may lock as much memory as RDMA needs."""
    if host.rdma is None:
        return skipped_check("rdma", LATE)
    if not host.rdma:
        return skipped_check("rdma", "no RDMA device")
    up = [port for port in host.rdma if port.state == "ACTIVE"]
    found: list[tuple[Status, str, str]] = []
    if not up:
        states = ", ".join(f"{port.name} {port.state or '?'}" for port in host.rdma)
        found.append(("warn", f"no port is active: {states}", "check cable, switch and subnet manager (ibstat)"))
    elif host.memlock is not None:
        text = f"a process may lock only {gib(host.memlock)} of memory: NCCL's RDMA transport fails"
        found.append(("warn", text, "ulimit -l unlimited; for a container: --ulimit memlock=-1"))
    return worst_check("rdma", found, ", ".join(f"{port.name} {port.link} {port.rate}".strip() for port in up))


def check_disk(host: Host, needs: Sequence[Need]) -> Check:
    """Checks the free space for building the requested profile. With the needs of all profiles, the check fails if the
    smallest one does not fit, and warns if the largest one does not."""
    if not host.disks:
        return skipped_check("disk", "neither the cache nor the engine's folder can be read")
    for item in host.disks:
        if item.fault:
            remedy = "make it a writable folder, or set XDG_CACHE_HOME to one"
            return Check("disk", "fail", f"{item.folder}: {item.fault}", remedy)
    free = "; ".join(f"{item.folder}: {gib(item.free)} free" for item in _distinct(host.disks))
    locked = sorted((need for need in needs if need.built is not None), key=_size)
    judged: list[tuple[Status, str, Need]] = []
    if locked:
        judged = [("fail", "smallest", locked[0]), ("warn", "largest", locked[-1])]
    for status, which, need in judged:
        full = _short(host.disks, need)
        if full:
            name = need.profile if len(locked) == 1 else f"{need.profile}, the {which},"
            text = f"{free}; building {name} takes {gib(_size(need))}"
            return Check("disk", status, text, f"free space on {full.folder}: envbuild prune, docker system df")
    return ok("disk", free)


def _size(need: Need) -> int:
    return (need.fetched or 0) + (need.built or 0)


def _short(disks: Sequence[Disk], need: Need) -> Disk | None:
    """Returns the first disk without enough space for what the build writes to it; None if all have enough. If the
    cache and the engine are on the same disk, that disk needs space for both."""
    shares = {"cache": need.fetched or 0, "engine": need.built or 0}
    for item in disks:
        if item.free < sum(shares[other.role] for other in disks if other.device == item.device):
            return item
    return None


def _distinct(disks: Sequence[Disk]) -> list[Disk]:
    return list({item.device: item for item in reversed(disks)}.values())[::-1]


def check_reached(name: str, answers: Sequence[Answer], late: bool, remedy: str) -> Check:
    """Checks that each configured index or registry answers and gives access. `late`: whether the answers were
    not read in time."""
    if late:
        who = "pip did not report its indexes in time" if name == "index" else "no answer in time"
        return Check(name, "fail", who, remedy)
    if not answers:
        return skipped_check(
            name, "no registry is configured" if name == "registry" else "pip and uv have no index configured"
        )
    found: list[tuple[Status, str, str]] = []
    for item in answers:
        if item.fault:
            found.append(("fail", f"{item.address}: {item.fault}", remedy))
        elif item.status == 407:
            found.append(
                (
                    "fail",
                    f"{item.address}: the proxy requires authentication",
                    "put user and password into the proxy's address",
                )
            )
        elif item.status in (401, 403) and name == "index":
            found.append(
                (
                    "fail",
                    f"{item.address}: authentication failed ({item.status})",
                    "add a user and password to its URL or to ~/.netrc",
                )
            )
        elif item.status is not None and 400 <= item.status < 500 and name == "index":
            found.append(("warn", f"{item.address}: not found ({item.status}): the path may be mistyped", remedy))
        elif item.status is not None and item.status >= 500:
            found.append(("fail", f"{item.address}: server error ({item.status})", remedy))
    if found and len(found) < len(answers):
        status, text, fix = found[-1]
        found[-1] = (status, f"{text} (the other {len(answers) - len(found)} answer)", fix)
    return worst_check(name, found, ", ".join(item.address for item in answers))


def check_proxy(host: Host) -> Check:
    """Check the proxies in the environment: each answers, and both spellings of a variable agree."""
    bad = [item for item in host.proxies if item.fault]
    found: list[tuple[Status, str, str]] = [
        ("fail", f"{item.address} ({', '.join(item.variables)}): {item.fault}", "correct or unset the variable")
        for item in bad
    ]
    spelled: dict[str, set[str]] = {}
    for item in host.proxies:
        for variable in item.variables:
            spelled.setdefault(variable.lower(), set()).add(item.address)
    for variable in (name for name, addresses in spelled.items() if len(addresses) > 1):
        found.append(
            (
                "warn",
                f"{variable} and {variable.upper()} differ: some programs use the first, others the second",
                "give both the same value",
            )
        )
    if "the proxies" in host.late:
        found.append(("fail", "a proxy does not answer in time", "correct or unset the variable"))
    return worst_check("proxy", found, ", ".join(item.address for item in host.proxies) or "no proxy is set")


def check_ca(host: Host) -> Check:
    if host.authorities is None:
        return skipped_check("ca", LATE)
    found: list[tuple[Status, str, str]] = []
    for item in host.authorities:
        if item.fault:
            found.append(("fail", f"{item.variable}: {item.path} {item.fault}", "correct or unset it"))
        elif item.certificates and item.expired == item.certificates:
            found.append(
                (
                    "fail",
                    f"{item.variable}: every certificate in {item.path} has expired",
                    "install current certificates",
                )
            )
    paths = dict.fromkeys(item.path for item in host.authorities)
    return worst_check("ca", found, ", ".join(paths) or "the system's certificates")


def check_clock(host: Host) -> Check:
    """Compares this machine's clock with the time in the responses of indexes and registries."""
    aheads = [item.ahead for item in (*host.indexes, *host.mirrors, *host.registries) if item.ahead is not None]
    if not aheads:
        return skipped_check("clock", "no server reported its time")
    ahead = statistics.median(aheads)
    offset = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the servers' clocks"
    if abs(ahead) > DRIFT:
        status: Status = "fail" if abs(ahead) > SKEW else "warn"
        remedy = "synchronise the clock: timedatectl set-ntp true"
        return Check("clock", status, f"{offset}: certificates, tokens and signatures can appear invalid", remedy)
    return ok("clock", f"within {DRIFT:.0f} s of the servers' clocks")


def check_settings(host: Host) -> Check:
    """Reports all errors in the site's settings at once."""
    site = host.site
    if site is None:
        return skipped_check("settings", LATE)
    if site.faults:
        remedy = f"correct these lines{f'; {site.hint}' if site.hint else ''}"
        return Check("settings", "fail", "; ".join(site.faults), remedy)
    if site.cache_fault:
        text = f"{site.file}: extensions.cache: {site.cache_fault}, so this machine compiles extensions itself"
        return Check("settings", "warn", text, "mount or create the folder, or correct the setting")
    return ok("settings", f"{site.file}: {', '.join(site.names)}" if site.names else f"no settings ({site.file})")
