"""The core: drafts, scores, verdicts and the loop. Knows no method and no model by name."""
