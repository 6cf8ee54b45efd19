"""Sphinx's configuration, used by tools/website.py; nothing is executed."""

import os
import sys
from pathlib import Path

from docutils import nodes
from PIL import Image
from pydata_sphinx_theme.utils import get_theme_options_dict

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import d2lpar  # noqa: E402

project, author, release = "d2lpar", "The d2lpar authors", d2lpar.__version__
project_copyright = "The d2lpar authors, MIT licence"
language = "en"
extensions = [
    "myst_nb",
    "sphinx_copybutton",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]

nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = "Show the code that the chapter has defined"
nb_code_prompt_hide = "Hide it"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
add_module_names = False
pygments_style = "a11y-high-contrast-light"

html_theme = "sphinx_book_theme"
html_title = "d2lpar"
html_static_path = ["_static", "ring.svg"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_favicon = "_static/icon.svg"
html_show_sourcelink = False
html_use_index = html_domain_indices = False  # one can search
html_copy_source = True  # what the download button hands out
html_sourcelink_suffix = ""
html_sidebars = {
    "**": ["navbar-logo.html", "search-field.html", "sbt-sidebar-nav.html"]
}
html_theme_options = {
    "navbar_persistent": [],  # the sidebar has a field for searching, and one is enough
    "use_download_button": True,
    "home_page_in_toc": False,
    "show_toc_level": 2,
    "show_navbar_depth": 1,
    "logo": {"text": "d2lpar", "alt_text": "d2lpar"},
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
if repository := os.environ.get("D2LPAR_REPOSITORY", "").rstrip("/"):
    html_theme_options |= {
        "repository_url": repository,
        "repository_branch": os.environ.get("D2LPAR_BRANCH", "main"),
        "use_repository_button": True,
        "use_source_button": True,
        "launch_buttons": {
            "binderhub_url": "https://mybinder.org",
            "colab_url": "https://colab.research.google.com",
            "notebook_interface": "jupyterlab",
        },
    }


def describe_figures(app, doctree) -> None:
    """Give each figure the words that it carries: d2lpar.plot puts them there."""
    for image in doctree.findall(nodes.image):
        path = Path(app.srcdir, image["uri"].lstrip("/"))
        if path.suffix == ".png" and path.is_file():
            image["alt"] = Image.open(path).info.get(
                "Description", image.get("alt", "")
            )


def leave_out_fields(app, what, name, obj, skip, options) -> bool | None:
    """Leave out fields of named tuples, which the signature has, and matplotlib's."""
    field = (getattr(obj, "__doc__", None) or "").startswith("Alias for field")
    theirs = (getattr(obj, "__module__", None) or "").startswith("matplotlib")
    return True if field or theirs else None


def offer_source(app, pagename, templatename, context, doctree) -> None:
    """Show the button for a page's source only where the repository has that file."""
    if repository and pagename in app.env.found_docs:
        there = (ROOT / app.env.doc2path(pagename, base=False)).is_file()
        get_theme_options_dict(app)["use_source_button"] = there


def setup(app) -> None:
    """Called by Sphinx."""
    # before the theme's own
    app.connect("html-page-context", offer_source, priority=400)
    app.connect("autodoc-skip-member", leave_out_fields)
    app.connect("doctree-read", describe_figures)
