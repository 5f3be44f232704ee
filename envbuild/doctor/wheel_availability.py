"""Checks that the configured indexes have every wheel of a lock. Reads only the index pages, and downloads no wheel."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from envbuild.doctor.check_result import Check, ok, skipped_check
from envbuild.doctor.machine_readings import clean
from envbuild.fetch import index_config, index_pages, sha256_file_store, uv_error_translator
from envbuild.fetch.locked_wheel_types import Wheel
from envbuild.lock import lock_file
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.util.errors import NetworkError, some

WHEELS = "wheels"
"""The id of the check."""
_MOST = 5  # maximum number of files in the message


def check_wheels(loaded: LoadedProfile, checks: Sequence[Check]) -> Check:
    """Checks that every wheel of a profile's lock is in the cache or on a configured index. `checks`: the checks of the
    machine; no index is read if their check `index` failed."""
    locked = lock_file.read(loaded.known_lock)
    if locked is None:
        return skipped_check(WHEELS, "no lock yet")
    every = {one.wheel for one in (*locked.wheels, *(locked.builder.wheels if locked.builder else ()))}
    cached = sha256_file_store.wheel_store()
    wanted = sorted((one for one in every if not cached.holds(one.sha256, one.file)), key=lambda one: one.file)
    if not wanted:
        return ok(WHEELS, f"{some(len(every), 'locked wheel')}: in the cache")
    if any(check.id == "index" and check.status == "fail" for check in checks):
        return skipped_check(WHEELS, "an index does not answer")
    try:
        with ThreadPoolExecutor(index_config.PARALLEL) as pool:
            missing = [one for one, there in zip(wanted, pool.map(_is_there, wanted), strict=True) if not there]
    except NetworkError as error:
        return Check(WHEELS, "fail", clean(error.message), "check the network")
    if not missing:
        return ok(WHEELS, f"{some(len(wanted), 'locked wheel')} to fetch: the configured indexes have them")
    more = f" and {len(missing) - _MOST} more" if len(missing) > _MOST else ""
    named = f"{', '.join(one.file for one in missing[:_MOST])}{more}"
    local = next((f"{one.name}=={one.version}" for one in missing if "+" in one.version), None)
    remedy = (
        uv_error_translator.local_build(local)
        if local
        else "configure an index that has them, or lock other versions: "
        f"envbuild lock {loaded.cli_words} --upgrade NAME"
    )
    files = tuple(one.file for one in missing)
    return Check(WHEELS, "fail", f"no configured index has {named}", remedy, files)


def _is_there(wheel: Wheel) -> bool:
    files = [*index_pages.listed_files(wheel.name)]
    for page in index_config.torch_pages([f"{wheel.name}=={wheel.version}"]):
        files += index_pages.listed_at(page, wheel.name)
    return any(wheel.sha256 == one.sha256 if one.sha256 else wheel.file == one.file for one in files)
