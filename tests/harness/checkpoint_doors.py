"""Every way into the library by which a checkpoint's folder enters it, and a process that tries them under limits."""

from __future__ import annotations

import contextlib
import hashlib
import io
import multiprocessing
import os
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

MOST_SECONDS = 10.0
MOST_GROWTH = 512 << 20  # bytes beyond what the process held before


@dataclass(frozen=True)
class Visit:
    """What happened at one door.

    accepted: whether the folder was taken. message: why not. tensors: digest of the parameters that were found, ""
    where a door shows none. crash: a traceback of anything but a refusal. growth: of memory at the peak, in bytes.
    """

    accepted: bool
    message: str = ""
    tensors: str = ""
    crash: str = ""
    seconds: float = 0.0
    growth: int = 0


def digest_of(model) -> str:
    """sha256 of the unpadded parameters by name, in fp64, which holds every type."""
    digest = hashlib.sha256()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in sorted(parameters):
        value = parameters[name].detach()
        shard = getattr(parameters[name], "shard", None)
        value = value.narrow(shard.dim, 0, shard.shape[shard.dim]) if shard else value
        digest.update(f"{name} {tuple(value.shape)}".encode())
        digest.update(value.double().numpy().tobytes())
    return digest.hexdigest()


def _loaded(folder: Path) -> str:
    import shardzoo

    return digest_of(shardzoo.from_pretrained(folder))


def _converted(folder: Path, convert: Callable[[Path, Path], object]) -> str:
    with tempfile.TemporaryDirectory() as temporary:
        destination = Path(temporary) / "converted"
        try:
            convert(folder, destination)
        except ValueError:
            assert not list(Path(temporary).iterdir()), "a refused conversion left something behind"
            raise
        return _loaded(destination)


def merge(folder: Path) -> str:
    from shardzoo import convert

    return _converted(folder, convert.merge)


def split(folder: Path) -> str:
    from shardzoo import convert

    return _converted(folder, lambda source, destination: convert.split(source, destination, 2))


def verify(folder: Path) -> str:
    from shardzoo import convert

    if differences := convert.verify_folder(folder, convert.Options()).differences:
        raise ValueError("; ".join(differences))
    return ""


