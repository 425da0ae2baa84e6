"""kill -9 at random requests to an S3 server: what was killed goes on, and no byte of it differs.

`SHARDZOO_KILLS=50` kills so often; `make test-all` makes do with a few.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
from object_stores import needs_s3
from store_runs import convert_in_process, train, train_in_process

from shardzoo.convert.operations import merge, split
from shardzoo.convert.verification import verify_folder
from shardzoo.files.object_store import list_objects, read_object
from shardzoo.files.working_copies import find_source

KILLS = int(os.environ.get("SHARDZOO_KILLS", "4"))
STEPS = 30
# Of a process that begins, works and sends checkpoints; the moments are anywhere among them.
MOST_REQUESTS = 120

pytestmark = [needs_s3, pytest.mark.before_release, pytest.mark.timeout(300 + 60 * KILLS)]


def kill_at_request(s3, process, count: int, delay: float) -> None:
    """Kills a process when the server has got so many requests, and after some seconds more."""
    left = count

    def on_request() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            time.sleep(delay)
            os.kill(process.pid, signal.SIGKILL)

    s3.on_request = on_request


def run_until_killed(s3, fork_server, function, arguments, generator, most=MOST_REQUESTS) -> bool:
    """Returns whether the process was killed; if not, it has ended well."""
    process = fork_server.Process(target=function, args=arguments)
    s3.on_request = lambda: None
    process.start()
    kill_at_request(
        s3, process, generator.randrange(1, most), generator.choice([0, generator.random() / 20])
    )
    process.join()
    s3.on_request = lambda: None
    assert process.exitcode in (0, -signal.SIGKILL), process.exitcode
    return process.exitcode != 0


def test_killed_runs_equal_one_on_a_disk(s3, s3_bucket, fork_server, tmp_path):
    train(tmp_path / "run", STEPS, save_total_limit=2)
    generator = random.Random(0)
    done = 0
    finished = 0
    url = f"{s3_bucket}/run-0"
    while done < KILLS:
        # Every other time another machine goes on, which has no local copies.
        folder = tmp_path / f"objects-{done if generator.random() < 0.5 else 'same'}"
        variables = {**s3.variables, "SHARDZOO_OBJECTS": str(folder)}
        arguments = (variables, url, STEPS)
        if run_until_killed(s3, fork_server, train_in_process, arguments, generator):
            done += 1
        else:
            compare(url, tmp_path / "run")
            finished += 1
            url = f"{s3_bucket}/run-{finished}"
    process = fork_server.Process(target=train_in_process, args=(variables, url, STEPS))
    process.start()
    process.join()
    assert process.exitcode == 0
    compare(url, tmp_path / "run")
    print(f"{done} kills, {finished + 1} whole runs")


def compare(url: str, folder: Path) -> None:
    """Compares the losses of all steps, and the bytes of the last checkpoint."""

    def losses(content: bytes) -> list[tuple[int, float]]:
        records = map(json.loads, content.splitlines())
        return [(record["step"], record["train/loss"]) for record in records]

    logged = losses((folder / "metrics.jsonl").read_bytes())
    assert [step for step, _ in logged] == list(range(1, STEPS + 1))
    assert losses(read_object(f"{url}/metrics.jsonl")) == logged
    checkpoint = f"checkpoints/step-{STEPS:06d}"
    names = list_objects(f"{url}/{checkpoint}")
    assert names.keys() == {path.name for path in (folder / checkpoint).iterdir()}
    for name in names:
        assert (
            read_object(f"{url}/{checkpoint}/{name}") == (folder / checkpoint / name).read_bytes()
        )


def test_killed_conversions_leave_nothing_or_a_whole_folder(
    s3, s3_bucket, fork_server, zoo, tmp_path
):
    sizes = {"heads": 4, "head_size": 16, "feed_forward": 64, "vocabulary": 999}
    folder = zoo.make(tmp_path / "hf", "gpt2", **sizes)
    split(folder, tmp_path / "split", 4)
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "split").iterdir()}
    merge(folder, f"{s3_bucket}/hf")
    generator = random.Random(0)
    done = 0
    seen = {"nothing": 0, "incomplete": 0, "whole": 0}
    number = 0
    resume = False
    source = str(folder)
    variables = {**s3.variables, "SHARDZOO_OBJECTS": os.environ["SHARDZOO_OBJECTS"]}
    while done < KILLS:
        url = f"{s3_bucket}/split-{number}"
        if not resume:
            source = generator.choice([str(folder), f"{s3_bucket}/hf"])
        arguments = (variables, source, url, resume)
        if run_until_killed(s3, fork_server, convert_in_process, arguments, generator, most=60):
            done += 1
            resume = True
            seen[look_at(url, wanted)] += 1
        else:
            assert look_at(url, wanted) == "whole"
            number += 1
            resume = False
    print(f"{done} kills, after which there was: {seen}; {number} whole conversions")


def look_at(url: str, wanted: dict[str, bytes]) -> str:
    """Returns what a reader finds. Raises an error if it is a part of a model."""
    from shardzoo.convert.operations import Options

    try:
        copy = find_source(url)
    except ValueError as error:
        if "there is nothing at" in str(error):
            return "nothing"
        if "is not complete" not in str(error):
            raise
        return "incomplete"
    verify_folder(copy, Options())
    assert {name: read_object(f"{url}/{name}") for name in list_objects(url)} == wanted
    return "whole"
