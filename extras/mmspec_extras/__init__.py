"""Methods and model families of the literature that did not pay where we measured them."""
