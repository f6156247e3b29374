"""What a separate process does in the tests of tuning; it imports nothing, so that it starts at once."""

import os


def dying(connection, first, lost):
    """Find the second workload only where the process did not end before it; the first takes the process along."""
    connection.send(("ready",))
    if first == 0:
        connection.send(("trying", 3))
        if 3 not in lost:
            os.abort()
        connection.send(("found", {"BLOCK": 1}, 1.0, 2.0))
    connection.send(("failed", "wrong"))
