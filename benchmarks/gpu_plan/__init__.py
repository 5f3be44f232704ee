"""The steps of gpu_check.py: what half an hour on a GPU is spent on, and how each step is run, limited and recorded."""
