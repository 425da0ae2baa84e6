"""Every task: what its samples are, the same curve as transformers' model under tensor parallelism, and its metrics.

SHARDZOO_SEEDS=3 compares every task with transformers' own Trainer, with three seeds, and prints a table (pytest -s).
"""

from __future__ import annotations

import json
import os
import random
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from every_case import EVERY_CASE, by_turns, every_day
from tiny_models import hf_model, save_glm, save_model, text, tokenizer_like

from shardzoo import finetuning as t2t
from shardzoo.data import (
    AnswerSpans,
    BlankDataset,
    BlankInfilling,
    ChatDataset,
    ClassifiedWords,
    Encoder,
    EpochShuffle,
    PrefixMaskedDataset,
    load_labeled_words,
    train_tokenizer,
)
from shardzoo.data.pairs.labeled import LabeledWords, Question, load_questions
from shardzoo.finetuning.data import TextTokenizer, prefix_mask
from shardzoo.finetuning.evaluation import answer_values, best_answers, predicted_values
from shardzoo.models.glm.text import GLMText

COLOURS = ("red", "green", "blue", "black", "white")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SHORT = {
    "max_source_length": 24, "max_target_length": 8, "lr": 1e-2, "train_steps": 5, "log_interval": 1,
    "eval_interval": 100, "micro_batch_size": 4, "doc_stride": 5,
}  # fmt: skip


def write(path, records) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def question(seed: int) -> dict:
    words = text(seed, 14).split()
    place = seed % 14
    start = len(" ".join(words[:place])) + (place > 0)
    answers = (
        {"text": [words[place]], "answer_start": [start]}
        if seed % 5
        else {"text": [], "answer_start": []}
    )
    return {"question": f"where is {words[place]}", "context": " ".join(words), "answers": answers}


RECORDS = {  # made records of each task, by a number
    "words": lambda n: {
        "s": text(n, 6).split(),
        "t": [int(word in COLOURS) for word in text(n, 6).split()],
    },
    "numbers": lambda n: {
        "s": text(n, 5),
        "t": 0.5 + sum(word in COLOURS for word in text(n, 5).split()),
    },
    "several": lambda n: {
        "s": text(n, 5),
        "t": [i for i, c in enumerate(("red", "big", "one")) if c in text(n, 5)],
    },
    "pairs": lambda n: {"s": text(n, 4), "second": text(n + n % 2, 4), "t": n % 2},
    "answers": question,
    "choices": lambda n: {
        "s": text(n, 4),
        "choices": [text(n + i, 3) for i in range(3)],
        "t": n % 3,
    },
    "chats": lambda n: {
        "messages": [
            {"role": "user", "content": text(n, 4)},
            {"role": "assistant", "content": text(n, 2)},
        ]
        * (1 + n % 2)
    },
    "texts": lambda n: {"s": text(n, 5), "t": text(n, 2)},
}
CASES = [  # architecture, records, settings of its configuration, arguments, names of the values
    ("BertForTokenClassification", "words", {}, {"metric": "seqeval"}, "accuracy f1 precision recall"),
    ("RobertaForTokenClassification", "words", {"pad_token_id": 0}, {}, "accuracy"),
    ("GPT2ForTokenClassification", "words", {"classifier_dropout": 0.0}, {}, "accuracy"),
    ("BertForSequenceClassification", "numbers", {"num_labels": 1}, {"metric": "spearmanr,mse"},
     "pearsonr spearmanr mse"),
    ("BertForSequenceClassification", "several", {"num_labels": 3, "problem_type": "multi_label_classification"},
     {"metric": "f1"}, "accuracy f1"),
    ("BertForSequenceClassification", "pairs", {}, {"pair_id": "second", "metric": "f1,matthews_correlation"},
     "accuracy f1 matthews_correlation"),
    ("BertForQuestionAnswering", "answers", {}, {"doc_stride": 5}, "exact_match f1"),
    ("GPT2ForQuestionAnswering", "answers", {}, {"doc_stride": 3}, "exact_match f1"),
    ("BertForMultipleChoice", "choices", {}, {}, "accuracy"),
    ("BertForMaskedLM", "texts", {}, {"task": "text2text-generation", "predict_with_generate": True},
     "perplexity sacrebleu"),
    ("RobertaForMaskedLM", "texts", {"pad_token_id": 0}, {"task": "text2text-generation"}, "perplexity"),
    ("GPT2LMHeadModel", "chats", {},
     {"predict_with_generate": True, "metric": "exact_match", "generation_num_beams": 1}, "perplexity exact_match"),
]  # fmt: skip


def losses(folder) -> list[float]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["train/loss"] for record in records if "train/loss" in record]


LEARNED = CASES if EVERY_CASE else [CASES[n] for n in (0, 9, 11)]


