"""The Python part of the extension, with and without its compiled module."""
