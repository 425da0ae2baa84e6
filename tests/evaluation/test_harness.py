"""Models of the zoo in lm-evaluation-harness, on local tasks, beside the harness's own model of transformers.

The tasks are of the three kinds of requests: choices, whose contexts may not fit the model; the perplexity of documents
that are longer than its positions; and generation that a word stops. Batches are ragged.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import shlex
import subprocess
from pathlib import Path

import pytest
import transformers
import yaml
from commands import warm_environment
from documents import ROOT, blocks, commands
from tiny_models import PRETRAINED, save_model, text

from shardzoo import evaluation
from shardzoo.cli import main as cli
from shardzoo.evaluation.arguments import HARNESS_ARGUMENTS, ModelArguments

lm_eval = pytest.importorskip(
    "lm_eval", reason="lm-evaluation-harness is not installed: pip install lm_eval"
)
HFLM = importlib.import_module("lm_eval.models.huggingface").HFLM
TaskManager = importlib.import_module("lm_eval.tasks").TaskManager
ShardzooLM = evaluation.ShardzooLM  # makes the harness know it

PAGE = "docs/evaluation.md"
SPLIT_PRECISION = 1e-6  # relative; the ranks' partial results are added in another order
NAMES = ("local_choice", "local_perplexity", "local_generation")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {
        "gpt2": save_model(tmp_path_factory.mktemp("gpt2"), PRETRAINED["gpt2"], "gpt2", seed=1),
        "t5": save_model(tmp_path_factory.mktemp("t5"), PRETRAINED["t5"], "t5", seed=1),
        "bart": save_model(tmp_path_factory.mktemp("bart"), PRETRAINED["bart"], "bart", seed=1),
        "llama": save_model(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", "gpt2", seed=1),
        "bert": save_model(tmp_path_factory.mktemp("bert"), "BertForMaskedLM", "bert"),
    }


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """A folder of tasks: a YAML file and a file of JSON lines each."""
    folder = tmp_path_factory.mktemp("tasks")
    choices = [
        {
            "question": text(i, 3 + 11 * i),
            "choices": [text(100 + i, 1 + i % 3), text(200 + i, 2)],
            "answer": i % 2,
        }
        for i in range(7)
    ]
    documents = [{"text": text(i, 5 + 13 * i)} for i in range(5)]
    questions = [{"question": text(i, 3 + 9 * i), "answer": text(50 + i, 2)} for i in range(7)]
    write_task(
        folder, NAMES[0], choices, output_type="multiple_choice", doc_to_text="{{question}} ", doc_to_choice="choices",
        doc_to_target="answer", metric_list=[{"metric": "acc"}, {"metric": "acc_norm"}],
    )  # fmt: skip
    write_task(
        folder, NAMES[1], documents, output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
        metric_list=[{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    )  # fmt: skip
    write_task(
        folder, NAMES[2], questions, output_type="generate_until", doc_to_text="{{question}}", doc_to_target="answer",
        generation_kwargs={"until": ["e"], "max_gen_toks": 9}, metric_list=[{"metric": "chrf"}],
    )  # fmt: skip
    return folder


def write_task(folder: Path, name: str, documents: list[dict], **settings) -> None:
    (folder / f"{name}.jsonl").write_text(
        "".join(json.dumps(document) + "\n" for document in documents)
    )
    files = {
        "data_files": {"test": str(folder / f"{name}.jsonl")},
        "cache_dir": str(folder / "cache"),
    }
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": files,
        "test_split": "test",
        **settings,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))


def evaluated(model, tasks: Path, **options) -> dict:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(
        model=model,
        tasks=list(NAMES),
        task_manager=manager,
        bootstrap_iters=0,
        log_samples=True,
        **options,
    )


def by_transformers(folder: Path, tasks: Path, **options) -> dict:
    kind = (
        transformers.AutoModelForSeq2SeqLM if "t5" in str(folder) or "bart" in str(folder) else None
    )
    model = (kind or transformers.AutoModelForCausalLM).from_pretrained(folder)
    return evaluated(HFLM(model, tokenizer=str(folder), batch_size=3, **options), tasks)


def check(found: dict, wanted: dict) -> None:
    """Compares the metrics, and the answer to each request."""
    for task in NAMES:
        numbers = {
            key: value for key, value in wanted["results"][task].items() if key.endswith(",none")
        }
        numbers = {key: value for key, value in numbers.items() if "stderr" not in key}
        assert len(numbers) >= 1
        for key, value in numbers.items():
            assert found["results"][task][key] == pytest.approx(value, rel=SPLIT_PRECISION), key
        pairs = list(zip(found["samples"][task], wanted["samples"][task], strict=True))
        assert len(pairs) > 4
        for one, other in pairs:
            assert one["doc_id"] == other["doc_id"]
            for mine, theirs in zip(flat(one["resps"]), flat(other["resps"]), strict=True):
                if isinstance(theirs, float):
                    assert float(mine) == pytest.approx(theirs, rel=SPLIT_PRECISION)
                else:  # a text, or whether a text is what greedy search finds
                    assert str(mine) == str(theirs)


def flat(values) -> list:
    return (
        [v for value in values for v in flat(value)]
        if isinstance(values, list | tuple)
        else [values]
    )


@pytest.fixture
def workplace(folders, tasks, tmp_path) -> Path:
    """A folder with what the page names."""
    for family, name in {"gpt2": "openai-community/gpt2", "t5": "google-t5/t5-small"}.items():
        link = tmp_path / name
        link.parent.mkdir()
        link.symlink_to(folders[family])
    (tmp_path / "tasks").symlink_to(tasks)
    return tmp_path


def run(command: str, folder: Path) -> str:
    """What a command prints, in the order of the page."""
    environment = warm_environment()
    done = subprocess.run(
        shlex.split(command), env=environment, capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.before_release
def test_the_command_evaluates_a_split_model_and_reports_once(folders, tasks, workplace):
    command, _ = commands(PAGE)
    assert "tensor_parallel_size=2" in command
    command = command.replace(" local_choice ", f" {','.join(NAMES)} ")
    assert run(command, workplace).count("word_perplexity") == 1
    [results] = workplace.rglob("results_*.json")
    found = json.loads(results.read_text())
    assert found["config"]["model_num_parameters"] == transformers_size(folders["gpt2"])
    found["samples"] = {}
    for task in NAMES:
        [samples] = workplace.rglob(f"samples_{task}_*.jsonl")
        found["samples"][task] = [json.loads(line) for line in samples.read_text().splitlines()]
        found["samples"][task].sort(key=lambda sample: sample["doc_id"])
    wanted = by_transformers(folders["gpt2"], tasks)
    assert wanted["results"]["local_choice"]["acc,none"] not in (0, 1)
    check(found, wanted)


def transformers_size(folder: Path) -> int:
    return transformers.AutoModelForCausalLM.from_pretrained(folder).num_parameters()


STORE = """
    from pathlib import Path
    Path("results.jsonl").open("a").write(__import__("json").dumps(results, default=str) + "\\n")
