"""All targets of the campaign."""

from __future__ import annotations

from fuzz import attests, clusters, plans, proofs, readers, repairs

TARGETS = {
    target.name: target
    for target in (
        *plans.TARGETS,
        *clusters.TARGETS,
        *proofs.TARGETS,
        *attests.TARGETS,
        *readers.TARGETS,
        *repairs.TARGETS,
    )
}
