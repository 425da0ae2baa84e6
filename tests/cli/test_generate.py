"""`shardzoo generate` and the pipeline behind it, on folders with tokenizers."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from commands import warm_environment
from tiny_models import PRETRAINED, hf_model, save_glm, save_model, tokenizer_like
from training import without_digests

from shardzoo.cli import main as cli
from shardzoo.finetuning import Trainer
from shardzoo.generation import TextGenerationPipeline
from shardzoo.models import from_pretrained

TEXTS = ["the cat sat", "a dog", "where are the two birds that flew", "x"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A GPT-2, a T5 and a BERT."""
    return {
        family: save_model(tmp_path_factory.mktemp(family), architecture, family, seed=1)
        for family, architecture in {**PRETRAINED, "bert": "BertForMaskedLM"}.items()
    }


def run(arguments: list[str], capsys) -> list[dict]:
    assert cli.main(["generate", *arguments]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def by_transformers(folder, texts, **settings) -> list[str]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    encoded = tokenizer(texts, return_tensors="pt", padding=True)
    output = model.generate(
        encoded["input_ids"], attention_mask=encoded["attention_mask"], **settings
    )
    new = output[:, encoded["input_ids"].shape[1] :]
    return [
        text + tokenizer.decode(row, skip_special_tokens=True)
        for text, row in zip(texts, new, strict=True)
    ]


def test_prompts_from_everywhere(folders, capsys, monkeypatch, tmp_path):
    folder = str(folders["gpt2"])
    wanted = [{"prompt": t, "generated_text": g}
              for t, g in zip(TEXTS, by_transformers(folder, TEXTS, max_new_tokens=6), strict=True)]  # fmt: skip
    common = ["--model", folder, "--max-new-tokens", "6"]
    assert run([*common, "--prompt", *TEXTS], capsys) == wanted
    assert run([*common, "--prompt", *TEXTS, "--batch-size", "3"], capsys) == wanted
    lines = tmp_path / "prompts.txt"
    lines.write_text("".join(f"{text}\n" for text in TEXTS))
    assert run([*common, "--file", str(lines)], capsys) == wanted
    records = tmp_path / "prompts.jsonl"
    records.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    assert run([*common, "--file", str(records)], capsys) == wanted
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TEXTS)))
    assert run(common, capsys) == wanted
    short = run([*common, "--no-full-text", "--prompt", TEXTS[0]], capsys)
    assert TEXTS[0] + short[0]["generated_text"] == wanted[0]["generated_text"]


def test_settings_of_the_folder_and_of_the_command(folders, capsys):
    folder = folders["gpt2"]
    (folder / "generation_config.json").write_text(
        '{"num_beams": 3, "max_new_tokens": 5, "low_memory": false}'
    )
    try:
        common = ["--model", str(folder), "--prompt", TEXTS[0]]
        beams = by_transformers(folder, TEXTS[:1], num_beams=3, max_new_tokens=5)
        [entry] = run(common, capsys)
        assert entry["generated_text"] == beams[0]
        assert entry["score"] < 0
        [entry] = run([*common, "--num_beams=1"], capsys)  # the default, but said
        assert "score" not in entry
    finally:
        (folder / "generation_config.json").unlink()


def test_streaming_shows_the_same_text(folders, capsys):
    common = ["--model", str(folders["gpt2"]), "--max-new-tokens", "6", "--prompt", *TEXTS[:2]]
    wanted = [entry["generated_text"] for entry in run(common, capsys)]
    assert cli.main(["generate", *common, "--stream"]) == 0
    assert capsys.readouterr().out == "".join(text + "\n" for text in wanted)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_answers_of_an_encoder_decoder(family, folders, tmp_path, capsys):
    """BART's positions count from the left, so padding there would change the answers of a batch."""
    if family == "bart":
        folder = save_model(tmp_path / "bart", "BartForConditionalGeneration", "bart", seed=1)
    else:
        folder = folders[family]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    entries = run(["--model", str(folder), "--num-beams", "2", "--prompt", *TEXTS], capsys)
    for text, entry in zip(TEXTS, entries, strict=True):
        found = model.generate(
            **tokenizer(text, return_tensors="pt"), num_beams=2, max_new_tokens=20
        )
        assert entry["generated_text"] == tokenizer.decode(found[0], skip_special_tokens=True)


