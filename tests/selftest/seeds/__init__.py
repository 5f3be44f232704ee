"""The real probes over wrong kernels: each seed patches torch in the probe's own process, then the probe runs."""

from . import attentions, cards, convolutions, gradients, needles, normalisations, products, training

PROBES = (
    *cards.PROBES,
    *products.PROBES,
    *attentions.PROBES,
    *gradients.PROBES,
    *needles.PROBES,
    *normalisations.PROBES,
    *convolutions.PROBES,
    *training.PROBES,
)
