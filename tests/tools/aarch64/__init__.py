"""The kernels for CPUs on another processor: compiled for it without PyTorch, and run under an emulator of it.

PyTorch stays in this process. A kernel's call is sent to a process of the other architecture, which sends back what the
kernel wrote. So every operator test can run on it, against float64 and with the tolerances of every backend.
"""
