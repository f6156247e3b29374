"""Ways to corrupt the files of a model folder; each takes a random generator and a path."""

import json
import os
import struct

NUMBERS = (-1, 0, 1, 2, 7, 0.5, -0.0, 1e308, 1e-320, 2**31, 2**32, 2**53, 2**63, 10**9, 10**12, 10**30, 10**400)
VALUES = (*NUMBERS, None, True, False, "", "x", "A" * 5000, "\u202e\x00", [], {}, [1, 2], [8, 12], [10**9, 4], [[1]])
VALUES = (*VALUES, float("nan"), float("inf"), float("-inf"), {"a": {"b": []}}, ["x"] * 1000)
NAMES = ("../../etc/passwd", "/etc/passwd", "..", ".", "", "a/b", "\x00", "x" * 5000, "config.json", "~", "\\\\x", "*")


def flip(rng, path):
    """Flip up to 16 bits, half of the time among the first bytes."""
    content = bytearray(path.read_bytes())
    length = min(len(content), 600) if rng.random() < 0.5 else len(content)
    for _ in range(rng.randint(1, 16)):
        if length:
            content[rng.randrange(length)] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(rng, path):
    """Remove bytes from the end, the beginning or between."""
    content = path.read_bytes()
    start, stop = sorted(rng.randint(0, len(content)) for _ in range(2))
    path.write_bytes(rng.choice((content[:start], content[start:], content[:start] + content[stop:])))


def grow(rng, path):
    """Add bytes at the end, the beginning or between."""
    content, added = path.read_bytes(), rng.choice((b"\0", b" ", b"{", b"[", rng.randbytes(64))) * rng.randint(1, 4096)
    place = rng.choice((0, len(content), rng.randint(0, len(content))))
    path.write_bytes(content[:place] + added + content[place:])


def replace(rng, path):
    """Replace the whole file."""
    deep = rng.choice((10, 900, 1100, 100_000, 600_000))
    path.write_bytes(
        rng.choice(
            (
                b"",
                rng.randbytes(rng.randint(1, 2000)),
                b"[" * deep + b"]" * deep,
                b'{"a":' * deep + b"1" + b"}" * deep,
                b"{}" + b" " * (2 << 20),
                b"9" * 500_000,
                b'"\\ud800"',
                b"\xef\xbb\xbf{}",
                "{}".encode("utf-16"),
                b"null",
                b"\x80\x04\x95" + rng.randbytes(50),  # the beginning of a pickle
                b"PK\x03\x04" + rng.randbytes(50),  # and of a file of torch.save
            )
        )
    )


def link(rng, path):
    """Put a link, a pipe, a folder or nothing in the place of the file."""
    content = path.read_bytes()
    path.unlink()
    kind = rng.randrange(7)
    if kind == 0:
        outside = path.parent.parent / "outside"
        outside.write_bytes(content)
        path.symlink_to(outside)
    elif kind == 1:
        path.symlink_to(rng.choice(("/dev/zero", "/etc/passwd", "/proc/self/environ", "absent", path.name)))
    elif kind == 2:
        os.mkfifo(path)
    elif kind == 3:
        path.mkdir()
    elif kind == 4:  # allowed: it stays in the folder
        (path.parent / "other").write_bytes(content)
        path.symlink_to("other")
    elif kind == 5:
        path.symlink_to(path.parent.parent / "outside-too", target_is_directory=True)


def field(rng, path):
    """Change, remove, add or repeat a key somewhere in a JSON file."""
    path.write_text(_edit(rng, path.read_text(errors="replace")), errors="replace")


def header(rng, path):
    """Change, remove, add or repeat a key somewhere in a safetensors header; its size stays true."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    text = _edit(rng, content[8 : 8 + length].decode(errors="replace")).encode(errors="replace")
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def length(rng, path):
    """Change the size that a safetensors header says it has."""
    content = path.read_bytes()
    sizes = (0, 1, 7, len(content) - 8, len(content) - 7, len(content), 10**8, 10**8 + 1, 2**31, 2**63, 2**64 - 1)
    path.write_bytes(struct.pack("<Q", max(0, rng.choice(sizes))) + content[8:])


def huge(rng, path):
    """Put a large header before the tensors, of many of them or of spaces."""
    content = path.read_bytes()
    old = int.from_bytes(content[:8], "little")
    text = content[8 : 8 + old]
    if rng.random() < 0.5:
        text += b" " * rng.choice((1000, 9 << 20))
    else:
        many = {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(rng.choice((9, 30_000)))}
        text = json.dumps({**json.loads(text or b"{}"), **many}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + old :])


# A mutation that is named more often is drawn more often.
ANY = (flip, cut, grow, replace, link)
JSON = (field, field, field)
TENSORS = (header, header, header, length, huge)


def _edit(rng, text):
    """Return a JSON text with one change in a drawn place."""
    try:
        found = json.loads(text)
    except ValueError:
        return text
    places = list(_objects(found))
    if not places:
        return text
    holder = rng.choice(places)
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    key = rng.choice(keys) if keys else None
    kind = rng.randrange(6)
    if key is None or (kind == 0 and isinstance(holder, dict)):
        if isinstance(holder, dict):
            holder[rng.choice((*NAMES, "dim", "auto_map", "__metadata__"))] = rng.choice(VALUES)
    elif kind == 1:
        del holder[key]
    elif kind == 2 and isinstance(holder, dict):
        return _repeated(text, key, holder[key] if rng.random() < 0.5 else rng.choice(VALUES))
    elif kind == 3 and isinstance(holder[key], str):
        holder[key] = rng.choice(NAMES)
    elif isinstance(holder[key], (int, float)) and kind == 4:
        holder[key] += rng.choice((-1, 1, 1000, 10**10))
    else:
        holder[key] = rng.choice(VALUES)
    return json.dumps(found)


def _objects(value):
    """List the objects and arrays in a JSON value."""
    if isinstance(value, (dict, list)):
        yield value
        for each in value.values() if isinstance(value, dict) else value:
            yield from _objects(each)


def _repeated(text, key, value):
    """Return a JSON text in which a key is there twice, beside itself."""
    name = json.dumps(key)
    return text.replace(f"{name}:", f"{name}: {json.dumps(value)}, {name}:", 1)
