"""All targets of the campaign."""

from __future__ import annotations

from fuzz import attests, clusters, plans, proofs, readers, repairs, requirement_files

TARGETS = {
    target.name: target
    for target in (
        *plans.TARGETS,
        *requirement_files.TARGETS,
        *clusters.TARGETS,
        *proofs.TARGETS,
        *attests.TARGETS,
        *readers.TARGETS,
        *repairs.TARGETS,
    )
}