def test_masks(folders, capsys):
    folder = folders["bert"]
    [entry] = run(
        ["--model", str(folder), "--top-k", "3", "--prompt", "the [MASK] sat [MASK]"], capsys
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertForMaskedLM.from_pretrained(folder).eval()
    encoded = tokenizer("the [MASK] sat [MASK]", return_tensors="pt")
    with torch.no_grad():
        chances = (
            model(encoded["input_ids"])
            .logits[encoded["input_ids"] == tokenizer.mask_token_id]
            .softmax(-1)
        )
    assert len(entry["masks"]) == 2
    for row, mask in zip(chances, entry["masks"], strict=True):
        scores, tokens = row.topk(3)
        assert [one["token"] for one in mask] == [
            tokenizer.decode([token]).strip() for token in tokens
        ]
        assert [one["score"] for one in mask] == pytest.approx(scores.tolist(), rel=1e-5)


def test_blanks_of_a_glm(folders, tmp_path, run_mesh):
    tokenizer_like("gpt2").save_pretrained(tmp_path)
    folder = save_glm(tmp_path, "gpt2")
    texts = ["the [MASK] sat on [sMASK] x", "a dog"]

    def fill(mesh):
        return TextGenerationPipeline(folder, mesh, glm_vocabulary="gpt2")(texts, max_new_tokens=4)

    runs = [run_mesh(size, fill) for size in (1, 2)]
    first, second = runs[0][0]
    assert runs[1] == [[first, second]] * 2
    assert (len(first["pieces"]), len(second["pieces"])) == (2, 1)
    assert second["generated_text"].startswith("a dog")
    with pytest.raises(ValueError, match="no GLM release has a vocabulary of"):
        TextGenerationPipeline(folder)


def test_mistakes(folders, capsys, monkeypatch, tmp_path):
    model = ["--model", str(folders["gpt2"])]
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"question": "b"}\n')
    for arguments, message in (
        ([], "--model is missing"),
        (["--model", "nowhere"], "nowhere is not a folder"),
        ([*model, "--prompt", "a", "--file", "b"], "use one of them"),
        ([*model, "--file", "none.txt"], "none.txt is not readable"),
        ([*model, "--file", str(tmp_path / "bad.jsonl")], "line 2 of"),
        ([*model, "--prompt", "a", "--tp", "5"], "use a model-parallel size from 1 to 4"),
        ([*model, "--prompt", "a", "--max-new-tokens", "900"], "use --max-new-tokens up to"),
        (
            ["--model", str(folders["bert"]), "--prompt", "[MASK]", "--stream"],
            "this model fills blanks",
        ),
        (
            ["--model", str(folders["bert"]), "--prompt", "[MASK]", "--num-beams", "2"],
            "its only setting is --top-k",
        ),
        ([*model, "--prompt", ""], "--prompt is empty"),
    ):
        assert cli.main(["generate", *arguments]) == 2, arguments
        assert message in capsys.readouterr().err.replace("\n", " "), arguments
    for option, message in (
        (("--num-beams", "0"), "--num-beams must be at least 1"),
        (("--top-p", "2"), "--top-p must be from 0 to 1, not 2"),
        (("--temperature", "0"), "without --do-sample the most likely token is taken"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["generate", *model, "--prompt", "a", *option])
        assert message in "".join(capsys.readouterr())
    words = [*model, "--prompt", "a", "--max-new-tokens", "1", "--temperature", "0.5"]
    assert cli.main(["generate", *words, "--quiet"]) == 0
    assert not capsys.readouterr().err
    assert cli.main(["generate", *words]) == 0
    assert "--temperature changes nothing without --do-sample" in capsys.readouterr().err
    assert cli.main(["generate", *words, "--do-sample"]) == 0
    assert not capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["generate", *model]) == 2
    assert "standard input is closed" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert cli.main(["generate", *model]) == 2
    assert "there is no prompt" in capsys.readouterr().err


def without_tokenizer(folder: Path, copy: Path) -> Path:
    """A model's folder as a checkpoint without its tokenizer was: configuration and weights."""
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, copy)
    return copy


@pytest.mark.parametrize("config", [None, "{}", '{"tokenizer_class": "GPT2Tokenizer"}'])
@pytest.mark.parametrize("family", ["gpt2", "t5", "bert"])
def test_a_folder_without_a_tokenizer_is_refused(folders, tmp_path, capsys, family, config):
    """transformers answers with the empty tokenizer that it returns for such a folder."""
    folder = without_tokenizer(folders[family], tmp_path / "bare")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(config)
    assert cli.main(["generate", "--model", str(folder), "--prompt", "[MASK]"]) == 2
    shown = capsys.readouterr()
    assert f"{folder} holds no tokenizer" in shown.err.replace("\n", " ")
    assert shown.out == ""
    with pytest.raises(ValueError, match="holds no tokenizer"):
        Trainer(model_name_or_path=str(folder), train_file=__file__)


