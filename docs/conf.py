"""Sphinx' settings of the site that `make docs` builds."""

import logging
import os
from importlib.metadata import version as installed_version

project = "torchrec_ext"
copyright = "the authors of torchrec_ext"  # noqa: A001  (Sphinx' name)
version = release = installed_version("torchrec-ext")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_static", "_templates"]
# Blocks without a language show what a command prints.
highlight_language = "text"
# `--` is a flag.
smartquotes = False

# `:::` for directives, since a fence of backticks is a block that the tests run.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# Docstrings have the types in their signatures alone.
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]

html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False

# The site of a tag lies in a folder of that of the checkout; `make docs` names the
# tags.
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/versions.html",
        "sidebar/scroll-end.html",
    ]
}
versions = os.environ.get("DOCS_TAGS", "").split()
root = os.environ.get("DOCS_ROOT", "")
html_context = {
    "versions": [("newest", root), *((tag, f"{root}{tag}/") for tag in versions)]
    if versions
    else []
}

# fbgemm names each of its libraries when autodoc imports it.
logging.disable(logging.INFO)
