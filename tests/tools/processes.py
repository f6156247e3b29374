"""Several processes at once, each of which ends as soon as its work is done."""

import os
import sys

import torch.multiprocessing


def spawn(work, args, size):
    """As ``torch.multiprocessing.spawn``, but a process that is done does not take Python down first.

    DTensor's caches keep groups beyond ``destroy_process_group``, with gloo's threads. One that lets go of a tensor
    asks for Python's lock, and where Python is being taken down meanwhile, the process aborts.
    """
    torch.multiprocessing.spawn(_work, (work, *args), size)


def _work(rank, work, *args):
    work(rank, *args)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