@pytest.mark.parametrize(("architecture", "kind", "changes", "arguments", "names"), LEARNED)
def test_a_task_is_learned_as_by_transformers(
    architecture, kind, changes, arguments, names, tmp_path, run_mesh
):
    """The losses and all values of transformers' model in one process, and of the zoo's over two."""
    tokenizer = "gpt2" if architecture.startswith("GPT2") else "bert"
    folder = save_model(tmp_path / "model", architecture, tokenizer, **changes)
    if kind == "chats":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    train = write(tmp_path / "train.json", map(RECORDS[kind], range(24)))
    valid = write(tmp_path / "valid.json", map(RECORDS[kind], range(100, 111)))

    def tune(mesh, name, **others):
        trainer = t2t.Trainer(
            model_name_or_path=str(folder), train_file=train, validation_file=valid, mesh=mesh,
            output_dir=str(tmp_path / name), **{**SHORT, **arguments}, **others,
        )  # fmt: skip
        return trainer.train()

    theirs = tune(None, "theirs", native=False)
    split = run_mesh(2, partial(tune, name="split", model_parallel_size=2))[0]
    assert set(theirs) == {"loss", "step", *names.split()}
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "theirs"), rel=2e-4)
    assert len(losses(tmp_path / "split")) == 5
    assert split == pytest.approx(theirs, rel=1e-3)


STAGED = (
    [(case, rank) for case in CASES for rank in (0, 4)]
    if EVERY_CASE
    else [(CASES[0], 4), (CASES[6], 0)]
)


@pytest.mark.parametrize(
    ("architecture", "kind", "changes", "arguments", "lora_rank"),
    [(*case[:-1], rank) for case, rank in STAGED],
)
def test_stages_learn_a_task(architecture, kind, changes, arguments, lora_rank, tmp_path, run_mesh):
    """With LoRA weights, the last stage alone trains a bias: that of the head."""
    folder = save_model(
        tmp_path / "model", architecture, "gpt2" if architecture[0] == "G" else "bert", **changes
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    train = write(tmp_path / "train.json", map(RECORDS[kind], range(24)))
    valid = write(tmp_path / "valid.json", map(RECORDS[kind], range(100, 111)))

    def tune(mesh):
        trainer = t2t.Trainer(
            model_name_or_path=str(folder), train_file=train, validation_file=valid, mesh=mesh, lora_rank=lora_rank,
            pipeline_parallel_size=mesh.pp_size, env_type="deepspeed+mpu", output_dir=str(tmp_path / str(mesh.pp_size)),
            global_batch_size=8, **{**SHORT, **arguments},
        )  # fmt: skip
        summary, values = trainer.model_summary(), trainer.train()
        return summary.parts, values, trainer.evaluate()

    [(parts, values, again)] = run_mesh(1, tune)
    for found in run_mesh(1, tune, pipeline=2):
        assert found == (parts, pytest.approx(values, rel=1e-3), pytest.approx(again, rel=1e-3))
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=1e-5)


@pytest.fixture(scope="module")
def glm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("glm")
    train_tokenizer("glm-bpe", [text(seed, 12) for seed in range(200)], 340, folder)
    return save_glm(folder, "gpt2")


@pytest.mark.before_release
def test_glm_learns_to_fill_the_blanks_of_sources(glm, tmp_path, run_mesh):
    train = write(
        tmp_path / "train.json",
        [{"s": f"{text(n, 3)} [MASK] {text(n, 2)}", "t": text(n, 2)} for n in range(24)],
    )

    def tune(mesh, size):
        trainer = t2t.Trainer(
            model_name_or_path=str(glm), train_file=train, validation_file=train, model_parallel_size=size, mesh=mesh,
            predict_with_generate=True, metric="exact_match", output_dir=str(tmp_path / str(size)),
            generation_num_beams=1,
            **{**SHORT, "train_steps": 60, "max_source_length": 40, "lr": 5e-3},
        )  # fmt: skip
        return trainer.train(), trainer.generate_single(f"{text(3, 3)} [MASK] {text(3, 2)}")

    [(one, answer)] = [tune(None, 1)]
    two = run_mesh(2, tune, 2)
    assert losses(tmp_path / "2")[:20] == pytest.approx(losses(tmp_path / "1")[:20], rel=1e-4)
    assert two[0][0]["loss"] == pytest.approx(one["loss"], rel=0.02)
    assert losses(tmp_path / "1")[-1] < 0.5 * losses(tmp_path / "1")[0]
    assert isinstance(answer, str)


def test_a_blank_is_the_sample_of_pretraining(glm):
    words = GLMText(glm)
    source, target = [words.tokenizer.encode(part) for part in ("red blue", " one two")]
    ids = np.array(
        [words.tokens.cls, *source, *target, *words.tokenizer.encode(" big"), words.tokens.eos]
    )
    span = (1 + len(source), 1 + len(source) + len(target))
    wanted = BlankInfilling(words.tokens).build(ids, [span], np.arange(1), words.tokens.mask)
    [sample] = BlankDataset([("red blue[MASK] big", " one two")], words)
    assert {name: value.tolist() for name, value in sample.items()} == {
        n: v.tolist() for n, v in wanted.items()
    }


