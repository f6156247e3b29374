"""Philox4x32-10 against the known answers published with Random123."""

import pytest

from tests.ops.naive_philox import philox4x32_10

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        pytest.param((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), id="zeros"),
        pytest.param(
            (ONES, ONES, ONES, ONES), (1 << 64) - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD), id="ones"
        ),
        pytest.param(PI, 0x299F31D0A4093822, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1), id="digits-of-pi"),
    ],
)
def test_known_answer(counter, key, expected):
    assert philox4x32_10(counter, key) == expected


def test_a_negative_seed_is_its_twos_complement():
    assert philox4x32_10((1, 2, 3, 4), -1) == philox4x32_10((1, 2, 3, 4), (1 << 64) - 1)
