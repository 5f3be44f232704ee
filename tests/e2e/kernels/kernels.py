"""What is there with and without the compiled module."""