def test_labels_of_words_are_at_their_first_pieces():
    tokenizer = tokenizer_like("bert")
    record = LabeledWords(("red", "unseenword", "blue"), ("B", "O", "I"))
    samples = ClassifiedWords(
        [record], Encoder(tokenizer, 40), lambda label: np.array("OBI".index(label))
    )
    sample = samples[0]
    pieces = tokenizer(list(record.words), is_split_into_words=True)
    expected, last = [], None
    for word in pieces.word_ids():
        expected.append(-100 if word is None or word == last else [1, 0, 2][word])
        last = word
    assert pieces.word_ids().count(1) > 2
    assert sample["labels"].tolist() == expected
    assert sample["input_ids"].tolist() == pieces["input_ids"]
    cut = ClassifiedWords([record], Encoder(tokenizer, 4), samples.target)[0]
    assert len(cut["labels"]) == 4


def test_conll_files_and_lists_are_alike(tmp_path):
    (tmp_path / "a.conll").write_text("-DOCSTART- O\n\nred NN B-C\nhouse NN O\n\n\nblue JJ B-C\n")
    found = load_labeled_words(tmp_path / "a.conll")
    assert found == [
        LabeledWords(("red", "house"), ("B-C", "O")),
        LabeledWords(("blue",), ("B-C",)),
    ]
    listed = write(
        tmp_path / "a.json", [{"w": record.words, "l": record.labels} for record in found]
    )
    assert list(load_labeled_words(listed, source_id="w", target_id="l")) == found
    (tmp_path / "bad.conll").write_text("red NN\nalone\n")
    with pytest.raises(ValueError, match=r"bad\.conll, line 2: 'alone' is not a word and a label"):
        load_labeled_words(tmp_path / "bad.conll")


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_every_answer_is_in_some_window_and_is_found_again(kind):
    tokenizer = tokenizer_like(kind)
    records = [made(n) for n in range(12)]
    spans = AnswerSpans(records, Encoder(tokenizer, 20), 6)
    assert len(spans) > 2 * len(records)
    seen, logits = set(), []
    for sample, (number, places, absent) in zip(
        (spans[i] for i in range(len(spans))), spans.windows, strict=True
    ):
        assert len(sample["input_ids"]) <= 20
        start, end = int(sample["start_positions"]), int(sample["end_positions"])
        row = np.zeros((2, 23))
        if (start, end) != (absent, absent):
            answer, first = records[number].answers[0]
            assert places[start][0] <= first
            assert places[end][1] >= first + len(answer)
            seen.add(number)
            row[0, start] = row[1, end] = 9
        logits.append((row[0], row[1]))
    assert seen == set(range(len(records)))
    answers = best_answers(spans, logits)
    assert answer_values(answers, records) == {"exact_match": 100, "f1": 100}


def test_an_answer_ends_after_it_begins_and_is_not_too_long():
    """The largest sums of logits belong to spans that no answer may have."""
    words = text(1, 60)
    record = Question("where is it", words, ((words.split()[3], words.index(words.split()[3])),))
    spans = AnswerSpans([record], Encoder(tokenizer_like("bert"), 400), 6)
    [(_, places, _)] = spans.windows
    inside = [token for token, place in enumerate(places) if place is not None]
    assert len(inside) > 40
    start = np.zeros(len(places))
    end = np.zeros(len(places))
    start[inside[35]] = 9  # The end of highest score is before it, and the next one too far behind.
    end[inside[2]] = 9
    start[inside[1]] = 5
    end[inside[4]] = 3
    expected = words[places[inside[1]][0] : places[inside[2]][1]]
    assert best_answers(spans, [(start, end)]) == [expected]


def made(number: int) -> Question:
    words = text(number, 30).split()
    place = random.Random(number).randrange(30)
    first = len(" ".join(words[:place])) + (place > 0)
    return Question("where is it", " ".join(words), ((words[place], first),))


def test_squad_values_are_those_of_the_published_script(tmp_path):
    nested = {"data": [{"paragraphs": [{"context": "In a big red house.", "qas": [
        {"question": " where ?", "answers": [{"text": "red house", "answer_start": 9}]},
        {"question": "why ?", "answers": []}]}]}]}  # fmt: skip
    (tmp_path / "squad.json").write_text(json.dumps(nested))
    records = load_questions(tmp_path / "squad.json")
    assert [record.question for record in records] == ["where ?", "why ?"]
    # "The Red, house!" is normalized to the answer; "big red house" shares 2 of 3 and of 2 words: F1 = 0.8.
    assert answer_values(["The Red, house!", ""], records) == {"exact_match": 100, "f1": 100}
    assert answer_values(["big red house", "x"], records) == pytest.approx(
        {"exact_match": 0, "f1": 40}
    )
    wrong = write(
        tmp_path / "w.json",
        [{"question": "q", "context": "abc", "answers": {"text": ["b"], "answer_start": [0]}}],
    )
    with pytest.raises(ValueError, match="record 1: the answer 'b' is not at character 0"):
        load_questions(wrong)


