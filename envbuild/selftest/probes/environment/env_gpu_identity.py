"""env.identity: the GPUs are those that the profile is for, as the driver describes them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.inventory import interpreter_and_distributions

_MIG = " MIG "  # in a slice's name, between the GPU's name and the MIG profile: "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


def env_identity(context: Context) -> None:
    """env.identity: every visible GPU has the expected name, compute capability and SM count, and is not a MIG slice.

    If no name is expected, all GPUs must have the same, and MIG slices are allowed. The SM count of a slice is not
    checked. For a GPU model unknown to the facts, neither compute capability nor SM count is checked.
    """
    context.step("the visible GPUs")
    cards = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        cards.append(
            {
                "name": found.name,
                "mig": found.name.partition(_MIG)[2] or None,
                "compute_capability": f"{found.major}.{found.minor}",
                "sms": found.multi_processor_count,
                "memory_bytes": found.total_memory,
                "uuid_sha256": _hashed(getattr(found, "uuid", None)),  # available from torch 2.5 on
            }
        )
    context.traits["gpus"] = cards
    context.traits["driver"] = interpreter_and_distributions.driver_and_gpus()["driver"]
    for fault in dict.fromkeys(fault for card in cards for fault in _faults(card, context.job)):
        context.fail("mismatch", fault)
    names = sorted({str(card["name"]) for card in cards})
    if len(names) > 1 and not context.job.gpus:
        context.fail("mismatch", "the GPUs are not all the same: {}".format(", ".join(names)))


def _faults(card: Mapping[str, Any], job: JobDocument) -> Iterator[str]:
    """Yield a text for each difference of a GPU from the profile's GPUs or from the known facts about its model."""
    name = str(card["name"]).partition(_MIG)[0]
    known = job.cards.get(name, {})
    if job.gpus and name not in job.gpus:
        yield "this is {}, the profile is for {}".format(name, ", ".join(job.gpus))
    if job.gpus and card["mig"]:
        yield f"this is a MIG slice ({card['mig']}) of {name}, the profile is for whole GPUs"
    wanted = {"compute_capability": "compute capability"}
    if not card["mig"]:  # a MIG slice has only some of the GPU's SMs
        wanted["sms"] = "number of SMs"
    for field, title in wanted.items():
        if known.get(field) is not None and card[field] != known[field]:
            yield f"this {name} has the {title} {card[field]}, the facts have {known[field]}"


def _hashed(uuid: Any) -> str | None:
    """Hash a UUID. The hash shows whether two records come from the same GPU, but does not reveal the UUID."""
    return None if uuid is None else hashlib.sha256(str(uuid).encode()).hexdigest()
