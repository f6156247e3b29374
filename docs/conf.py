"""How Sphinx makes pages of docs/ and of the public docstrings: ``make docs``."""

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

import crate_kernels

project = "crate_kernels"
author = "The crate_kernels authors"
version = release = crate_kernels.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
# A reference that leads nowhere is a warning, and make docs makes warnings errors. Other people's names are not looked
# up: the build needs no network.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(torch|nn|collections\.abc|os|pathlib)\..*|.*\.(Self|Model)")]

myst_enable_extensions = ["dollarmath"]  # equations as GitHub renders them
myst_heading_anchors = 3

autodoc_member_order = "bysource"
maximum_signature_line_length = 100
napoleon_numpy_docstring = False

html_theme = "alabaster"
html_theme_options = {"description": "Fused operators for white-box transformers", "page_width": "1100px"}


def setup(app: Sphinx) -> None:
    """Show the signature of a function once: overloads, for type checkers, differ in what is returned alone."""
    for module in ("mssa", "tssa"):
        analyzer = ModuleAnalyzer.for_module(f"crate_kernels.ops.{module}.api")
        analyzer.analyze()
        analyzer.overloads.clear()