def test_a_classifier_generates_no_text(folders, tmp_path, capsys):
    folder = shutil.copytree(folders["bert"], tmp_path / "classifier")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["BertForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    assert cli.main(["generate", "--model", str(folder), "--prompt", "one"]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert f"{folder} is a BertForSequenceClassification, which generates no text" in shown


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "--prompt", "one", "--model"),
        ("finetune", "--train-file", __file__, "--model-name-or-path"),
        ("convert", "inspect"),
        ("convert", "verify"),
        ("estimate",),
    ],
)
def test_the_folder_of_a_run_leads_to_its_models(words, tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    assert cli.main([*words, str(tmp_path)]) == 2
    shown = capsys.readouterr().err.replace("\n", " ")
    assert f"{tmp_path} is a run's folder; name a model in it: {tmp_path}/hf" in shown


def test_the_folder_of_an_adapter_is_no_model(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"--model BASE --adapter {tmp_path}"):
        from_pretrained(tmp_path)
    for words in (("convert", "inspect"), ("estimate",)):
        assert cli.main([*words, str(tmp_path)]) == 2
        assert "has only LoRA weights (adapter_config.json)" in capsys.readouterr().err


def test_a_glm_without_a_tokenizer_is_refused(folders, tmp_path, capsys):
    tokenizer_like("gpt2").save_pretrained(tmp_path)
    folder = without_tokenizer(save_glm(tmp_path, "gpt2"), tmp_path / "bare")
    assert (
        cli.main(["generate", "--model", str(folder), "--prompt", "a", "--glm-vocabulary", "gpt2"])
        == 2
    )
    assert "tokenizer" in capsys.readouterr().err


def test_a_tokenizer_of_bytes_needs_no_vocabulary_file(tmp_path):
    """A ByT5 has a tokenizer_config.json alone."""
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    assert not (tmp_path / "tokenizer.json").exists()
    hf_model("T5ForConditionalGeneration", 0.0, vocab_size=384).save_pretrained(tmp_path)
    assert len(TextGenerationPipeline(tmp_path)("abc", max_new_tokens=2)) == 1


def trained(folder: Path, run: Path) -> Path:
    """A checkpoint after one step, which records the vocabulary."""
    import shardzoo
    from shardzoo.trainer import Trainer

    trainer = Trainer(env_type="pytorch", train_steps=1, save_dir=str(run))
    row = torch.arange(5)
    trainer.train(
        shardzoo.from_pretrained(folder).train(), train_dataset=[{"input_ids": row, "labels": row}]
    )
    return trainer.run_folder.checkpoint(1)


def test_a_tokenizer_that_does_not_belong_to_the_model_is_refused(folders, tmp_path, capsys):
    own, folder = folders["gpt2"], trained(folders["gpt2"], tmp_path / "run")
    capsys.readouterr()
    prompt = ["--max-new-tokens", "4", "--prompt", TEXTS[0]]
    wanted = run(["--model", str(folder), *prompt], capsys)
    bare = without_tokenizer(own, tmp_path / "bare")
    assert run(["--model", str(folder), "--tokenizer", str(own), *prompt], capsys) == wanted
    assert len(run(["--model", str(bare), "--tokenizer", str(own), *prompt], capsys)) == 1
    larger = tokenizer_like("gpt2")
    larger.add_tokens([f"new{number}" for number in range(9)])
    larger.save_pretrained(tmp_path / "larger")
    for model, tokenizer, message in (
        (folder, folders["t5"], f"in {folders['t5']} has another vocabulary"),
        (bare, tmp_path / "larger", f"but the model in {bare} has a vocabulary of"),
        (folder, tmp_path / "larger", f"but the model in {folder} has a vocabulary of"),
        (folder, tmp_path / "none", "none is not a folder"),
        (folder, bare, f"{bare} holds no tokenizer"),
    ):
        assert (
            cli.main(["generate", "--model", str(model), "--tokenizer", str(tokenizer), *prompt])
            == 2
        )
        shown = capsys.readouterr()
        assert message in shown.err.replace("\n", " ")
        assert shown.out == ""
    shutil.copy(folders["t5"] / "tokenizer.json", folder)
    assert cli.main(["generate", "--model", str(folder), *prompt]) == 2
    assert "is damaged: tokenizer.json has" in capsys.readouterr().err.replace("\n", " ")
    without_digests(folder)
    assert cli.main(["generate", "--model", str(folder), *prompt]) == 2
    assert "has another vocabulary" in capsys.readouterr().err.replace("\n", " ")
    with pytest.raises(ValueError, match="has another vocabulary"):
        Trainer(model_name_or_path=str(folder), train_file=__file__)


@pytest.mark.before_release
def test_two_processes_read_standard_input_once(folders, tmp_path):
    command = ["python", "-m", "shardzoo.cli.main", "generate", "--model", str(folders["gpt2"])]
    command += ["--max-new-tokens", "6", "--tp", "2", "--batch-size", "2"]
    environment, given = warm_environment(), "\n".join(TEXTS)
    done = subprocess.run(
        command,
        input=given,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    entries = [json.loads(line) for line in done.stdout.splitlines()]
    assert [entry["generated_text"] for entry in entries] == by_transformers(
        folders["gpt2"], TEXTS, max_new_tokens=6
    )


def test_strings_that_stop(folders):
    folder = folders["gpt2"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pipeline = TextGenerationPipeline(folder)
    [free] = pipeline(TEXTS[0], max_new_tokens=12)
    new = free["generated_text"][len(TEXTS[0]) :]
    stop = next(
        pair for pair in map("".join, pairwise(new[1:])) if pair.isascii()
    )  # bytes need not be text
    [stopped] = pipeline(TEXTS[0], max_new_tokens=12, stop_strings=[stop])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    encoded = tokenizer(TEXTS[0], return_tensors="pt")
    wanted = model.generate(**encoded, max_new_tokens=12, stop_strings=[stop], tokenizer=tokenizer)
    new_tokens = wanted[0, encoded["input_ids"].shape[1] :]
    assert stopped["generated_text"] == TEXTS[0] + tokenizer.decode(
        new_tokens, skip_special_tokens=True
    )
    assert len(stopped["generated_text"]) < len(free["generated_text"])


def test_an_empty_prompt_among_others(folders):
    pipeline = TextGenerationPipeline(folders["gpt2"])
    both = pipeline(["", TEXTS[0]], max_new_tokens=5)
    assert both == [*pipeline("", max_new_tokens=5), *pipeline(TEXTS[0], max_new_tokens=5)]


def test_a_split_folder_gives_the_same_text(folders, tmp_path, run_mesh):
    folder = folders["t5"]
    assert cli.main(["convert", "split", str(folder), str(tmp_path / "split"), "--tp", "2"]) == 0

    def answer(mesh, path):
        return TextGenerationPipeline(path, mesh)(TEXTS, num_beams=2, max_new_tokens=8)

    runs = [
        run_mesh(size, answer, path)[0] for size in (1, 2) for path in (folder, tmp_path / "split")
    ]
    texts = [[entry["generated_text"] for entry in run] for run in runs]
    assert texts == [texts[0]] * 4


@pytest.mark.before_release
def test_a_bare_folder_generates_in_one_process_and_in_two_stages(tmp_path):
    """config.json, pytorch_model.bin and spiece.model alone, as LiBai's page downloads mT5's."""
    import sentencepiece
    from tiny_models import text

    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(text(seed, 12) for seed in range(300)))
    folder = tmp_path / "mt5"
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        input=str(texts), model_prefix=str(folder / "spiece"), vocab_size=44, pad_id=0, eos_id=1,
        unk_id=2, bos_id=-1,
    )  # fmt: skip
    (folder / "spiece.vocab").unlink()
    config = transformers.MT5Config(
        vocab_size=44, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4,
        decoder_start_token_id=0, architectures=["MT5ForConditionalGeneration"],
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.MT5ForConditionalGeneration(config).eval()
    # Pieces of words are more probable than the special tokens.
    theirs.lm_head.weight.data.normal_()[:3] = 0
    config.save_pretrained(folder)
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "pytorch_model.bin", "spiece.model",
    ]  # fmt: skip

    pieces = sentencepiece.SentencePieceProcessor(str(folder / "spiece.model"))
    ids = [*pieces.encode("one two three"), 1]
    limits = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    generated = theirs.generate(torch.tensor([ids]), **limits)[0, 1:].tolist()
    wanted = pieces.decode([token for token in generated if token > 2])
    for layout in ((), ("--pp", "2")):
        words = ["--model", str(folder), "--prompt", "one two three", "--max-new-tokens", "8"]
        ran = subprocess.run(
            ["shardzoo", "generate", *words, "--min-new-tokens", "8", *layout],
            env=warm_environment(), capture_output=True, text=True, timeout=280,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        [answer] = [line for line in ran.stdout.splitlines() if line.startswith("{")]
        assert json.loads(answer)["generated_text"] == wanted
    assert wanted
