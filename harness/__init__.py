"""pagedbench: check and measure paged-attention implementations side by side."""

__version__ = "0.1.0"