@pytest.mark.parametrize("marked", [False, True])
def test_only_the_assistants_messages_are_learned(marked):
    tokenizer = tokenizer_like("gpt2")
    answer = (
        "{% generation %}{{ m.content }}</>{% endgeneration %}" if marked else "{{ m.content }}</>"
    )
    body = (
        f"{{% if m.role == 'assistant' %}}{answer}{{% else %}}{{{{ m.content }}}}</>{{% endif %}}"
    )
    tokenizer.chat_template = TEMPLATE.replace("{{ m.content }}</>", body)
    chat = [
        {"role": role, "content": f"{role[0]} {text(n, 3)}"}
        for n, role in enumerate(("user", "assistant") * 2)
    ]
    sample = ChatDataset([chat], tokenizer, 200)[0]
    assert tokenizer.decode(sample["input_ids"]) == "".join(
        f"<{m['role']}>{m['content']}</>" for m in chat
    )
    kept = sample["labels"] != -100
    assert (sample["labels"][kept] == sample["input_ids"][kept]).all()
    assert tokenizer.decode(sample["input_ids"][kept]) == "".join(
        f"{m['content']}</>" for m in chat[1::2]
    )


def test_a_template_that_hides_earlier_messages_is_refused():
    tokenizer = tokenizer_like("gpt2")
    tokenizer.chat_template = "{{ messages[-1].content }}"
    chat = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]
    with pytest.raises(ValueError, match="the chat template changes earlier messages"):
        ChatDataset([chat], tokenizer, 9)[0]
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="need a tokenizer with a chat_template"):
        ChatDataset([chat], tokenizer, 9)


def test_a_prefix_is_seen_by_all_and_the_rest_by_what_follows():
    tokenizer = TextTokenizer(tokenizer_like("bert"))
    sample = PrefixMaskedDataset([("red blue", "one")], tokenizer, tokenizer.ends)[0]
    ids, first = sample["input_ids"], int(sample["attention_mask"])
    assert tokenizer.decode(ids) == "[CLS]red blue[SEP]one[SEP]"
    assert sample["labels"].tolist() == [-100] * (first - 1) + ids[first:].tolist() + [-100]
    assert sample["token_type_ids"].tolist() == [0] * first + [1] * (len(ids) - first)
    mask = prefix_mask(torch.tensor([2, 1]), [4, 3])
    assert mask.int().tolist() == [
        [[[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]],
        [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 0]]],
    ]


def test_metrics_are_those_of_the_libraries():
    from scipy import stats
    from sklearn import metrics as library

    generator = np.random.default_rng(0)
    found = [(int(a), int(b)) for a, b in generator.integers(0, 3, (40, 2))]
    predicted, wanted = zip(*found, strict=True)
    values = predicted_values(
        "classes", ("accuracy", "f1", "matthews_correlation"), found, ["a", "b", "c"]
    )
    assert values == pytest.approx({
        "accuracy": library.accuracy_score(wanted, predicted),
        "f1": library.f1_score(wanted, predicted, average="macro"),
        "matthews_correlation": library.matthews_corrcoef(wanted, predicted),
    })  # fmt: skip
    numbers = [tuple(map(float, pair)) for pair in generator.integers(0, 9, (30, 2))]
    a, b = zip(*numbers, strict=True)
    values = predicted_values("numbers", ("pearsonr", "spearmanr", "mse"), numbers, [])
    expected = {"pearsonr": stats.pearsonr(a, b)[0], "spearmanr": stats.spearmanr(a, b)[0]}
    assert values == pytest.approx({**expected, "mse": library.mean_squared_error(b, a)})
    words = [[(1, 1), (2, 2), (0, 0)], [(1, 1), (0, 2), (0, 0)]]
    values = predicted_values("words", ("accuracy", "seqeval"), words, ["O", "B-X", "I-X"])
    assert values == pytest.approx({"accuracy": 5 / 6, "f1": 0.5, "precision": 0.5, "recall": 0.5})


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("shardzoo.finetuning.evaluation.find_spec", lambda name: None)
    from shardzoo.finetuning.evaluation import metric_names

    with pytest.raises(
        ValueError,
        match=r'the metric seqeval needs the package seqeval: pip install "shardzoo\[metrics\]"',
    ):
        metric_names("seqeval", "words")


