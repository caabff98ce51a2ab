"""Implementations in Triton. Pages here are imported through `interpreter.why_missing`, which chooses how they run."""
