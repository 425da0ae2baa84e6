"""Once imported, `os.fsync` does not wait for the disk: tests kill processes, which lose nothing, and no machines."""

import os


def check(descriptor: int) -> None:
    """Raises what `os.fsync` would of a descriptor that is not open."""
    os.fstat(descriptor)


os.fsync = check
