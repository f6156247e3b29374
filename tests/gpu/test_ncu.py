"""Steps over their estimates, without a GPU: what is asked of Nsight Compute, and that tables take the kernels."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="its launch tables are Triton's: pip install triton")

from tests.gpu import ncu


def test_a_step_over_its_estimate_is_reported(tmp_path, monkeypatch):
    said = []

    def run_ncu(command, **options):
        said.append(command)
        return SimpleNamespace(stdout="busy", stderr="")

    monkeypatch.setattr(ncu.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(ncu.subprocess, "run", run_ncu)
    for name, step in ncu.STEPS.items():
        assert ncu.judged(name, step, 1.29e-6 * step.micros, tmp_path).get("report") is None
    found = ncu.judged("pairs of 128, causal", ncu.STEPS["pairs of 128, causal"], 9e-3, tmp_path)
    assert found == {"micros": 9000.0, "estimate": 6300, "ratio": 1.43, "report": "ncu-pairs-of-128-causal.txt"}
    assert (tmp_path / found["report"]).read_text() == "busy"
    ((tool, *words),) = said
    assert (tool, words[words.index("--kernel-name") + 1]) == ("/bin/ncu", "regex:long_")


def test_tables_of_a_step_take_its_kernels():
    for step in ncu.STEPS.values():
        with ncu.taken(step):
            for table, config in step.tables.items():
                head_dim = step.shape[1] * step.shape[3] if step.op == "tssa" else step.shape[3]
                assert table.config(torch.device("cpu"), head_dim, step.shape[2], False, torch.bfloat16) == config