"""


@pytest.mark.before_release
def test_a_script_evaluates_a_split_encoder_decoder(folders, tasks, workplace):
    _, command = commands(PAGE)
    _, script = blocks(PAGE, "python")
    every_task = script.text.replace('["local_choice"]', str(list(NAMES)))
    (workplace / "evaluate.py").write_text(every_task + STORE)
    run(command, workplace)
    [results] = (workplace / "results.jsonl").read_text().splitlines()
    check(json.loads(results), by_transformers(folders["t5"], tasks))


def test_the_model_in_one_process(folders, tasks, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    names: dict = {}
    exec(blocks(PAGE, "python")[0].text, names)
    found = names["results"]["results"]["local_choice"]["acc,none"]
    assert found == by_transformers(folders["gpt2"], tasks)["results"]["local_choice"]["acc,none"]


def test_the_page_names_every_argument_and_makes_a_task(tasks, tmp_path):
    page = (ROOT / PAGE).read_text()
    own = [
        field.name
        for field in dataclasses.fields(ModelArguments)
        if field.name not in ("harness", "device")
    ]
    assert all(f"`{name}`" in page for name in (*own, *HARNESS_ARGUMENTS))
    [making] = blocks(PAGE, "text")
    subprocess.run(["bash", "-ec", making.text], check=True, cwd=tmp_path)
    made = yaml.safe_load((tmp_path / "tasks/local_choice.yaml").read_text())
    stored = yaml.safe_load((tasks / "local_choice.yaml").read_text())
    assert {**made, "dataset_kwargs": 0} == {**stored, "dataset_kwargs": 0}
    data = tmp_path / made["dataset_kwargs"]["data_files"]["test"]
    records = [json.loads(line) for line in data.read_text().splitlines()]
    assert all(record["choices"][record["answer"]] and record["question"] for record in records)


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_in_one_process_and_truncated(folders, tasks, family):
    """With less room than the model has, contexts are cut on the left and documents into more windows."""
    given = {"pretrained": str(folders[family]), "max_length": 31}
    found = evaluated("shardzoo", tasks, model_args=given, batch_size=3)
    check(found, by_transformers(folders[family], tasks, max_length=31))


def test_arguments_of_the_harness_reach_it(folders, tasks):
    given = {
        "pretrained": str(folders["gpt2"]),
        "add_bos_token": True,
        "prefix_token_id": 7,
        "logits_cache": False,
    }
    options = {name: value for name, value in given.items() if name != "pretrained"}
    check(
        evaluated("shardzoo", tasks, model_args=given),
        by_transformers(folders["gpt2"], tasks, **options),
    )


MISTAKES = [
    ({"tensor_paralel_size": 2}, "did you mean tensor_parallel_size?"),
    ({"parallelize": True}, "there is no argument 'parallelize'"),
    ({"tensor_parallel_size": 0}, "tensor_parallel_size must be an integer of at least 1, not 0"),
    ({"tensor_parallel_size": 2}, "needs 2 processes, but 1 were started; use `shardzoo lm-eval`"),
    ({"tensor_parallel_size": 2, "batch_size": "auto:4"}, "set batch_size to a number"),
    ({"dtype": "int4"}, "dtype must be one of auto, float32"),
    ({"pretrained": "missing"}, "missing is not a folder"),
    ({"device": "gpu"}, "device must be cpu or cuda, not 'gpu'"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_arguments_that_cannot_work(folders, changes, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        ShardzooLM(**{"pretrained": str(folders["gpt2"]), **changes})


def test_a_model_must_be_named():
    with pytest.raises(ValueError, match="pretrained=FOLDER"):
        ModelArguments.from_given({"tensor_parallel_size": 2})


def test_a_masked_language_model_is_refused(folders):
    with pytest.raises(
        ValueError, match="is a BertForMaskedLM; lm-evaluation-harness evaluates causal"
    ):
        ShardzooLM(pretrained=str(folders["bert"]))


COMMANDS = [
    ("--model shardzo --tasks a", "there is no model 'shardzo'"),
    ("--model_args pretrained=missing --tasks a", "missing is not a folder"),
    ("--model_args pretrained={gpt2},tensor_parallel_size=9 --tasks a", "9"),
    (
        "--model_args pretrained={gpt2},tensor_parallel_size=2 --batch_size auto --tasks a",
        "set batch_size to a number",
    ),
    ("--config missing.yaml", "Config file not found"),
]


@pytest.mark.parametrize(("options", "message"), COMMANDS)
def test_a_wrong_command_gives_one_message(folders, capsys, options, message):
    assert cli.main(["lm-eval", "run", *options.format(gpt2=folders["gpt2"]).split()]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert "Traceback" not in shown


def test_without_the_harness_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(
        evaluation, "find_spec", lambda name: None if name == "lm_eval" else object()
    )
    assert cli.main(["lm-eval", "run", "--tasks", "a"]) == 2
    assert "pip install 'shardzoo[lm-eval]'" in capsys.readouterr().err
    with pytest.raises(ImportError, match="needs the packages lm_eval: install"):
        evaluation.__getattr__("ShardzooLM")
