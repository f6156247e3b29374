"""What Triton's own code says of the tiles that a kernel loads and stores: how many bits of each a thread has."""

import re

_MEMORY = re.compile(r"\b(?:tt\.load|tt\.store|ttg\.async_copy_global_to_local) .*? : (.*) loc\((#loc\d*)\)$")
_TILE = re.compile(r"tensor<([\dx]+)x!tt\.ptr<([a-z]+)(\d+)>")
_PLACE = re.compile(r'^(#loc\d*) = loc\((?:callsite\()?(?:"([^"]*)":(\d+):\d+|(#loc\d*)|"[^"]*"\((#loc\d*)\))')
_THREADS = re.compile(r'"ttg\.num-warps" = (\d+)')


def _places(text):
    """Return (file, line) by the name of a location; of a call, that of what is called."""
    found = {match[1]: match for match in map(_PLACE.match, text.splitlines()) if match}

    def place(name):
        match = found.get(name)
        if match is None:  # unknown
            return None
        return (match[2], int(match[3])) if match[2] else place(match[4] or match[5])

    return {name: place(name) for name in found}


def thread_bits(text, lanes=32):
    """Return {(file, line): {bits}}: what a thread has of each tile that is loaded or stored there, 128 at most."""
    places, threads, found = _places(text), int(_THREADS.search(text)[1]) * lanes, {}
    for line in text.splitlines():
        if not (match := _MEMORY.search(line)) or not (tile := _TILE.search(match[1])):
            continue
        numbers, bits = 1, max(int(tile[3]), 8)
        for size in tile[1].split("x"):
            numbers *= int(size)
        narrowest = 32 if "async_copy" in line else bits  # no copy to shared memory is narrower
        found.setdefault(places.get(match[2]), set()).add(min(max(numbers * bits // threads, narrowest), 128))
    return found
