"""Kernels for CUDA, in Triton; each runs in Triton's interpreter on CPU too, and says its bytes and operations."""
