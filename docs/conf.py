"""How Sphinx makes pages of docs/ and of the public docstrings: ``make docs``."""

from docutils import nodes
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

mathjax4_config = {"output": {"displayOverflow": "linebreak"}}  # a phone breaks an equation and hides nothing

autodoc_member_order = "bysource"
maximum_signature_line_length = 100
napoleon_numpy_docstring = False

html_theme = "alabaster"
html_theme_options = {
    "description": "Fused operators for white-box transformers",
    "page_width": "1240px",
    "body_max_width": "940px",
    "sidebar_width": "240px",
    "show_powered_by": False,
    "show_relbars": True,  # on a phone the table of contents is below the page
}
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}
html_show_copyright = html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]


def put_tables_in_boxes(app: Sphinx, doctree: nodes.document) -> None:
    """Give each table a box that scrolls, so that a wide one does not widen the page of a phone."""
    for table in list(doctree.findall(nodes.table)):
        box = nodes.container(classes=["table-box"])
        table.replace_self(box)
        box += table


def setup(app: Sphinx) -> None:
    """Box tables; show a signature once: overloads, for type checkers, differ in what is returned alone."""
    app.connect("doctree-read", put_tables_in_boxes)
    for module in ("mssa", "tssa"):
        analyzer = ModuleAnalyzer.for_module(f"crate_kernels.ops.{module}.api")
        analyzer.analyze()
        analyzer.overloads.clear()
