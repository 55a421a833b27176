"""How Sphinx reads the course. build.py runs it; nothing here reaches for the network."""

import json
import sys
from pathlib import Path

from sphinx.search import languages

import ddpz_lite

sys.path.insert(0, str(Path(__file__).parent))
from docstrings import as_rst
from searching import SearchWithChinese

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
html_favicon = "favicon.svg"
html_theme_options = {"light_css_variables": {"code-font-size": "0.77rem"}}  # lines fit the page
html_static_path = ["site.css", "states.js", "widgets.js", "cards.js", "find.js", "wide.js"]
html_css_files = ["site.css"]
html_js_files = [(name, {"defer": "defer"}) for name in ("find.js", "wide.js")]
html_show_search_summary = False  # it would be fetched, which a page from a file may not
html_copy_source = False
html_domain_indices = False
html_show_sourcelink = False
html_show_copyright = False

# Where the course lies, once it has addresses.
plan = Path(__file__).parent / "lessons/plan.json"
addresses = json.loads(plan.read_text(encoding="utf-8"))["addresses"] if plan.exists() else {}
html_baseurl = addresses.get("site", "")
if repository := addresses.get("repository"):
    icon = {"name": "Repository", "url": repository, "html": "Repository", "class": ""}
    html_theme_options["footer_icons"] = [icon]


def _docstring(app, what, name, obj, options, lines):
    lines[:] = as_rst(lines)


def setup(app):
    languages[language] = SearchWithChinese
    app.connect("autodoc-process-docstring", _docstring)
