"""Compilers as tests start them: what they say is shown where they fail, and each core compiles a source."""

import os
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor


def run(command):
    """Run a command, whose output is the message of the error where it fails."""
    command = [str(word) for word in command]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}{done.stderr}"


def objects(command, sources, folder, own=lambda source: ()):
    """Compile sources into a folder; return the objects. ``own``: the options of one source."""
    found = [folder / f"{number}.o" for number in range(len(sources))]

    def compile_one(source, output):
        run([*command, *own(source), "-c", source, "-o", output])

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(compile_one, sources, found))
    return found
