"""The real probes over wrong kernels: each seed patches torch in the probe's own process, then the probe runs."""

from . import attentions, cards, convolutions, gradients, normalisations, products, training

PROBES = (
    *cards.PROBES,
    *products.PROBES,
    *attentions.PROBES,
    *gradients.PROBES,
    *normalisations.PROBES,
    *convolutions.PROBES,
    *training.PROBES,
)
