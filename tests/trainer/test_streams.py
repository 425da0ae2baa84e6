"""Training on streams of text that are tokenized on the way."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tokenizers
from number_texts import Plain
from tokenizers import models, pre_tokenizers
from training import losses, run_training

TEXTS = [
    " ".join(map(str, np.random.default_rng(k).integers(2, 60, 5 + k % 30))) for k in range(80)
]


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """The file of a tokenizer of numbers."""
    path = tmp_path_factory.mktemp("words") / "tokenizer.json"
    made = tokenizers.Tokenizer(
        models.WordLevel({str(number): number for number in range(60)}, unk_token="0")
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(path))
    return path


def trains(mesh, folder, words, micro=4, texts=TEXTS, **arguments):
    from shardzoo.data import BlockStream, PretrainingData, TextStream, load_tokenizer

    rank, world = (mesh.dp_rank, mesh.dp_size) if mesh else (0, 1)
    source = TextStream([{"text": text} for text in texts], held_out_fraction=0.1)
    config = PretrainingData(Plain(), 8, micro_batch_size=micro)
    data = BlockStream(
        source, load_tokenizer(words), config, rank=rank, world_size=world, block_tokens=300
    )
    env = "pytorchDDP" if mesh else "pytorch"
    return losses(
        run_training(mesh, folder, data=data, micro_batch_size=micro, env_type=env, **arguments)[0]
    )


@pytest.mark.before_release
def test_ranks_train_the_same_curve(run_mesh, tmp_path, words):
    """Over several blocks and the end of an epoch."""
    one = trains(None, tmp_path / "one", words, train_steps=70)
    two = run_mesh(
        1, partial(trains, folder=tmp_path / "two", words=words, micro=2, train_steps=70), data=2
    )
    assert two[0] == two[1]
    np.testing.assert_allclose(two[0], one, rtol=1e-5)  # sums in another order
    assert one[-1] < one[0]


@pytest.mark.before_release
def test_a_stopped_run_resumes_with_other_ranks(run_mesh, tmp_path, words):
    whole = trains(None, tmp_path / "whole", words, train_steps=60)
    settings = {"train_steps": 60, "save_interval": 17}
    for again, stop in ((False, 35), (True, 53)):
        with pytest.raises(InterruptedError):
            trains(
                None,
                tmp_path / "run",
                words,
                resume=again,
                on_step=partial(end, at=stop),
                **settings,
            )
    one = trains(None, tmp_path / "one", words, load_dir=str(tmp_path / "run"), **settings)
    assert one == whole[51:]  # to the bit
    resumes = partial(
        trains, folder=tmp_path / "run", words=words, micro=2, resume=True, **settings
    )
    two = run_mesh(1, resumes, data=2)
    np.testing.assert_allclose(two[0], whole[51:], rtol=1e-5)
    assert list(
        (tmp_path / "run").rglob("tokenizer.json")
    )  # each checkpoint holds the stream's tokenizer


def end(step, loss, *, at):
    if step == at:
        raise InterruptedError


def test_ranks_with_other_texts_are_refused(run_mesh, tmp_path, words):
    def divided(mesh):
        with pytest.raises(
            ValueError, match="train_dataset is not the same on process 0 and process 1"
        ):
            trains(mesh, tmp_path, words, texts=TEXTS[mesh.dp_rank :: 2])

    run_mesh(1, divided, data=2)
