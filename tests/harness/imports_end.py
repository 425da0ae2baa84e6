"""Once imported, garbage is collected again, but for what has been imported before: see `imports_begin`."""

from quick_collections import ignore_what_exists

ignore_what_exists()
