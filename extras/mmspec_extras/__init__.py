"""Methods and model families from the literature that brought no gain where mmspec measured them."""
