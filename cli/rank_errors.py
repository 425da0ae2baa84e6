"""Reports a user's error on several ranks: prints each message once, whichever ranks raise it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta

from ..files.verbosity import is_verbose
from ..trainer.launch.rank_info import RankInfo
from .console import (
    USAGE_ERROR,
    find_user_error,
    print_any_text,
    print_error,
    silence_optional_libraries,
)

PACKAGE = __name__.partition(".")[0]
# In which all ranks with the same error are expected to raise it.
REPORT_TIMEOUT = timedelta(seconds=5)


def read_rank() -> RankInfo | None:
    """Returns the rank of this process. Without one, because a launcher's variable is wrong, prints
    why, and returns None: the command ends with exit code 2.
    """
    try:
        return RankInfo.from_environment()
    except ValueError as error:
        print_error(error)
        return None


def run_and_report_once(
    work: Callable[[], int], launch: RankInfo, options: Sequence[str] = ()
) -> int:
    """Runs a command on this rank and returns its exit code.

    A user's error (`ValueError`, `OSError`) becomes exit code 2 and a message on stderr. The first
    rank reports an error that all ranks raise. An error that only other ranks raise is reported by
    them.

    Args:
        options: The names of the command's arguments, which messages spell as options.
    """
    print_any_text()
    silence_optional_libraries()
    try:
        return work()
    except Exception as error:
        known = find_user_error(error)
        if launch.world_size == 1:
            _report(known, options)
        else:
            _report_once(known, launch, options)
        return USAGE_ERROR


def _report_once(error: ValueError | OSError, launch: RankInfo, options: Sequence[str]) -> None:
    import torch.distributed as dist  # It takes seconds.

    if not dist.is_initialized():
        # Ranks of one machine have read the same command line and the same files.
        is_first_of_machine = launch.local_rank == 0 and launch.rank >= launch.local_world_size
        if launch.is_first or is_first_of_machine:
            _report(error, options)
        else:
            # A launcher stops all ranks as soon as one has failed, which must not be before the
            # report.
            time.sleep(REPORT_TIMEOUT.total_seconds())
        return

    # This uses the group's store instead of a collective, because another rank may be inside a
    # different collective.
    store = dist.distributed_c10d._get_default_store()
    reported = f"reported: {error}"
    seen = [f"seen by {rank}: {error}" for rank in range(launch.world_size)]
    awaited = [reported]
    if launch.is_first:
        awaited = seen[1:]
        _report(error, options)
        store.set(reported, "")
    try:
        store.wait(awaited, REPORT_TIMEOUT)
        store.set(seen[launch.rank], "")
    except RuntimeError:
        # Either the time is over, or the store has ended with the first rank, which then did not
        # raise this error.
        if not launch.is_first:
            _report(error, options)


def _report(error: ValueError | OSError, options: Sequence[str]) -> None:
    """Prints the message, and the traceback with `--verbose`, or if a ValueError was raised outside
    this package.
    """
    print_error(error, options)
    if isinstance(error, OSError):  # of the user's disk
        return
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if is_verbose() or frame.f_globals["__name__"].partition(".")[0] != PACKAGE:
        traceback.print_exception(error)
