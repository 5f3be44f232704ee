"""The steps of gpu_check.py: how half an hour on a GPU is used, and how each step is run, limited and recorded."""
