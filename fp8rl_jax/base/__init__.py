"""Utilities that every package may import: errors, files, processes, caches and settings.

::

    environment ------------> meeting -> processes   join, exchange host values, end
    JAX's settings ---------> jax_settings, exact_jit, compiling, compilation_cache, user_cache
    a user's text ----------> bounds (numbers), by_name and user_code (functions), paths
    files of other programs -> json_file (limits) and whole_file (atomic writes)
                                  |
                                  v
                               errors.UserError: a one-sentence message, printed by `cli`

Read `errors` and `processes` first. Environment variables, JAX's settings and the platform are read
here, in `cli/`, and in the few files that tests/test_imports.py lists; all other code takes
arguments. Not here: parsing of commands (`cli`) and the table of fields (`config`).
"""
