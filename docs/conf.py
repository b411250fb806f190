"""How the pages of this folder become a site: `python -m sphinx -W --keep-going -n -b html docs site`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from ops import VERSION

project = "headrace"
copyright = "the headrace authors"  # noqa: A001 - Sphinx's name
version = release = VERSION

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
exclude_patterns = ["_build"]
# Commands and diagrams are shown as they are, without a guess at their language.
highlight_language = "none"

html_theme = "furo"
html_title = "headrace"
html_show_copyright = False
html_show_sphinx = False
