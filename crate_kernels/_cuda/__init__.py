"""CUDA C++ kernels: compiled by NVRTC when first needed, launched through the driver, repeated by plans."""
