"""Follows the folder of a run in an object store, for the board."""

from __future__ import annotations

import threading
import time
from pathlib import Path, PurePosixPath

from ...checkpoint.manifest import MANIFEST
from ...files.object_store import list_objects
from ...files.working_copies import STATE, find_source
from ...trainer.run_lock import LOCK
from ..console import explain_error

SECONDS_BETWEEN_LOOKS = 5.0
# What the page shows, except for the checkpoints.
TEXTS = ("arguments.yaml", "metrics.jsonl", "best")


class StoredRun:
    """A local copy of what the board shows of a run in an object store.

    A thread looks every few seconds, so that a store that is slow or away holds up no page. Of the
    checkpoints it fetches the last one's manifest alone; of the others the names are enough.

    Attributes:
        url: The folder of the run.
        path: The copy.
        problem: Why the store could not be read the last time; empty if it could.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.problem = ""
        self.path = self._look()

    def follow(self) -> None:
        """Begins to look for what is new, as long as this process runs."""
        threading.Thread(target=self._follow, daemon=True, name="board").start()

    def _follow(self) -> None:
        while True:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            try:
                self._look()
                self.problem = ""
            except (OSError, ValueError) as error:
                self.problem = explain_error(error)

    def _look(self) -> Path:
        """Makes the copy equal to the store.

        Raises:
            ValueError: There is no run.
            OSError: The store cannot be reached, or refuses.
        """
        objects = list_objects(self.url)
        if not objects.keys() & {*TEXTS, LOCK}:
            raise ValueError(
                f"{self.url} holds no run (no arguments.yaml, no metrics.jsonl); name the folder of a run"
            )
        steps: list[str] = []
        for name in objects:
            file = PurePosixPath(name)
            if file.name == STATE and file.parent.parent.name == "checkpoints":
                steps.append(str(file.parent))
        last = max(steps, key=lambda step: (len(step), step), default="")
        path = find_source(self.url, (*TEXTS, f"{last}/{MANIFEST}"))
        find_source(self.url, (STATE,), largest=0)
        assert path is not None
        path.mkdir(exist_ok=True)  # A run that has just begun has sent nothing yet.
        return path
