"""The ground floor: errors, files, processes, caches and settings, which every room may use.

Here, in `cli/`, and in the few files that tests/test_imports.py lists, a program asks the machine:
environment variables, JAX's settings, the platform. Everything else takes arguments.
"""
