"""A trained policy: loading, text from it, export."""
