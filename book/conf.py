"""How Sphinx reads the course. build.py runs it; nothing here reaches for the network."""

import sys
from pathlib import Path

import ddpz_lite

sys.path.insert(0, str(Path(__file__).parent))
from docstrings import as_rst

project = "ddpz-lite"
version = release = ddpz_lite.__version__
language = "en"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
root_doc = "index"

# Notebooks are shown as they were stored. The widgets in them have a still form of their own.
nb_execution_mode = "off"
nb_ipywidgets_js = {}
nb_merge_streams = True  # lines printed one after the other are one text
nb_code_prompt_show, nb_code_prompt_hide = "Show the code", "Hide the code"
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
add_module_names = False
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = "ddpz-lite"
html_theme_options = {"light_css_variables": {"code-font-size": "0.77rem"}}  # lines fit the page
html_copy_source = False
html_domain_indices = False
html_show_sourcelink = False
html_show_copyright = False


def _docstring(app, what, name, obj, options, lines):
    lines[:] = as_rst(lines)


def setup(app):
    app.connect("autodoc-process-docstring", _docstring)
