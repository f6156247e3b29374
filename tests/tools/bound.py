"""Python processes that end with the process that started them, however that ends, and with all that they start so.

On Linux; elsewhere they live on, as any child does.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path

_PDEATHSIG = 1  # of prctl: the signal for a child of a thread that ends; the child's exec keeps it


def command(*arguments):
    """Return the command that starts this Python with these arguments; its process has the number of the child."""
    return [sys.executable, "-S", str(Path(__file__).resolve()), str(os.getpid()), *map(str, arguments)]


def main():
    """Become Python with these arguments, bound to its parent."""
    parent, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it ended before
            sys.exit(1)
    os.execv(sys.executable, [sys.executable, *arguments])


if __name__ == "__main__":
    main()
