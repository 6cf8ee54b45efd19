"""Sphinx's configuration: make site. No notebook is run."""

import os
import sys
from pathlib import Path

from docutils import nodes
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import website  # noqa: E402

PARTS = ROOT / "build" / "players"
website.write_players(PARTS)

project, author = "d2lpar", "The d2lpar authors"
project_copyright = "The d2lpar authors, MIT licence"
language = "en"
root_doc = "docs/index"
include_patterns = ["docs/*.md", "notebooks/*.ipynb", "notebooks/exercises/*.ipynb"]
extensions = ["myst_nb", "sphinx_copybutton", "sphinx.ext.autodoc"]
extensions += ["sphinx.ext.napoleon", "sphinx.ext.viewcode"]
nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide it"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
myst_html_meta = {
    "description": "Deep networks on many devices: every part built by hand in PyTorch."
}
highlight_language = "none"  # of fences in prose; a notebook's cells have their own
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
add_module_names = False
pygments_style = "a11y-high-contrast-light"

html_theme = "sphinx_book_theme"
html_title = "d2lpar"
html_static_path = ["_static", "ring.svg"]
html_css_files = ["site.css"]
html_favicon = "_static/icon.svg"
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_use_index = html_domain_indices = False  # one can search
html_copy_source = True  # what the download button hands out
html_sourcelink_suffix = ""
html_sidebars = {"**": ["navbar-logo", "search-field", "sbt-sidebar-nav"]}
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
        "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    }


def complete(app, docname: str, source: list[str]) -> None:
    """Write lists of chapters and names; let links to the repository lead to pages."""
    if docname.startswith("docs/"):
        text = source[0].replace("CARDS", website.cards(PARTS))
        text = text.replace("CONTENTS", website.contents())
        text = text.replace("REFERENCE", website.reference())
        text = text.replace("](../notebooks/exercises)", "](exercises.md)")
        source[0] = text.replace("](../README.md)", "](students.md)")


def describe_figures(app, doctree) -> None:
    """Give each figure the words that it carries: d2lpar.plot puts them there."""
    for image in doctree.findall(nodes.image):
        path = Path(app.srcdir, image["uri"].lstrip("/"))
        if path.suffix == ".png" and path.is_file():
            words = Image.open(path).info.get("Description", image.get("alt", ""))
            image["alt"] = words


def leave_out_fields(app, what, name, obj, skip, options) -> bool | None:
    """Leave out fields of named tuples, which the signature has, and matplotlib's."""
    field = (getattr(obj, "__doc__", None) or "").startswith("Alias for field")
    theirs = not (getattr(obj, "__module__", None) or "d2lpar").startswith("d2lpar")
    return True if field or theirs else None


def finish(app, exception) -> None:
    """Let the folder open on its front page; name the theme's arrows in the sidebar."""
    if exception:
        return
    page = '<!doctype html><title>d2lpar</title><a href="docs/index.html">d2lpar</a>'
    page += '<meta http-equiv="refresh" content="0; url=docs/index.html">'
    Path(app.outdir, "index.html").write_text(page, encoding="utf-8")
    for path in Path(app.outdir).rglob("*.html"):
        text = path.read_text("utf-8")
        named = text.replace("<summary><span", '<summary aria-label="Pages"><span')
        if named != text:
            path.write_text(named, encoding="utf-8")


def setup(app) -> None:
    """Called by Sphinx."""
    app.connect("source-read", complete)
    app.connect("doctree-read", describe_figures)
    app.connect("autodoc-skip-member", leave_out_fields)
    app.connect("build-finished", finish)
