"""env.identity: the cards are those that the profile is for."""

from __future__ import annotations

import torch

from envbuild.selftest.context import Context


def identity(context: Context) -> None:
    """env.identity: every visible GPU has one of the expected names, and all have the same."""
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
            }
        )
    context.traits["gpus"] = cards
    names = sorted({str(card["name"]) for card in cards})
    wrong = [name for name in names if context.job.gpus and name not in context.job.gpus]
    if wrong:
        context.fail(
            "mismatch", "this is {}, the profile is for {}".format(", ".join(wrong), ", ".join(context.job.gpus))
        )
    if len(names) > 1:
        context.fail("mismatch", "the GPUs are not all the same: {}".format(", ".join(names)))
