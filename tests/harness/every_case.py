"""Whether tests visit all their cases, as `make test-all` does before a release, or the everyday part of them."""

import os

EVERY_CASE = os.environ.get("SHARDZOO_TESTS") == "all"
