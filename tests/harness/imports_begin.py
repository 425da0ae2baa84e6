"""Once imported, garbage is not collected, until `imports_end` is imported too: imports make nothing but what stays.

It is the first module that a fork server imports. Collections would take a fifth of the time of all its imports.
"""

import gc

gc.disable()
