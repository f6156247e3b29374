"""The table of docs/kernels.md is what the forms of mssa's backward compile to."""

import pytest

from tests.tools.aot import harness, listing

harness.needs_compiler()

from tests.tools.aot import forms  # noqa: E402  # only where Triton compiles

PAGE = (harness.ROOT / "docs" / "kernels.md").read_text()
OUTER, INNER = ".L_x_1:", ".L_x_2:"
MULTIPLY, EXPONENT = "        /*0000*/  HMMA.16816.F32.BF16 R4, R8, R10, R4 ;", "        /*0010*/  MUFU.EX2 R4, R4 ;"


def back(to):
    return f"        /*0020*/  @P0 BRA `({to[:-1]}) ;"


def test_loops_are_the_inner_ones_before_the_exit():
    end = ["        /*0030*/  EXIT ;", ".L_x_3:", "        /*0040*/  SYNCS R4 ;", back(INNER)]
    lines = [OUTER, MULTIPLY, INNER, MULTIPLY, EXPONENT, back(INNER), back(OUTER), *end]
    assert listing.loops("\n".join(lines)) == [["HMMA.16816.F32.BF16", "MUFU.EX2", "BRA"]]
    amd = [".LBB0_1:", "\tv_mfma_f32_16x16x16_bf16 v[0:3], v4, v5, v[0:3]", "\ts_cbranch_scc1 .LBB0_1", "\ts_endpgm"]
    assert listing.loops("\n".join(amd)) == [["v_mfma_f32_16x16x16_bf16", "s_cbranch_scc1"]]


def test_the_loops_of_a_form_are_those_with_most_products_and_exponentials():
    """Heads that a form leaves have other loops before or behind, of fewer rows."""
    left = [INNER, MULTIPLY, EXPONENT, back(INNER)]
    whole = [OUTER, *[MULTIPLY] * 4, *[EXPONENT] * 2, back(OUTER)]
    masked = [".L_x_3:", *[MULTIPLY] * 3, *[EXPONENT] * 2, back(".L_x_3:")]
    end = ["        /*0030*/  EXIT ;"]
    for lines in (left + whole + masked + end, whole + masked + left + end):
        assert forms.instructions("\n".join(lines), causal=False) == 7


@pytest.mark.exhaustive  # 5 kernels a row
@pytest.mark.skipif(harness.VERSION != (3, 7), reason="needs Triton 3.7, of which the page has the figures")
@pytest.mark.parametrize("head_dim", forms.WIDTHS)
@pytest.mark.parametrize("target", harness.TARGETS)
def test_the_table_is_what_is_compiled(target, head_dim):
    assert forms.row(target, head_dim) in PAGE.splitlines()
