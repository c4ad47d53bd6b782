"""The `prefixpool` command; the only package that may import all the others."""
