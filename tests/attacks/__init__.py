"""Attacks that envbuild must refuse, and next to each attack ordinary cases that envbuild must accept."""
