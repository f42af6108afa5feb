"""Kernels written for a device, and how they are built."""
