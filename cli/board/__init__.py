"""`shardzoo board`: a local page that shows several runs together."""
