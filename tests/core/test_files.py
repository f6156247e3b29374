"""Files that are whole or absent, whoever writes them at once."""

import os

import pytest

from crate_kernels._core import files


def fail(path):
    with files.replacing(path) as partial:
        partial.write_bytes(b"half")
        raise OSError("disk full")


@pytest.mark.parametrize("failing", [False, True], ids=["both_succeed", "one_fails"])
def test_writers_of_one_path_do_not_meet(failing, tmp_path):
    path = tmp_path / "file"
    with files.replacing(path) as slow:
        slow.write_bytes(b"slow, ")
        if failing:
            with pytest.raises(OSError, match="disk full"):
                fail(path)
            assert not path.exists()
        else:
            files.put(path, b"quick")
            assert path.read_bytes() == b"quick"
        with slow.open("ab") as file:
            file.write(b"and whole")
    assert path.read_bytes() == b"slow, and whole"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="modes are of POSIX: run on Linux")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_file_has_the_mode_of_any_other(umask, mode, tmp_path):
    before = os.umask(umask)
    try:
        path = files.put(tmp_path / "file", b"content")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == mode
