"""How Sphinx builds the documentation: ``make docs``, or ``sphinx-build -W --keep-going docs build/site``.

The reference is read from the docstrings of the sources beside this file, whatever version is installed. Of them only
what needs numpy, platformdirs and psutil is imported: engines, and the libraries that they need, are not.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs")]

from check_site import is_searched  # noqa: E402 - the site's own check knows what its search is to find

project = "paceline"
author = "The paceline authors"
copyright = "the paceline authors; Apache-2.0"  # noqa: A001 - Sphinx calls it so
version = release = re.search(r'^__version__ = "(.+)"', (ROOT / "src/paceline/__init__.py").read_text(), re.M)[1]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["results", "drawings"]

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # Pygments knows no colons in names of Prometheus

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
autodoc_default_options = {"members": True}
autodoc_mock_imports = [
    "accelerate",
    "gguf",
    "huggingface_hub",
    "jinja2",
    "llama_cpp",
    "llguidance",
    "torch",
    "transformers",
]
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "paceline"
html_static_path = ["_static"]
html_css_files = ["paceline.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e4f", "color-brand-content": "#0b6e4f"},
    "dark_css_variables": {"color-brand-primary": "#5fd0a5", "color-brand-content": "#5fd0a5"},
    "footer_icons": [],
}
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True


def setup(app: Any) -> None:
    """Leave pages that are no help to users out of the search."""

    def leave_out(_app: Any, env: Any) -> None:
        for page in env.found_docs:
            if not is_searched(page):
                env.metadata[page]["nosearch"] = True

    app.connect("env-updated", leave_out)
