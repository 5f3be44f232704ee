"""Plans the installation of a profile's lock. Imports the whole resolver; see install_plan for the cached plans."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from envbuild.facts import fact_file_reader
from envbuild.lock import lock_file, requirements_export
from envbuild.lock.lock_file import Lock
from envbuild.repair import install_plan
from envbuild.repair.install_plan import InstallPlan
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.util import yaml_and_project_paths

_LOG = logging.getLogger(__name__)


def plan_and_cache(name: str) -> InstallPlan:
    """Plan the installation of a profile, and cache the plan. Raises ProfileError, LockError, or OutOfDate if the lock
    is missing or does not match the profile."""
    with yaml_and_project_paths.recorded_reads() as reads:
        loaded = profile_reader_and_overrides.load(name)
        lock = lock_file.current_lock(loaded, plan_resolver.resolve(loaded))
    plan = plan_for_lock(loaded.name, loaded.known, lock, loaded.profile.env)
    if not reads.files.keys() >= set(fact_file_reader.site_files()):
        return plan  # this process read the site's facts earlier, and they may have changed since then
    try:
        install_plan.store(name, plan, reads.files, reads.paths)
    except OSError as error:  # a full or read-only disk
        _LOG.info("the plan is not cached: %s", error)
    return plan


def plan_for_lock(name: str, known: str, lock: Lock, variables: Mapping[str, str]) -> InstallPlan:
    """Plan the installation of the lock of profile `name`. `known`: as in LoadedProfile; `variables`: the profile's
    environment variables."""
    return InstallPlan(
        profile=name,
        known=known,
        lock=lock.id,
        python=lock.python,
        glibc=plan_resolver.glibc_of_base(lock.suite),
        wheels=lock.wheels,
        overrides={one.name: one.version for one in lock.overrides},
        constraints=requirements_export.constraints(lock, name, metadata_changed=True),
        variables=dict(variables),
        left_out=tuple(extension.name for extension in lock.extensions),
    )
