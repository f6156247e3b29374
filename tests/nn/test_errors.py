"""Errors of the modules: each names the module, the argument, what was expected and what came."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false

import pytest
import torch

from crate_kernels.nn import ISTA, MSSA, TSSA, CausalMSSA, CausalTSSA, OvercompleteISTA

BAD = {
    "mssa-dim": (lambda: MSSA(0), ValueError, "MSSA: dim must be >= 1, got 0"),
    "mssa-heads": (lambda: MSSA(8, 2.0), TypeError, "MSSA: heads must be an int, got float"),
    "mssa-dim-head": (lambda: MSSA(8, 2, -1), ValueError, "MSSA: dim_head must be >= 1, got -1"),
    "mssa-dropout": (lambda: MSSA(8, dropout=1.0), ValueError, "MSSA: dropout must be < 1.0, got 1.0"),
    "mssa-scale": (lambda: MSSA(8, scale=float("nan")), ValueError, "MSSA: scale must be finite, got nan"),
    "mssa-tied": (lambda: MSSA(8, tied=1), TypeError, "MSSA: tied must be a bool, got int"),
    "mssa-phi": (lambda: MSSA(8, phi="tanh")(torch.ones(1, 3, 8)), ValueError, "mssa: phi must be one of"),
    "mssa-rank": (lambda: MSSA(8)(torch.ones(3, 8)), ValueError, r"MSSA: x must be \(batch, seqlen, dim=8\), got"),
    "mssa-width": (lambda: MSSA(8)(torch.ones(1, 3, 9)), ValueError, r"got \(1, 3, 9\)"),
    "mssa-list": (lambda: MSSA(8)([1]), TypeError, r"MSSA: x must be a Tensor \(batch, seqlen, dim=8\), got list"),
    "mssa-int": (lambda: MSSA(8)(torch.ones(1, 3, 8).int()), ValueError, "MSSA: x must have a floating dtype, got"),
    "mssa-bias": (lambda: MSSA(8, bias_out=1), TypeError, "MSSA: bias_out must be a bool, got int"),
    "tssa-bias": (lambda: TSSA(8, qkv_bias="no"), TypeError, "TSSA: qkv_bias must be a bool, got str"),
    "tssa-proj": (lambda: TSSA(8, proj_drop=1.0), ValueError, "TSSA: proj_drop must be < 1.0, got 1.0"),
    "causal-mssa-bias": (lambda: CausalMSSA(8, 2, bias=None), TypeError, "CausalMSSA: bias must be a bool, got None"),
    "causal-tssa-bias": (lambda: CausalTSSA(8, 2, 4, bias=0), TypeError, "CausalTSSA: bias must be a bool, got int"),
    "tssa-heads": (lambda: TSSA(10, 3), ValueError, "TSSA: dim must be a multiple of num_heads = 3, got 10"),
    "tssa-drop": (lambda: TSSA(8, attn_drop=-0.1), ValueError, "TSSA: attn_drop must be >= 0.0"),
    "tssa-width": (lambda: TSSA(8)(torch.ones(1, 3, 9)), ValueError, r"TSSA: x must be \(batch, seqlen, dim=8\)"),
    "causal-heads": (lambda: CausalTSSA(10, 3, 4), ValueError, "CausalTSSA: n_embd must be a multiple of n_head = 3"),
    "causal-mssa-heads": (lambda: CausalMSSA(10, 3), ValueError, "CausalMSSA: n_embd must be a multiple of n_head = 3"),
    "causal-mssa-drop": (lambda: CausalMSSA(8, 2, dropout=1), ValueError, "CausalMSSA: dropout must be < 1.0, got 1.0"),
    "causal-mssa-scale": (lambda: CausalMSSA(8, 2, scale="1"), TypeError, "CausalMSSA: scale must be a number, got st"),
    "causal-mssa-rank": (lambda: CausalMSSA(8, 2)(torch.ones(3, 8)), ValueError, r"CausalMSSA: x must be \(batch"),
    "causal-block": (lambda: CausalTSSA(8, 2, 0), ValueError, "CausalTSSA: block_size must be >= 1, got 0"),
    "causal-long": (
        lambda: CausalTSSA(8, 2, 4)(torch.ones(1, 5, 8)),
        ValueError,
        "tssa: denom_bias must cover the sequence",
    ),
    "ista-dim": (lambda: ISTA("8"), TypeError, "ISTA: dim must be an int, got str"),
    "ista-prox": (lambda: ISTA(8, prox="hard"), ValueError, "ISTA: prox must be 'nonnegative', 'soft' or 'mm', got"),
    "ista-alpha": (lambda: ISTA(8, prox="mm", alpha=0.0), ValueError, "ISTA: alpha must be > 0, got 0.0"),
    "ista-step": (lambda: ISTA(8, step_size=torch.ones(())), TypeError, "ISTA: step_size must be a number, got a"),
    "ista-negative": (lambda: ISTA(8, lambd=-1), ValueError, "ISTA: lambd must be >= 0.0, got -1.0"),
    "overcomplete-negative": (
        lambda: OvercompleteISTA(8, step_size=-0.1),
        ValueError,
        "OvercompleteISTA: step_size must be >= 0.0, got -0.1",
    ),
    "ista-width": (lambda: ISTA(8)(torch.ones(1, 9)), ValueError, "ista: x must be"),
    "overcomplete-steps": (lambda: OvercompleteISTA(8, steps=0), ValueError, "OvercompleteISTA: steps must be >= 1"),
    "overcomplete-hidden": (lambda: OvercompleteISTA(8, 0), ValueError, "OvercompleteISTA: hidden must be >= 1"),
    "overcomplete-tied": (lambda: OvercompleteISTA(8, tied=None), TypeError, "OvercompleteISTA: tied must be a bool"),
}


@pytest.mark.parametrize(("call", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
