"""Results of one part of a run: a file of JSON lines, to which several processes append as results come."""

import json
import os
from collections import Counter

# A process that ends within an item leaves "started" without a result. The device's time may have been up: try again.
MAX_ATTEMPTS = 2


def append(path, **fields):
    """Append one line by one write, so that lines of several processes do not mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(fields) + "\n").encode())
    finally:
        os.close(descriptor)


def read(path):
    """Return the lines; one that was cut off when a process ended is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def results(path):
    """Return the last result of each item; an item that ended its process each time is "lost"."""
    found, attempts = {}, Counter()
    for line in read(path):
        name = line["item"]
        if line["outcome"] == "started":
            attempts[name] += 1
            if attempts[name] >= MAX_ATTEMPTS:
                found[name] = {**line, "outcome": "lost"}
        else:
            attempts[name] = 0
            found[name] = line
    return found
