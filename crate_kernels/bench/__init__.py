"""Shared by the benchmarks, ``bench`` and ``plot``: reference implementations, providers, the gate, clocks and results.

A row is one provider on one named case, dtype and direction. The provider is compared with float64 first: a wrong
provider gets no time.
"""