def test_new_heads_of_every_kind_are_read_again_by_transformers(tmp_path):
    folder = save_model(tmp_path / "model", "BertForPreTraining", "bert")
    heads = {"words": "Token", "numbers": "Sequence", "several": "Sequence"}
    for kind in ("words", "answers", "choices", "numbers", "several"):
        head = {"answers": "QuestionAnswering", "choices": "MultipleChoice"}.get(
            kind, f"{heads.get(kind)}Classification"
        )
        train = write(tmp_path / f"{kind}.json", map(RECORDS[kind], range(12)))
        trainer = t2t.Trainer(
            model_name_or_path=str(folder),
            train_file=train,
            output_dir=str(tmp_path / kind),
            **{**SHORT, "train_steps": 1},
        )
        trainer.train(valid=False)
        saved = trainer.save_model()
        model, loading = getattr(transformers, f"BertFor{head}").from_pretrained(
            saved, output_loading_info=True
        )
        assert not loading["missing_keys"]
        assert not loading["unexpected_keys"]
        again = t2t.Trainer(
            model_name_or_path=str(saved),
            validation_file=train,
            task=trainer.task,
            max_source_length=24,
            doc_stride=5,
        )
        values = again.evaluate()
        assert values["loss"] > 0
        assert model.config.num_labels == {"numbers": 1, "several": 3}.get(kind, 2)


LOSSES = [  # architecture, records, arguments, the loss of (logits, labels, records) in one row, its number of targets
    ("T5ForConditionalGeneration", "texts", {"label_smoothing": 0.1}),
    ("GPT2LMHeadModel", "texts", {"label_smoothing": 0.2}),
    (
        "BertForSequenceClassification",
        "weighted",
        {"class_weights": "1,3", "weight_id": "w", "label_smoothing": 0.1},
    ),
    ("BertForTokenClassification", "words", {"class_weights": "balanced"}),
    ("BertForSequenceClassification", "several", {"class_weights": "1,2,3"}),
]


@pytest.mark.parametrize(("architecture", "kind", "arguments"), by_turns(LOSSES, 4))
def test_smoothed_and_weighted_losses(architecture, kind, arguments, tmp_path, run_mesh):
    """PyTorch's losses of transformers' logits; the same curve over two."""
    records = [
        RECORDS.get(kind, lambda n: {"s": text(n, 4), "t": n % 2, "w": n % 3})(n) for n in range(12)
    ]
    changes = (
        {"num_labels": 3, "problem_type": "multi_label_classification"} if kind == "several" else {}
    )
    tokenizer = {"T": "t5", "G": "gpt2", "B": "bert"}[architecture[0]]
    folder, train = (
        save_model(tmp_path / "model", architecture, tokenizer, **changes),
        write(tmp_path / "d.json", records),
    )
    settings = {
        **SHORT,
        **arguments,
        "model_name_or_path": str(folder),
        "train_file": train,
        "validation_file": train,
    }

    def tune(mesh, name, **others):
        trainer = t2t.Trainer(**settings, mesh=mesh, output_dir=str(tmp_path / name), **others)
        before, data = trainer.evaluate()["loss"], trainer._data
        samples = [trainer._collate()([data.samples(data.train(False))[n]]) for n in range(12)]
        trainer.train(valid=False)
        return before, samples

    theirs, samples = tune(None, "theirs", native=False)
    ours, _ = run_mesh(2, partial(tune, name="split", model_parallel_size=2))[0]
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "theirs"), rel=2e-4)
    model = getattr(transformers, architecture).from_pretrained(folder)
    total = count = 0.0
    counts = (
        np.bincount([label for record in records for label in record["t"]])
        if kind == "words"
        else None
    )
    for record, sample in zip(records, samples, strict=True):
        inputs = {name: value for name, value in sample.items() if name != "sample_weight"}
        with torch.no_grad():
            logits, labels = model(**inputs).logits, sample["labels"]
        if architecture.startswith("GPT2"):
            logits, labels = logits[:, :-1], labels[:, 1:]
        if kind == "several":
            each = torch.nn.functional.binary_cross_entropy_with_logits(
                logits, labels, reduction="none"
            )
            total, count = (
                total + (each * torch.tensor([1, 2, 3])).sum().item(),
                count + labels.numel(),
            )
            continue
        each = torch.nn.functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), reduction="none",
            label_smoothing=arguments.get("label_smoothing", 0.0),
        )  # fmt: skip
        factors = torch.tensor([1.0, 3.0]) if kind == "weighted" else torch.ones(1000)
        factors = torch.tensor(counts.sum() / (2 * counts)) if kind == "words" else factors
        each = each * factors[labels.flatten().clamp(min=0)] * record.get("w", 1)
        total, count = total + each.sum().item(), count + (labels != -100).sum().item()
    assert theirs == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (
            "numbers",
            {"label_smoothing": 0.1},
            "label_smoothing is for texts, .* not for the numbers of text-class",
        ),
        ("pairs", {"class_weights": "1,2,3"}, "class_weights must be 'balanced' or 2 numbers"),
        (
            "choices",
            {"weight_id": "w"},
            "weight_id is for text-classification, not for multiple-choice",
        ),
        (
            "pairs",
            {"metric": "rouge"},
            "metric must be one of accuracy, f1, .* for classes, not 'rouge'",
        ),
        ("pairs", {"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1"),
        ("pairs", {"dropout_rate": -0.1}, "dropout_rate must be at least 0"),
        ("pairs", {"early_stopping_patience": 1}, "early_stopping_patience needs save_best"),
    ],
)
def test_settings_that_do_not_fit_the_task(kind, arguments, message, tmp_path):
    folder = save_model(tmp_path / "m", "BertForMaskedLM", "bert")
    train = write(tmp_path / "x.json", map(RECORDS[kind], range(9)))
    with pytest.raises(ValueError, match=message):
        t2t.Trainer(model_name_or_path=str(folder), train_file=train, **{**SHORT, **arguments})


