"""env.identity: the cards are those that the profile is for."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from envbuild.selftest import packages
from envbuild.selftest.context import Context


def identity(context: Context) -> None:
    """env.identity: every visible GPU has one of the expected names; where none is expected, all have the same."""
    context.step("names of the visible GPUs")
    cards = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        cards.append(
            {
                "name": found.name,
                "compute_capability": f"{found.major}.{found.minor}",
                "sms": found.multi_processor_count,
                "memory_bytes": found.total_memory,
                "uuid_sha256": _hashed(getattr(found, "uuid", None)),  # torch 2.5 and newer tell it
            }
        )
    context.traits["gpus"] = cards
    context.traits["driver"] = packages.machine()["driver"]
    names = sorted({str(card["name"]) for card in cards})
    wrong = [name for name in names if context.job.gpus and name not in context.job.gpus]
    if wrong:
        context.fail(
            "mismatch", "this is {}, the profile is for {}".format(", ".join(wrong), ", ".join(context.job.gpus))
        )
    if len(names) > 1 and not context.job.gpus:
        context.fail("mismatch", "the GPUs are not all the same: {}".format(", ".join(names)))


def _hashed(uuid: Any) -> str | None:
    """Two records tell whether they are of one card; neither tells which."""
    return None if uuid is None else hashlib.sha256(str(uuid).encode()).hexdigest()
