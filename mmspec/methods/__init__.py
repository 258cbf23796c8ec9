"""Methods, a folder each; `mmspec.plugins` finds them."""