def test_intervals_of_epochs_and_a_stop_when_nothing_improves(tmp_path):
    folder = save_model(tmp_path / "m", "BertForSequenceClassification", "bert")
    train = write(tmp_path / "x.json", map(RECORDS["pairs"], range(24)))
    shared = {
        "model_name_or_path": str(folder),
        "train_file": train,
        "validation_file": train,
        "max_source_length": 24,
    }
    epochs = {"evaluation_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}
    trainer = t2t.Trainer(
        **shared,
        **epochs,
        num_train_epochs=3,
        per_device_eval_batch_size=5,
        output_dir=str(tmp_path / "e"),
    )
    trainer.train()
    records = [
        json.loads(line) for line in (tmp_path / "e" / "metrics.jsonl").read_text().splitlines()
    ]
    for name in ("train/loss", "valid/loss"):
        assert [record["step"] for record in records if name in record] == [3, 6, 9]
    assert trainer.run_folder.steps() == [3, 6, 9]
    # A learning rate of nearly 0 improves nothing that is measured: accuracy stays as it is.
    stop = {
        "save_best": "accuracy",
        "early_stopping_patience": 2,
        "lr": 1e-12,
        "eval_interval": 2,
        "train_steps": 50,
    }
    trainer = t2t.Trainer(**shared, **stop, output_dir=str(tmp_path / "s"))
    assert trainer.train()["step"] == 6
    again = t2t.Trainer(**shared, **stop, output_dir=str(tmp_path / "s"), resume=True)
    assert again.train()["step"] == 6


@pytest.mark.parametrize(
    ("kind", "architecture"), [("chats", "GPT2LMHeadModel"), ("texts", "LlamaForCausalLM")]
)
def test_packed_samples_do_not_see_one_another(kind, architecture, tmp_path):
    """The sum of the losses of all samples is that of the packed rows, forward and backward."""
    folder = save_model(tmp_path / "m", architecture, "gpt2", seed=3)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    train = write(tmp_path / "x.json", map(RECORDS[kind], range(9)))
    trainer = t2t.Trainer(
        model_name_or_path=str(folder),
        train_file=train,
        packing=True,
        block_size=60,
        **{**SHORT, "max_target_length": 30},
    )
    assert_packed_alike(trainer)
    assert trainer.train(valid=False, batch_size=1, dev_mode=True)["step"] == 10


@pytest.mark.parametrize("tp", every_day([1], more=[2]))
def test_packed_blanks_do_not_see_one_another(glm, tmp_path, tp, run_mesh):
    records = [
        {"s": f"{text(n, 1 + n % 4)} [MASK] {text(n, 2)}", "t": text(n, 2)} for n in range(9)
    ]
    train = write(tmp_path / "x.json", records)
    settings = {**SHORT, "max_source_length": 40, "packing": True, "dropout_rate": 0.0}

    def compare(mesh):
        trainer = t2t.Trainer(
            model_name_or_path=str(glm), train_file=train, mesh=mesh, model_parallel_size=tp,
            output_dir=str(tmp_path / "run"), block_size=70, **settings,
        )  # fmt: skip
        assert_packed_alike(trainer)
        assert trainer.train(valid=False, batch_size=1)["step"] > 3

    if tp == 1:
        compare(None)
    else:
        run_mesh(tp, compare)


def assert_packed_alike(trainer):
    data, collate = trainer._data, trainer._collate()
    plain, packed = data.samples(data.train(False)), data.training_samples(data.train(False))
    assert len(packed) < len(plain)
    found = []
    for samples in (plain, packed):
        trainer.model.zero_grad()
        loss = trainer.model(
            **collate([samples[n] for n in range(len(samples))]), num_items_in_batch=1
        ).loss
        loss.backward()
        found.append(
            [loss.item(), *(p.grad.abs().sum().item() for p in trainer.model.parameters())]
        )
    assert found[1] == pytest.approx(found[0], rel=2e-4, abs=1e-4)


def test_batches_of_similar_lengths(tmp_path):
    folder = save_model(tmp_path / "m", "T5ForConditionalGeneration", "t5")
    train = write(
        tmp_path / "x.json", [{"s": text(n, 2 + 5 * (n % 2)), "t": text(n, 2)} for n in range(32)]
    )
    trainer = t2t.Trainer(
        model_name_or_path=str(folder), train_file=train, group_by_length=True, **SHORT
    )
    data = trainer._data
    samples = data.training_samples(data.train(False))
    order = samples.make_order(1, 4)
    lengths = [len(samples[order(place)]["input_ids"]) for place in range(32)]
    spreads = [max(lengths[n : n + 4]) - min(lengths[n : n + 4]) for n in range(0, 32, 4)]
    assert sum(spreads) < 32 / 4 * (max(lengths) - min(lengths)) / 3
    assert sorted(order(place) for place in range(32)) == list(range(32))
    assert trainer.train(valid=False)["step"] == 5


@pytest.mark.parametrize("native", [True, False])
def test_dropout_rate_replaces_the_configurations(tmp_path, native):
    folder = save_model(tmp_path / "m", "T5ForConditionalGeneration", "t5")
    trainer = t2t.Trainer(model_name_or_path=str(folder), native=native, dropout_rate=0.25)
    assert trainer.model.config.dropout_rate == 0.25
    assert trainer.model.config.classifier_dropout == 0.0


MISTAKES = [
    ("words", {"s": ["a"], "t": ["x", "y"]}, "record 1: there are 1 words, but 2 labels"),
    (
        "choices",
        {"s": "a", "choices": ["x"], "t": 0},
        "record 1: the value of 'choices' must be a list of at least 2",
    ),
    ("choices", {"s": "a", "choices": ["x", "y"], "t": 2}, "must be a choice or its number, not 2"),
    (
        "chats",
        {"messages": [{"role": "user", "content": "a"}]},
        "'messages' has no message of the assistant",
    ),
    ("numbers", {"s": "a", "t": None}, "a label is NoneType, not a string"),
]


@pytest.mark.parametrize(("kind", "record", "message"), MISTAKES)
def test_bad_records_are_named(kind, record, message, tmp_path):
    tokenizer = "gpt2" if kind == "chats" else "bert"
    folder = save_model(
        tmp_path / "m", {"gpt2": "GPT2LMHeadModel", "bert": "BertForMaskedLM"}[tokenizer], tokenizer
    )
    train = write(tmp_path / "x.json", [record])
    with pytest.raises(ValueError, match=message):
        t2t.Trainer(model_name_or_path=str(folder), train_file=train, **SHORT).train()


SEEDS = int(os.environ.get("SHARDZOO_SEEDS", "0"))
STEPS, BATCH, LR = 240 if SEEDS else 40, 4, 3e-3


def plain(seed: int, count: int) -> str:
    """So many words without colours."""
    return " ".join(
        random.Random(seed).choices(("one", "two", "six", "big", "small", "old", "new"), k=count)
    )


def coloured(number: int) -> dict:
    """A text with a colour, and two words that depend on it."""
    return {
        "s": f"{COLOURS[number % 5]} {plain(number, 3)}",
        "t": f"{('three', 'four', 'five', 'seven', 'eight')[number % 5]} good",
    }


def which_colour(number: int) -> dict:
    colour, before = COLOURS[number % 5], plain(number, number % 9)
    found = {"text": [colour], "answer_start": [len(before) + bool(before)]}
    context = f"{before} {colour} {plain(number + 1, 9 - number % 9)}".strip()
    return {"question": "which colour", "context": context, "answers": found}


LEARNABLE = RECORDS | {
    "several": lambda n: {"s": coloured(n)["s"], "t": ([0], [1], [2], [0, 1], [1, 2])[n % 5]},
    "pairs": lambda n: {
        "s": plain(n, 4), "second": f"{plain(n + 1, 2)} {COLOURS[n % 5] if n % 2 else 'ten'}", "t": n % 2
    },
    "answers": which_colour,
    "choices": lambda n: {
        "s": plain(n, 4), "t": n % 3,
        "choices": [f"{plain(n + i, 2)} {'good' if i == n % 3 else 'ten'}" for i in range(3)],
    },
    "chats": lambda n: {"messages": [
        {"role": "user", "content": coloured(n)["s"]}, {"role": "assistant", "content": coloured(n)["t"]}
    ]},
    "texts": coloured,
}  # fmt: skip
# What both reach on records that they have not seen: far from what guesses reach.
REACHED = {
    **dict.fromkeys(("words", "several", "pairs", "choices"), ("accuracy", 0.95)), "numbers": ("pearsonr", 0.9),
    "answers": ("f1", 95), "chats": ("perplexity", 1.2), "texts": ("perplexity", 1.2),
}  # fmt: skip
ALL = [*CASES, ("T5ForConditionalGeneration", "texts", {}, {}, "perplexity")]
COMPARED = ALL if SEEDS else CASES[:1]


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


@pytest.mark.before_release
@pytest.mark.parametrize("seed", range(max(1, SEEDS)))
@pytest.mark.parametrize(("architecture", "kind", "changes", "arguments", "names"), COMPARED)
def test_a_task_reaches_what_transformers_trainer_does(
    architecture, kind, changes, arguments, names, seed, tmp_path, run_mesh
):
    tokenizer = tokenizer_like({"G": "gpt2", "T": "t5"}.get(architecture[0], "bert"))
    if kind == "chats":
        tokenizer.chat_template = TEMPLATE
    scale = (
        {} if architecture.startswith("T5") else {"initializer_range": 0.1}
    )  # else attention is slow to be learned
    model, folder = (
        hf_model(architecture, 0.0, vocab_size=len(tokenizer), **changes, **scale),
        tmp_path / "model",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.init_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    train = write(tmp_path / "train.json", map(LEARNABLE[kind], range(256)))
    valid = write(tmp_path / "valid.json", map(LEARNABLE[kind], range(300, 364)))
    settings = {
        **SHORT, **arguments, "train_file": train, "validation_file": valid, "lr": LR, "train_steps": STEPS,
        "seed": seed, "predict_with_generate": False,
    }  # fmt: skip

    def split(mesh):
        path = str(tmp_path / "ours")
        return t2t.Trainer(
            model_name_or_path=str(folder),
            mesh=mesh,
            model_parallel_size=2,
            output_dir=path,
            **settings,
        ).train()

    ours = run_mesh(2, split)[0]
    reference = t2t.Trainer(model_name_or_path=str(folder), native=False, **settings)
    samples = reference._data.samples(reference._data.train(True))
    order = EpochShuffle(len(samples), seed)
    trainer = InOrder(
        model=getattr(transformers, architecture).from_pretrained(folder),
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path / "theirs"), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=LR,
            logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, remove_unused_columns=False,
        ),
        train_dataset=[samples[order(place)] for place in range(STEPS * BATCH)],
        data_collator=partial(reference._collate()),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(tmp_path / "trained"))
    tokenizer.save_pretrained(tmp_path / "trained")
    theirs = t2t.Trainer(
        **{**settings, "train_file": None, "task": reference.task}, model_name_or_path=str(tmp_path / "trained"),
        native=False,
    ).evaluate()  # fmt: skip
    curve = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    row = "  ".join(f"{name} {ours[name]:.4f} {theirs[name]:.4f}" for name in theirs)
    print(f"\n| {architecture} | {kind} | {seed} | {row} |")
    assert losses(tmp_path / "ours")[:5] == pytest.approx(curve[:5], rel=2e-3)
    for name, value in theirs.items():
        unit = 100 if name == "exact_match" or (kind == "answers" and name == "f1") else 1
        assert ours[name] == pytest.approx(value, rel=0.05, abs=0.05 * unit), name
    name, bound = REACHED[kind]
    assert not SEEDS or (ours[name] < bound if name == "perplexity" else ours[name] > bound)


