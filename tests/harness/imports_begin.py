"""The first module that a fork server imports, and no other process.

- The server ends with the process that has started it, and its workers end with the server: they have memory, and are
  stopped between two functions, so that they would not notice by themselves.
- Garbage is not collected until `imports_end` is imported too: imports make nothing but what stays. Collections would
  take a fifth of the time of all imports.
"""

import gc

from parent import end_with_parent

end_with_parent()
gc.disable()
