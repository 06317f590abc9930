#!/usr/bin/env bash
# The documentation site: makes a virtual environment, installs, and builds docs/_build/html. Nothing
# is fetched while the site is built. A warning is an error. Arguments go to sphinx-build:
#   bash launch/docs.sh -E      anew, not only the pages that have changed
: "${VENV:=.venv-docs}"
source "$(dirname "${BASH_SOURCE[0]}")/_venv.sh"
install_into_venv '.[docs]'
echo "building docs/_build/html (about half a minute)"
export JAX_PLATFORMS=cpu
python -m sphinx -n -W --keep-going -q -b html "$@" docs docs/_build/html
echo "open docs/_build/html/index.html"
