"""Plans that tests write: of a body, and of a launch that no kernel makes."""

import struct

from crate_kernels._core import launches, recording


def recorded(body, *tensors):
    """Return the numbers of the plan of a body."""
    with recording.Recorder(tensors) as recorder:
        results = body(*tensors)
    return recorder.words(results if isinstance(results, tuple) else (results,))


def launching(a, scratch=False, **changed):
    """Launch function 5 on a tensor, an output and perhaps scratch memory, where a recorder is there to see it."""
    out = a.new_empty(a.shape)
    inputs = [a, out, struct.pack("<i", 7), *([a.new_empty(3)] if scratch else []), None]
    fields = dict(grid=(2, 3, 4), threads=128, shared_bytes=96, ctas=1, cooperative=False, serialized=False)
    launch = launches.Launch(function=5, parameters=inputs, **{**fields, "owner": None, **changed})
    if (recorder := recording.recorder()) is not None:
        recorder.launched(lambda: launch)
    return out
