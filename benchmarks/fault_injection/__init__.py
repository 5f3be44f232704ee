"""A statistical fault model put into the operations of the self-test's probes; run by benchmarks/injections.py."""