def test_the_last_answer_of_a_chat_is_evaluated(tmp_path):
    """The oracle is what transformers generates for all turns before the last answer.

    The first answer is another text, and so is what the model would say at its place.
    """
    folder = save_model(tmp_path / "m", "GPT2LMHeadModel", "gpt2", seed=3, n_positions=256)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

    def answer(messages: list[dict]) -> str:
        prompt = "".join(f"<{m['role']}>{m['content']}</>" for m in messages) + "<assistant>"
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        tokens = reference.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        return tokenizer.decode(tokens, skip_special_tokens=True)

    def say(role: str, content: str) -> dict[str, str]:
        return {"role": role, "content": content}

    records = []
    for number in range(3):
        before = [
            say("user", text(number, 3)),
            say("assistant", text(number + 10, 2)),
            say("user", text(number + 20, 2)),
        ]
        last = answer(before)
        assert last.strip()
        assert last != answer(before[:1])
        # A turn of the user after the last answer is no part of its prompt.
        records.append(
            {"messages": [*before, say("assistant", last), say("user", text(number, 1))]}
        )
    trainer = t2t.Trainer(
        model_name_or_path=str(folder), validation_file=write(tmp_path / "x.json", records),
        predict_with_generate=True, generation_num_beams=1, metric="exact_match", task="chat",
        **{**SHORT, "max_source_length": 200},
    )  # fmt: skip
    assert trainer.evaluate()["exact_match"] == 1.0
