"""Model families, a folder each; the entry point `mmspec.families` names their records."""
