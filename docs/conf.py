"""Sphinx: `sphinx-build -W -b html docs docs/_build/html`. No font or script comes from outside."""

import importlib.metadata

project = "veofunc"
author = "the veofunc authors"
copyright = f"2026, {author}"
release = importlib.metadata.version("veofunc")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
nitpicky = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
# As a section of its own "Returns" is prose; the built-in one takes what stands before a colon for a type.
napoleon_custom_sections = ["Returns", "Laws", "Source"]
default_role = "code"

html_theme = "furo"
html_title = "veofunc"
html_static_path = ["_static"]
html_show_sphinx = False
html_copy_source = False
