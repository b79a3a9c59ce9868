"""CUDA as PyTorch drives it: which kernels it picks, and what they ask of memory that no tensor shows."""
