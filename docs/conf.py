"""Sphinx's configuration of the documentation site: `bash launch/docs.sh` builds it.

Pages are Markdown (MyST). Parts of docs/reference are generated from the code when the site is
built (docs/_ext). Nothing is fetched: no intersphinx, no fonts or scripts from elsewhere.
"""

import pathlib
import sys

from fp8rl_jax import __version__

sys.path.insert(0, str(pathlib.Path(__file__).parent / "_ext"))

project = "fp8rl_jax"
author = "the authors of fp8rl_jax"
version = release = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "myst_nb",
    "docstrings",
    "generated",
]
exclude_patterns = ["_build", "_ext", "scripts", "studies/cells"]

# Markdown
myst_heading_anchors = 4  # links such as zero_drift.md#cpus, as a Git host has them
nb_execution_mode = "off"  # notebooks are committed with their outputs
smartquotes_action = "D"  # dashes alone: quotes and dots of docstrings are code

# Docstrings: Google style, with code in single backticks
default_role = "code"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # signatures have them
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"
# Signatures name types of JAX and NumPy, and of inner modules that have no page.
nitpick_ignore_regex = [("py:.*", ".*")]

# Appearance
html_theme = "furo"
html_title = f"fp8rl_jax {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
copybutton_exclude = ".linenos, .gp, .go"
