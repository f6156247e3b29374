"""What the benchmarks, ``bench`` and ``plot`` share: published forms, providers, the gate, clocks and results.

A row is one provider on one named case, dtype and direction. It is held against float64 first: a provider that is
wrong gets no time.
"""
