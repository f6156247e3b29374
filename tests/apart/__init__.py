"""A second fuzzer, which shares no code with the package's own tests: drawn calls against the papers' equations.

``python -m tests.fuzz`` makes thousands of calls of the public functions and modules. Each is drawn from one integer,
is a few lines of Python that can be run alone, and is judged against equations written here in float64. Nothing of
``crate_kernels.testing``, of the naive loops or of the reference backend is used: a mistake there cannot hide here.
"""
