"""What may spill: nothing strict with the versions that launch tables are chosen by, elsewhere what is recorded."""

import json

import pytest

from tests.tools.aot import harness

RECORD = {
    "case sm_100 kernel": 8,
    "case sm_90 kernel": 8,
    "case sm_90 kernel triton 3.7": 16,  # has no effect
    "case sm_90 kernel triton 3.9": 16,
}


@pytest.mark.parametrize(
    ("version", "target", "strict", "allowed"),
    [
        ((3, 7), "sm_90", True, 0),
        ((3, 9), "sm_90", True, 16),
        ((3, 8), "sm_90", True, 0),
        ((3, 7), "sm_100", True, 8),
        ((3, 9), "sm_100", False, 8),
        ((3, 9), "sm_90", False, 8),
    ],
)
def test_spills_are_compared_with_the_record_of_the_version(version, target, strict, allowed, tmp_path, monkeypatch):
    (tmp_path / "spills.json").write_text(json.dumps(RECORD))
    monkeypatch.setattr(harness, "RECORDED", tmp_path / "spills.json")
    monkeypatch.setattr(harness, "VERSION", version)
    for stack in (0, 8, 16, 24):
        kernel = harness.Kernel("kernel", 255, stack, 0, 0, "")
        assert bool(harness.over_limits([kernel], target, "case", strict)) == (stack > allowed)