def command(folder: Path) -> str:
    """The command line, which refuses with exit code 2 and one message."""
    from shardzoo.cli.convert import main

    with (
        tempfile.TemporaryDirectory() as temporary,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        code = main(["merge", str(folder), f"{temporary}/merged"])
        if code == 0:
            return _loaded(Path(temporary) / "merged")
    assert code == 2, f"exit code {code}: {errors.getvalue()}"
    assert errors.getvalue().startswith("error: "), errors.getvalue()
    assert "Traceback" not in errors.getvalue(), errors.getvalue()
    raise ValueError(errors.getvalue())


def generate(folder: Path) -> str:
    from shardzoo.generation.pipeline import TextGenerationPipeline

    return digest_of(TextGenerationPipeline(folder).model)


def finetune(folder: Path) -> str:
    import torch

    from shardzoo.finetuning.arguments import FinetuningArguments
    from shardzoo.finetuning.loading import find_source, load_model

    arguments = FinetuningArguments(model_name_or_path=str(folder), native=True)
    return digest_of(
        load_model(
            find_source(arguments), "text-generation", arguments, None, torch.device("cpu"), None
        )
    )


def find_config(folder: Path) -> str:
    from shardzoo.models import find_config

    find_config(str(folder))
    return ""


def estimate(folder: Path) -> str:
    from shardzoo.cli.estimate import main

    with (
        contextlib.redirect_stderr(io.StringIO()) as errors,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        code = main([str(folder), "--length", "16"])
    assert "Traceback" not in errors.getvalue(), errors.getvalue()
    if code == 2:
        raise ValueError(errors.getvalue())
    assert code == 0, f"exit code {code}: {errors.getvalue()}"
    return ""


def resume(folder: Path) -> str:
    from shardzoo.models import find_config, from_config
    from shardzoo.trainer.checkpointing.model_files import model_files
    from shardzoo.trainer.checkpointing.resume import find_checkpoint
    from shardzoo.trainer.launch.ranks import Ranks

    ranks = Ranks(None)
    found = find_checkpoint(folder, "latest", ranks, lambda text: None)
    if found is None:
        raise ValueError(f"{folder} is no checkpoint of training")
    model = from_config(find_config(str(folder)))
    model_files(model).load_weights(folder, ranks)
    return digest_of(model)


@contextlib.contextmanager
def _working_in(folder: str) -> Iterator[None]:
    """Changes the working directory, as contextlib.chdir of Python 3.11 does."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def shardzoo(*words: object) -> str:
    """Runs a command in a folder of its own. A refusal is one line and exit code 2, and leaves nothing behind."""
    from shardzoo.cli.main import main

    with tempfile.TemporaryDirectory() as temporary, _working_in(temporary):
        Path("text.txt").write_text("w1 w2 w3 w4 w5\n" * 40)
        with (
            contextlib.redirect_stderr(io.StringIO()) as errors,
            contextlib.redirect_stdout(io.StringIO()) as output,
        ):
            try:
                code = main([str(word) for word in words])
            except SystemExit as end:
                code = end.code
        left = sorted(str(path) for path in Path().rglob("*"))
    if code == 0:
        return ""
    said = errors.getvalue()
    assert code == 2, f"exit code {code}: {said}"
    assert len([line for line in said.splitlines() if line.strip()]) == 1, said
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]|Traceback", said + output.getvalue()), said
    assert left == ["text.txt"], left
    raise ValueError(said)


def pretrain_command(folder: Path) -> str:
    steps = ("--train-steps", 1, "--sequence-length", 16)
    return shardzoo(
        "pretrain", "--init-from", folder, "--data", "text.txt", "--output-dir", "out", *steps
    )


def finetune_command(folder: Path) -> str:
    native = (
        "--model-name-or-path",
        folder,
        "--native",
        "--train-file",
        "text.txt",
        "--train-steps",
        1,
    )
    return shardzoo(
        "finetune",
        *native,
        "--micro-batch-size",
        1,
        "--max-source-length",
        16,
        "--output-dir",
        "out",
    )


def generate_command(folder: Path) -> str:
    return shardzoo("generate", "--model", folder, "--prompt", "w1 w2", "--max-new-tokens", 1)


COMMANDS = {
    "pretrain command": pretrain_command,
    "finetune command": finetune_command,
    "generate command": generate_command,
}
DOORS: dict[str, Callable[[Path], str]] = {
    **COMMANDS,
    "from_pretrained": _loaded, "merge": merge, "split": split, "verify": verify, "command": command,
    "generate": generate, "finetune": finetune, "find_config": find_config, "estimate": estimate, "resume": resume,
}  # fmt: skip


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def _visit(door: str, folder: Path) -> Visit:
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, started = _status("VmRSS"), time.monotonic()
    try:
        result = Visit(True, tensors=DOORS[door](folder))
    except ValueError as error:
        result = Visit(False, str(error))
    except BaseException:  # whatever is no refusal
        result = Visit(False, crash=traceback.format_exc())
    seconds, growth = time.monotonic() - started, _status("VmHWM") - before
    return Visit(result.accepted, result.message, result.tensors, result.crash, seconds, growth)


def _serve(connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        door, folder = connection.recv()
        connection.send(_visit(door, folder))


class Visitor:
    """Tries doors in a process of its own, and starts another where one hangs."""

    def __init__(self) -> None:
        self._process = None

    def visit(self, door: str, folder: Path, seconds: float = MOST_SECONDS) -> Visit:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        self._connection.send((door, folder))
        try:
            if self._connection.poll(seconds):
                return self._connection.recv()
            crash = f"no answer within {seconds:.0f} s"
        except EOFError:
            crash = "the process died"
        self.close()
        return Visit(False, crash=crash)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
