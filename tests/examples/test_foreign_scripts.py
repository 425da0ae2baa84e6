"""Scripts as users of FlagAI, t2t-tuner and LiBai write them run here, with few changed lines.

Each script makes the calls of a published example, with names and arguments as they are there. Lines that had to change
end with `# changed`.
"""

from __future__ import annotations

import json
import runpy
import statistics
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import transformers
from commands import warm_environment
from every_case import by_turns
from tiny_models import save_glm, save_model, text, tokenizer_like

from shardzoo.cli.main import main
from shardzoo.cli.pretrain import RECIPES, read_arguments
from shardzoo.data import train_tokenizer
from shardzoo.trainer.launch.rank_info import free_port

CHANGED = "  # changed"
PREPARE = """
with open("train.src", encoding="utf-8") as file:
    sources = [line.strip() for line in file]
with open("train.tgt", encoding="utf-8") as file:
    targets = [line.strip() for line in file]
"""
T5_TITLES = f"""
import torch
from torch.utils.data import Dataset
from shardzoo.trainer import Trainer{CHANGED}
from shardzoo.compat import AutoLoader{CHANGED}

trainer = Trainer(
    env_type="pytorch", experiment_name="t5_title_generation", batch_size=8, gradient_accumulation_steps=1, lr=2e-3,
    weight_decay=1e-3, epochs=2, log_interval=1, eval_interval=10000, load_dir=None,
    pytorch_device=torch.device("cpu"), save_dir="saved", save_interval=100,
)
loader = AutoLoader("title-generation", "T5-base-ch", model_dir="./state_dict/")
model, tokenizer = loader.get_model(), loader.get_tokenizer()
{PREPARE}
class Titles(Dataset):
    def __len__(self):
        return len(sources)

    def __getitem__(self, i):
        def fixed(ids, length):
            return (ids + [0] * length)[:length]

        source = fixed(tokenizer.encode_plus(sources[i])["input_ids"], 30)
        target = fixed(tokenizer.encode_plus("[SEP]" + targets[i] + "[SEP]")["input_ids"], 20)
        return {{
            "input_ids": torch.LongTensor(source),
            "decoder_input_ids": torch.LongTensor(target[:-1]),
            "labels": torch.LongTensor(target[1:]),
        }}

trainer.train(model, train_dataset=Titles(), valid_dataset=Titles())
"""
GLM_TITLES = f"""
import torch
from torch.utils.data import Dataset
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.trainer import Trainer{CHANGED}

trainer = Trainer(
    env_type="ENVIRONMENT", experiment_name="GLM_seq2seq", batch_size=1, gradient_accumulation_steps=1, lr=2e-3,
    weight_decay=1e-5, epochs=2, num_gpus=GPUS, log_interval=1, eval_interval=40, load_dir=None,
    pytorch_device=torch.device("cpu"), save_interval=40, num_checkpoints=1, hostfile=HOSTS, deepspeed_config=CONFIG,
)
loader = AutoLoader("lm", model_name="GLM-large-ch", model_dir="./state_dict/")
model, tokenizer = loader.get_model(), loader.get_tokenizer()
{PREPARE}
class Titles(Dataset):
    def __len__(self):
        return len(sources)

    def __getitem__(self, i):
        return tokenizer.encode_plus(source_text=sources[i], target_text=targets[i])

class Collate:
    def __init__(self, pad_id):
        self.pad_id = pad_id

    def __call__(self, batch):
        longest = max(len(row["input_ids"]) for row in batch)
        for row in batch:
            missing = longest - len(row["input_ids"])
            row["input_ids"] += [self.pad_id] * missing
            row["target_ids"] += [self.pad_id] * missing
            row["loss_mask"] += [0] * missing
            places = row["position_ids"]
            places[0] += [len(places[0]) + x for x in range(missing)]
            places[1] += [1] * missing
        return {{
            "input_ids": torch.LongTensor([row["input_ids"] for row in batch]),
            "labels": torch.LongTensor([row["target_ids"] for row in batch]),
            "position_ids": torch.LongTensor([row["position_ids"] for row in batch]),
            "attention_mask": torch.LongTensor([row["attention_mask"] for row in batch]),
            "loss_mask": torch.LongTensor([row["loss_mask"] for row in batch]),
        }}

trainer.train(
    model, train_dataset=Titles(), valid_dataset=Titles(), collate_fn=Collate(pad_id=tokenizer.get_command_id("pad"))
)
"""
BERT_TITLES = f"""
import torch
from torch.utils.data import Dataset
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.trainer import Trainer{CHANGED}
from shardzoo.compat import seq2seq_collate_fn{CHANGED}

trainer = Trainer(
    env_type="pytorch", experiment_name="roberta_seq2seq", batch_size=8, gradient_accumulation_steps=1, lr=2e-3,
    weight_decay=1e-3, epochs=4, log_interval=1, eval_interval=10000, load_dir=None,
    pytorch_device=torch.device("cpu"), save_dir="checkpoints_seq2seq", checkpoint_activations=True, save_epoch=1,
)
loader = AutoLoader("seq2seq", model_name="RoBERTa-base-ch", model_dir="./state_dict/")
model, tokenizer = loader.get_model(), loader.get_tokenizer()
{PREPARE}
class Titles(Dataset):
    def __len__(self):
        return len(sources)

    def __getitem__(self, i):
        data = tokenizer.encode_plus(sources[i], targets[i], max_length=40)
        return {{"input_ids": data["input_ids"], "segment_ids": data["token_type_ids"]}}

trainer.train(model, train_dataset=Titles(), valid_dataset=Titles(), collate_fn=seq2seq_collate_fn)
"""
READ_FILE = """
def read_file():
    src = []
    tgt = []

    with open(src_dir, 'r', encoding='utf-8') as f:
        lines = f.readlines()
        for line in lines:
            src.append(line.strip('\\n').lower())

    with open(tgt_dir, 'r', encoding='utf-8') as f:
        lines = f.readlines()
        for line in lines:
            tgt.append(line.strip('\\n').lower())

    return src, tgt
"""
TITLE_DATASET = """
class BertTitleGenerationDataset(Dataset):

    def __init__(self, sents_src, sents_tgt, tokenizer, maxlen=512):
        super(BertTitleGenerationDataset, self).__init__()
        self.sents_src = sents_src
        self.sents_tgt = sents_tgt
        self.tokenizer = tokenizer
        self.maxlen = maxlen

    def __getitem__(self, i):
        src = self.sents_src[i]
        tgt = self.sents_tgt[i]
        data = self.tokenizer.encode_plus(src, tgt, max_length=self.maxlen, MORE)
        output = {
            "input_ids": data["input_ids"],
            "segment_ids": data["token_type_ids"],
        }
        return output

    def __len__(self):

        return len(self.sents_src)
"""
ROBERTA_TITLES = f"""
import os
import torch
from torch.utils.data import Dataset
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.trainer import Trainer{CHANGED}
from shardzoo.compat import seq2seq_collate_fn{CHANGED}

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

trainer = Trainer(
    env_type="pytorch", experiment_name="roberta_title-generation", batch_size=4, gradient_accumulation_steps=1,
    lr=2e-3, weight_decay=1e-3, epochs=3, log_interval=1, eval_interval=10000, load_dir=None, pytorch_device=device,
    save_dir="checkpoints_roberta_titles", checkpoint_activations=True, save_interval=4,
)

cur_dir = os.path.dirname(os.path.abspath(__file__))
src_dir = cur_dir + '/train.src'
tgt_dir = cur_dir + '/train.tgt'
model_dir = "./state_dict"

os.makedirs(model_dir, exist_ok=True)
maxlen = 256

auto_loader = AutoLoader(
    "title-generation",
    model_name="RoBERTa-base-ch",
    model_dir=model_dir,
)
model = auto_loader.get_model()
tokenizer = auto_loader.get_tokenizer()
{READ_FILE}
{TITLE_DATASET.replace(", MORE", "")}
sents_src, sents_tgt = read_file()
data_len = len(sents_tgt)
train_size = int(data_len * 0.8)

train_src = sents_src[:train_size][:2000]
train_tgt = sents_tgt[:train_size][:2000]

val_src = sents_src[train_size:]
val_tgt = sents_tgt[train_size:]

train_dataset = BertTitleGenerationDataset(train_src, train_tgt, tokenizer=tokenizer, maxlen=maxlen)
val_dataset = BertTitleGenerationDataset(val_src, val_tgt, tokenizer=tokenizer, maxlen=maxlen)

trainer.train(
    model,
    train_dataset=train_dataset,
    valid_dataset=val_dataset,
    collate_fn=seq2seq_collate_fn,
)
"""
ROBERTA_TITLES_GENERATE = f"""
import torch
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.compat import Predictor{CHANGED}

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

model_dir = "./checkpoints_roberta_titles/roberta_title-generation/checkpoints"{CHANGED}

maxlen = 256
auto_loader = AutoLoader(
    "title-generation",
    model_name="step-000008",{CHANGED}
    model_dir=model_dir,
)
model = auto_loader.get_model()
tokenizer = auto_loader.get_tokenizer()
predictor = Predictor(model, tokenizer)
model.to(device)
model.eval()
{PREPARE}
for text in sources[:2]:
    first = predictor.predict_generate_beamsearch(text,
                                              out_max_length=50,
                                              beam_size=3)
    second = predictor.predict_generate_randomsample(text,
                                                input_max_length=256,
                                                out_max_length=50,
                                                repetition_penalty=1.5,
                                                top_k=20,
                                                top_p=1.0,
                                                temperature=1.2)
    assert isinstance(first, str) and isinstance(second, str)
"""
BERT_ENGLISH_TITLES = f"""
import os
import torch
from torch.utils.data import Dataset
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.trainer import Trainer{CHANGED}
from shardzoo.compat import seq2seq_collate_fn as title_generation_collate_fn{CHANGED}

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

cur_dir = os.path.dirname(os.path.abspath(__file__))
train_path = cur_dir + "/news.tsv"
trainer = Trainer(
    env_type="pytorch", experiment_name="bert-title-generation", batch_size=2, gradient_accumulation_steps=1,
    lr=1e-3, weight_decay=1e-3, epochs=2, log_interval=1, eval_interval=10, load_dir=None, pytorch_device=device,
    save_dir="checkpoints-bert-title-generation-en", checkpoint_activations=True, save_interval=1000, fp16 = False)

model_dir = "./state_dict/"  # download_path for the model
os.makedirs(model_dir, exist_ok=True)
maxlen = 256

auto_loader = AutoLoader(
    "title-generation",
    model_name="BERT-base-en",
    model_dir=model_dir,
)
model = auto_loader.get_model()
tokenizer = auto_loader.get_tokenizer()


def read_file():
    src = []
    tgt = []

    index = 0
    with open(train_path, 'r', encoding='utf-8') as f:
        for line in f:
            index += 1
            if index == 1:
                continue
            line = line.strip('\\n').split('\\t')
            src_list = line[4].split(" ")
            if len(src_list) > 510:
                src_list = src_list[:510]
                line[4]=" ".join(src_list)
            src.append(line[4])
            tgt.append(line[3])
            if index == 100000:
                break

    return src, tgt

{TITLE_DATASET.replace("MORE", "truncation=True")}
sents_src, sents_tgt = read_file()

data_len = len(sents_tgt)
train_size = data_len

train_src = sents_src[:train_size]
train_tgt = sents_tgt[:train_size]

train_dataset = BertTitleGenerationDataset(train_src, train_tgt, tokenizer=tokenizer, maxlen=maxlen)

trainer.train(
    model,
    train_dataset=train_dataset,
    # valid_dataset=val_dataset,
    collate_fn=title_generation_collate_fn,
)
"""
GLM_POETRY = f"""
import os
import torch
from torch.utils.data import Dataset
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.trainer import Trainer{CHANGED}

cur_dir = os.path.dirname(os.path.abspath(__file__))
src_dir = cur_dir + '/poems.src'
tgt_dir = cur_dir + '/train.tgt'

def read_file():
    src = []
    tgt = []
    with open(src_dir, 'r', encoding='utf-8') as f:
        for line in f:
            line = line.strip()
            if "：" in line:
                l = line.split("：")  #line eg:"初夏：五言绝句"
                #if there are more than one '：', get title before the first '：'
                title, style = l[0], l[-1]
                if len(title) > 20:
                    title = title[:20]  #cut the longer title
                line = "：".join([title, style])
            src.append(line)

    with open(tgt_dir, 'r', encoding='utf-8') as f:
        for line in f:
            tgt.append(line.strip())
    assert len(src) == len(tgt), 'lines not equal!'
    return src, tgt


auto_loader = AutoLoader("lm",
                         model_name="GLM-large-ch")
model = auto_loader.get_model()
tokenizer = auto_loader.get_tokenizer()


trainer = Trainer(
    env_type="pytorch",  #pytorch or deepspeed
    experiment_name="glm_seq2seq", batch_size=4, gradient_accumulation_steps=1, lr=2e-3, weight_decay=2e-8,  #1e-3
    epochs=4, log_interval=1, tensorboard_dir="tbsummary", eval_interval=2000000,  #no evaluation metric
    load_dir="", save_dir="checkpoints_poetry", save_interval=4, num_checkpoints=1, pytorch_device='cpu',
    master_ip='127.0.0.1', master_port=17750, num_nodes=1, num_gpus=2, hostfile='./hostfile',
    deepspeed_config='./deepspeed.json', training_script=__file__, model_parallel_size=8
)


class BertSeq2seqDataset(Dataset):

    def __init__(self, sents_src, sents_tgt):
        super(BertSeq2seqDataset, self).__init__()
        self.sents_src = sents_src
        self.sents_tgt = sents_tgt

    def __getitem__(self, i):
        source_text = self.sents_src[i]
        target_text = self.sents_tgt[i]
        data = tokenizer.encode_plus(source_text, target_text=target_text)
        return data

    def __len__(self):
        return len(self.sents_src)


class GLMPoetryDynamicCollateFN():  #padding process in each batch

    def __init__(self, pad_id):
        self.pad_id = pad_id

    def pad_token(self, tokens, max_length):
        pad_len = max_length - len(tokens)
        tokens += [self.pad_id] * pad_len
        return tokens

    def pad_position_ids(self, position_ids, max_length):
        pad_len = max_length - len(position_ids[0])
        position_ids[0] += [len(position_ids[0]) + x for x in range(pad_len)]
        position_ids[1] += [1] * pad_len
        return position_ids

    def pad_loss_mask(self, loss_mask, max_length):
        pad_len = max_length - len(loss_mask)
        loss_mask += [0] * pad_len
        return loss_mask

    def __call__(self, batch):
        input_ids = [data["input_ids"] for data in batch]
        target_ids = [data["target_ids"] for data in batch]
        position_ids = [data["position_ids"] for data in batch]
        attention_mask = [data['attention_mask'] for data in batch]
        loss_mask = [data['loss_mask'] for data in batch]

        max_length = max([len(t) for t in input_ids])
        for i in range(len(input_ids)):
            input_ids[i] = self.pad_token(input_ids[i], max_length)
            target_ids[i] = self.pad_token(target_ids[i], max_length)
            position_ids[i] = self.pad_position_ids(position_ids[i],
                                                    max_length)
            loss_mask[i] = self.pad_loss_mask(loss_mask[i], max_length)
        return {{
            'input_ids': torch.LongTensor(input_ids),
            'labels': torch.LongTensor(target_ids),
            'position_ids': torch.LongTensor(position_ids),
            'attention_mask': torch.LongTensor(attention_mask),
            'loss_mask': torch.LongTensor(loss_mask)
        }}


train_src, train_tgt = read_file()
print('-----------train data length:', len(train_src))
my_collate_fn = GLMPoetryDynamicCollateFN(
    pad_id=tokenizer.get_command_id('pad'))
train_dataset = BertSeq2seqDataset(train_src, train_tgt)

trainer.train(model, train_dataset=train_dataset, collate_fn=my_collate_fn)
"""
GLM_POETRY_GENERATE = f"""
import torch
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.compat import Predictor{CHANGED}

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

auto_loader = AutoLoader("seq2seq",
                         model_name="step-000016",{CHANGED}
                         model_dir="./checkpoints_poetry/glm_seq2seq/checkpoints/"){CHANGED}
model = auto_loader.get_model()
tokenizer = auto_loader.get_tokenizer()

model.to(device)
model.eval()
predictor = Predictor(model, tokenizer)

test_data = ['初夏：五言绝句', '边塞：七言律诗']
for text in test_data:
    for i in range(1):  #generate several times
        first = predictor.predict_generate_randomsample(text,
                                                    out_max_length=66,
                                                    top_k=10,
                                                    top_p=.1,
                                                    repetition_penalty=4.0,
                                                    temperature=1.2)
        second = predictor.predict_generate_beamsearch(text,
                                                  out_max_length=66,
                                                  beam_size=10)
        assert isinstance(first, str) and isinstance(second, str)
"""
FAQ_DATA = f"""
import torch
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.compat import Predictor{CHANGED}
import pandas as pd
import numpy as np
from tqdm import tqdm
import collections

faq_data_path = "./faq.csv"
answer_save_path = "./finance_fqa.json"
embeddings_save_path = "./finance_embeddings.json"

maxlen = 256
task_name = "embedding"
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

auto_loader = AutoLoader(
    task_name=task_name,
    model_name="RoBERTa-base-ch",
    load_pretrain_params=True,
)
model = auto_loader.get_model()
tokenizer = auto_loader.get_tokenizer()
model.to(device)
predictor = Predictor(model, tokenizer=tokenizer)


def resave_data():
    answer = collections.OrderedDict()
    embeddings = []
    df = pd.read_csv(faq_data_path)
    for index, row in tqdm(df.iterrows(), total=len(df)):
        row = row.tolist()  # pandas 3 finds row[0] no more
        if type(row[0]) == str:
            if row[0] not in answer:
                answer[row[0]] = row[2]
                embeddings.append(
                    predictor.predict_embedding(row[0], maxlen=maxlen).numpy())

    embeddings = np.array(embeddings)
    torch.save(answer, answer_save_path)
    torch.save(embeddings, embeddings_save_path)


if __name__ == '__main__':

    resave_data()
"""
# `INDEX` stands for faiss, which is no part of the tests: it makes the same calls and compares all.
FAQ_SEARCH = f"""
import torch
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.compat import Predictor{CHANGED}
INDEX
answer_save_path = "./finance_fqa.json"
embeddings_save_path = "./finance_embeddings.json"

maxlen = 256
d = 32
nlist = 5
nprobe = 10

task_name = "embedding"
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

auto_loader = AutoLoader(
    task_name=task_name,
    model_name="RoBERTa-base-ch",
    load_pretrain_params=True,
)
model = auto_loader.get_model()
tokenizer = auto_loader.get_tokenizer()
model.to(device)
predictor = Predictor(model, tokenizer=tokenizer)


class Search:

    def __init__(self, training_vectors, d, nlist=10, nprobe=1):
        quantizer = faiss.IndexFlatIP(d)  # the other index
        self.index = faiss.IndexIVFFlat(quantizer, d, nlist, faiss.METRIC_L2)
        assert not self.index.is_trained
        self.index.train(training_vectors)
        assert self.index.is_trained
        self.index.nprobe = nprobe  # default nprobe is 1, try a few more
        self.index.add(training_vectors)  # add may be a bit slower as well
        self.d = d

    def search(self, answer, query, k=10):
        query = query.numpy().reshape(-1, self.d)
        D, I = self.index.search(query, k)  # actual search
        result_question = []
        all_question = list(answer.keys())
        for s, i in zip(D[0], I[0]):
            if i != -1:
                result_question.append([all_question[i], s])

        best_quesiton = result_question[0][0]
        return answer[best_quesiton]


if __name__ == '__main__':
    # load data from 1_construct_data.py
    answer = torch.load(answer_save_path)
    embeddings = torch.load(embeddings_save_path, weights_only=False)  # PyTorch 2.6

    method = Search(training_vectors=embeddings,
                    d=d,
                    nlist=nlist,
                    nprobe=nprobe)

    for question in list(answer):
        question_embedding = predictor.predict_embedding(question,
                                                         maxlen=maxlen)
        assert method.search(answer, question_embedding, k=10) == answer[question]
    import transformers
    backbone = transformers.BertModel.from_pretrained("state_dict/RoBERTa-base-ch", add_pooling_layer=False).eval()
    with torch.no_grad():
        states = backbone(torch.tensor([tokenizer.encode_plus(question)["input_ids"]])).last_hidden_state
    torch.testing.assert_close(question_embedding, states[0].mean(0), rtol=1e-5, atol=1e-6)
"""
INDEX = """
class faiss:
    METRIC_L2 = 1
    IndexFlatIP = staticmethod(int)

    class IndexIVFFlat:
        is_trained = False

        def __init__(self, quantizer, d, nlist, metric):
            assert metric == 1

        def train(self, vectors):
            self.is_trained = True

        def add(self, vectors):
            self.vectors = vectors

        def search(self, query, k):
            squares = ((query[:, None] - self.vectors) ** 2).sum(-1)
            order = squares.argsort(1)[:, :k]
            return [row[at] for row, at in zip(squares, order)], order
"""
OPT = f"""
from shardzoo.compat import Predictor{CHANGED}
from shardzoo.compat import AutoLoader{CHANGED}
import torch
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

loader = AutoLoader(task_name="lm",
                    model_name="opt-125m-en")

model = loader.get_model()
tokenizer = loader.get_tokenizer()
model.eval()
model.to(device)

text = "The trophy doesn’t fit in the suitcase because "
predictor = Predictor(model, tokenizer)
out = predictor.predict_generate_randomsample(text,
                                              input_max_length=100,
                                              out_max_length=300,
                                              top_k=30,
                                              top_p=0.9,
                                              repetition_penalty=3.0)

assert isinstance(out, str) and type(model).__name__ == "OPTForCausalLM"
"""
CPM = f"""
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.compat import Predictor{CHANGED}

if __name__ == '__main__':

    text = '''默写古诗:
    白日依山尽，黄河入海流。
    床前明月光，'''

    loader = AutoLoader(task_name="lm",
                        model_name="CPM-large-ch",
                        model_dir="./checkpoints")

    model = loader.get_model()
    tokenizer = loader.get_tokenizer()

    predictor = Predictor(model=model,
                          tokenizer=tokenizer,
                          )

    out = predictor.predict_generate_randomsample(text,
                                                  top_p=0.9,
                                                  out_max_length=50)

    assert isinstance(out, str)
"""
ROBERTA_NER = f"""
import torch
from torch.utils.data import Dataset
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.trainer import Trainer{CHANGED}
from shardzoo.compat import bert_sequence_label_collate_fn{CHANGED}

target = ["O", "B-LOC", "I-LOC"]
loader = AutoLoader("ner", model_name="RoBERTa-base-ch", model_dir="./state_dict/", class_num=len(target))
model, tokenizer = loader.get_model(), loader.get_tokenizer()
trainer = Trainer(
    env_type="pytorch", experiment_name="roberta_ner", batch_size=8, gradient_accumulation_steps=1, lr=2e-3,
    weight_decay=1e-3, epochs=2, log_interval=1, eval_interval=1000, load_dir=None, pytorch_device="cpu",
    save_dir="./checkpoints_ner/", save_epoch=1,
)
{PREPARE}
class Entities(Dataset):
    def __len__(self):
        return len(sources)

    def __getitem__(self, i):
        tokens = tokenizer.tokenize(sources[i], maxlen=40, add_spatial_tokens=True)
        places = tokenizer.rematch(sources[i], tokens)
        starts = {{place[0]: n for n, place in enumerate(places) if place}}
        ends = {{place[-1]: n for n, place in enumerate(places) if place}}
        labels = [0] * len(tokens)
        at = sources[i].find("red")
        if at in starts and at + 2 in ends:
            labels[starts[at]] = target.index("B-LOC")
            for n in range(starts[at] + 1, ends[at + 2] + 1):
                labels[n] = target.index("I-LOC")
        return {{"input_ids": tokenizer.convert_tokens_to_ids(tokens), "labels": labels}}

trainer.train(model, train_dataset=Entities(), valid_dataset=None, collate_fn=bert_sequence_label_collate_fn)
"""
ROBERTA_CRF = f"""
import torch
from torch.utils.data import Dataset
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.trainer import Trainer{CHANGED}
from shardzoo.compat import bert_sequence_label_collate_fn, Predictor{CHANGED}

task_name = "sequence-labeling-crf"
maxlen = 256
target = ["O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER"]

auto_loader = AutoLoader(task_name, model_name="RoBERTa-base-ch", model_dir="./state_dict/", class_num=len(target))
model = auto_loader.get_model()
tokenizer = auto_loader.get_tokenizer()
trainer = Trainer(
    env_type="pytorch", experiment_name="roberta_ner", batch_size=8, gradient_accumulation_steps=1, lr=2e-3,
    weight_decay=1e-3, epochs=20, log_interval=4, eval_interval=1000, load_dir=None, pytorch_device="cpu",
    save_dir="checkpoints_ner_crf", save_interval=1000,
)
{PREPARE}
train_data = []
for source in sources:
    at = source.rfind("red")
    # The tokens of this tokenizer begin with the space before a word.
    train_data.append([source, [at - 1, at + 2, "LOC"]])

class NERDataset(Dataset):
    def __init__(self, data):
        super(NERDataset, self).__init__()
        self.data = data

    def __getitem__(self, i):
        data = self.data[i]
        tokens = tokenizer.tokenize(data[0], maxlen=maxlen, add_spatial_tokens=True)
        input_ids = tokenizer.convert_tokens_to_ids(tokens)
        mapping = tokenizer.rematch(data[0], tokens)
        start_mapping = {{j[0]: i for i, j in enumerate(mapping) if j}}
        end_mapping = {{j[-1]: i for i, j in enumerate(mapping) if j}}
        labels = [0] * len(tokens)
        for start, end, label in data[1:]:
            if start in start_mapping and end in end_mapping:
                start = start_mapping[start]
                end = end_mapping[end]
                labels[start] = target.index(f"B-{{label}}")
                for j in range(start + 1, end + 1):
                    labels[j] = target.index(f"I-{{label}}")
        output = {{"input_ids": input_ids, "labels": labels}}
        return output

    def __len__(self):
        return len(self.data)

def main():
    crf_params = list(map(id, model.crf_layer.parameters()))
    base_params = filter(lambda p: id(p) not in crf_params, model.parameters())
    optimizer = torch.optim.Adam([{{
        "params": base_params
    }}, {{
        "params": model.crf_layer.parameters(),
        "lr": 0.02
    }}], lr=2e-3, weight_decay=1e-3)
    train_dataset = NERDataset(train_data)
    trainer.train(
        model, train_dataset=train_dataset, valid_dataset=None, collate_fn=bert_sequence_label_collate_fn,
        optimizer=optimizer,
    )

if __name__ == '__main__':
    before = model.crf_layer.transitions.clone()
    main()
    assert not before.equal(model.crf_layer.transitions)
    predictor = Predictor(model, tokenizer)
    with torch.no_grad():
        # From the second token on, B-LOC and I-LOC must follow each other, whatever the logits are.
        model.crf_layer.transitions.fill_(-99)
        model.crf_layer.transitions[0, 1] = model.crf_layer.transitions[1, 2] = model.crf_layer.transitions[2, 1] = 99
        model.crf_layer.start_transitions[1:] = -999
    entities = predictor.predict_ner(sources[0], target, maxlen=maxlen)
    places = tokenizer.rematch(sources[0], tokenizer.tokenize(sources[0]))
    pairs = [(places[n][0], places[min(n + 1, len(places) - 1)][-1], "LOC") for n in range(0, len(places), 2)]
    assert entities == pairs
"""
ROBERTA_POINTER = f"""
import torch
from torch.utils.data import Dataset
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.trainer import Trainer{CHANGED}
from shardzoo.compat import bert_sequence_label_gp_collate_fn{CHANGED}
import numpy as np

task_name = "sequence-labeling-gp"
model_dir = "./state_dict/"

target = ["LOC", "ORG", "PER"]
maxlen = 256

trainer = Trainer(
    env_type="pytorch", experiment_name="roberta_ner_global_pointer", batch_size=4, gradient_accumulation_steps=1,
    lr=1e-2, weight_decay=1e-3, epochs=10, log_interval=4, eval_interval=1000, load_dir=None, pytorch_device="cpu",
    save_dir="checkpoints_ner_gp", save_interval=1000,
)
{PREPARE}
train_data = []
for source in sources:
    at = source.rfind("red")
    # The tokens of this tokenizer begin with the space before a word. Entities overlap.
    train_data.append([source, [at - 1, at + 2, "LOC"], [0, at + 2, "PER"]])

auto_loader = AutoLoader(
    task_name, model_name="RoBERTa-base-ch", model_dir=model_dir, class_num=len(target), inner_dim=64
)

model = auto_loader.get_model()
tokenizer = auto_loader.get_tokenizer()

class NERDataset(Dataset):
    def __init__(self, data):
        super(NERDataset, self).__init__()
        self.data = data

    def __getitem__(self, i):
        data = self.data[i]
        tokens = tokenizer.tokenize(data[0], maxlen=maxlen, add_spatial_tokens=True)
        input_ids = tokenizer.convert_tokens_to_ids(tokens)
        mapping = tokenizer.rematch(data[0], tokens)
        start_mapping = {{j[0]: i for i, j in enumerate(mapping) if j}}
        end_mapping = {{j[-1]: i for i, j in enumerate(mapping) if j}}
        length = len(tokens)
        labels = np.zeros((len(target), length, length))

        for start, end, label in data[1:]:
            if start in start_mapping and end in end_mapping:
                start = start_mapping[start]
                end = end_mapping[end]

                label_index = target.index(label)
                labels[label_index, start, end] = 1

        output = {{"input_ids": input_ids, "labels": labels}}
        return output

    def __len__(self):
        return len(self.data)

def main():
    train_dataset = NERDataset(train_data)
    trainer.train(
        model, train_dataset=train_dataset, valid_dataset=None, collate_fn=bert_sequence_label_gp_collate_fn
    )

if __name__ == '__main__':
    main()
"""
# Both `generate_crf.py` and `generate_global_pointer.py`, with the checkpoint of the training script.
NER_GENERATE = f"""
import torch
from safetensors.torch import load_file{CHANGED}
from shardzoo.compat import AutoLoader, Predictor{CHANGED}

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

task_name = "sequence-labeling-KIND"
model_dir = "./state_dict/"

model_save_path = "./RUN/checkpoints/step-000040/rank_00.safetensors"{CHANGED}

target = TARGET

maxlen = 256

auto_loader = AutoLoader(task_name, model_name="RoBERTa-base-ch", model_dir=model_dir, class_num=len(target), MORE)
model = auto_loader.get_model()
tokenizer = auto_loader.get_tokenizer()

predictor = Predictor(model, tokenizer)
model.load_state_dict(
    load_file(model_save_path)){CHANGED}

model.to(device)
model.eval()
{PREPARE}
for t in sources:
    entities = predictor.predict_ner(t, target, maxlen=maxlen)
    result = {{}}
    for e in entities:
        if e[2] not in result:
            result[e[2]] = [t[e[0]:e[1] + 1]]
        else:
            result[e[2]].append(t[e[0]:e[1] + 1])
    assert result == WANTED
"""
ROBERTA_MATCHING = f"""
import torch
from torch.utils.data import Dataset
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.trainer import Trainer{CHANGED}
from shardzoo.compat import bert_cls_collate_fn{CHANGED}

auto_loader = AutoLoader(
    "semantic-matching", model_name="RoBERTa-base-ch", model_dir="./state_dict/", load_pretrain_params=True,
    only_download_config=False, class_num=2,
)
model = auto_loader.get_model()
tokenizer = auto_loader.get_tokenizer()
trainer = Trainer(
    env_type="pytorch", experiment_name="roberta_matching", batch_size=8, gradient_accumulation_steps=1, lr=2e-3,
    weight_decay=1e-3, epochs=4, log_interval=1, eval_interval=2, load_dir=None, pytorch_device="cpu",
    save_dir="checkpoints_matching", num_gpus=2, hostfile="./hostfile", deepspeed_config="./deepspeed.json",
)
{PREPARE}
class Matches(Dataset):
    def __len__(self):
        return len(sources)

    def __getitem__(self, i):
        other = sources[i] if i % 2 else sources[i - 1]
        data = tokenizer.encode_plus(sources[i], other, max_length=40)
        return {{"input_ids": data["input_ids"], "segment_ids": data["token_type_ids"], "labels": i % 2}}

def eval_metric(logits, labels, **kwargs):
    return (logits.argmax(dim=-1) == labels).sum().item()

values = trainer.train(
    model, train_dataset=Matches(), valid_dataset=Matches(), collate_fn=bert_cls_collate_fn,
    metric_methods=[["acc", eval_metric]],
)
assert 0 <= values["acc"] <= 1
"""
GPT2_WRITING = f"""
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.compat import Predictor{CHANGED}

loader = AutoLoader("seq2seq", "gpt2-base-ch", model_dir="./state_dict/")
model = loader.get_model()
tokenizer = loader.get_tokenizer()
predictor = Predictor(model, tokenizer)
first = predictor.predict_generate_beamsearch("one two", beam_size=5, input_max_length=51, out_max_length=10)
second = predictor.predict_generate_randomsample(
    "one two", input_max_length=51, out_max_length=10, repetition_penalty=1.5, top_k=20, top_p=0.8
)
assert isinstance(first, str) and isinstance(second, str)
assert first == predictor.predict_generate_beamsearch("one two", beam_size=5, input_max_length=51, out_max_length=10)
"""
QUICK_START = f"""
import torch
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.compat import Predictor{CHANGED}

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""
QUICK_NER = f"""{QUICK_START}
task_name = "ner"
model_name = "RoBERTa-base-ch"   # Load the checkpoints from Modelhub(model.baai.ac.cn/models)
target = ["O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER"]
maxlen = 256

auto_loader = AutoLoader(task_name,
                         model_name=model_name,
                         class_num=len(target))

model = auto_loader.get_model()
model.to(device)
tokenizer = auto_loader.get_tokenizer()

predictor = Predictor(model, tokenizer)
{PREPARE}
for t in sources:
    entities = predictor.predict_ner(t, target, maxlen=maxlen)
    for e in entities:
        assert t[e[0]:e[1] + 1] and e[2] in ("LOC", "ORG", "PER")
"""
QUICK_TITLE = f"""{QUICK_START}
maxlen = 256

auto_loader = AutoLoader(
    task_name="title-generation",
    model_name="RoBERTa-base-ch"   # Load the checkpoints from Modelhub(model.baai.ac.cn/models)
)
model = auto_loader.get_model()
model.to(device)
tokenizer = auto_loader.get_tokenizer()

predictor = Predictor(model, tokenizer)
{PREPARE}
for text in sources[:2]:
    output = predictor.predict_generate_beamsearch(text,
                                              out_max_length=50,
                                              beam_size=3)
    assert isinstance(output, str)
"""
QUICK_WRITING = f"""
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.compat import Predictor{CHANGED}
import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if __name__ == '__main__':
    loader = AutoLoader("seq2seq",
                        "gpt2-base-ch",
                        model_dir="./state_dict/")
    model = loader.get_model()
    model.to(device)
    tokenizer = loader.get_tokenizer()
    predictor = Predictor(model, tokenizer)

    text = "one two three"

    output = predictor.predict_generate_randomsample(text, input_max_length=512, out_max_length=40,
                                                        repetition_penalty=1.5, top_k=20, top_p=0.8)

    assert isinstance(output, str)
"""
QUICK_GLM_TITLE = f"""{QUICK_START}
auto_loader = AutoLoader("title-generation",
                         model_name="GLM-large-ch",
                         model_dir="./state_dict/")
model = auto_loader.get_model()
tokenizer = auto_loader.get_tokenizer()

model.to(device)
model.eval()
predictor = Predictor(model, tokenizer)
{PREPARE}
for text in sources[:2]:
    output = predictor.predict_generate_randomsample(text,
                                                    out_max_length=66,
                                                    top_k=10,
                                                    top_p=1.0,
                                                    repetition_penalty=4.0,
                                                    temperature=1.2)
    assert isinstance(output, str)
    output = predictor.predict_generate_beamsearch(text,
                                                  out_max_length=66,
                                                  beam_size=10)
    assert isinstance(output, str)
"""
QUICK_BLANKS = f"""
import torch
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.compat import Predictor{CHANGED}
if __name__ == "__main__":
    loader = AutoLoader(task_name="lm",
                        model_name="GLM-large-ch",
                        )
    model = loader.get_model().half()
    tokenizer = loader.get_tokenizer()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)

    predictor = Predictor(model, tokenizer)

    for t in ["one two? three: [gMASK]", "one two [MASK] three.", "one two, [sMASK], three."]:
        output=predictor.predict_generate_randomsample(t, top_k=50, repetition_penalty=4.0, top_p=1.0)
        assert isinstance(output, str)
"""
MATCHING_GENERATE = f"""
import torch
from safetensors.torch import load_file{CHANGED}
from shardzoo.compat import AutoLoader, Predictor{CHANGED}

device = torch.device("cuda:1" if torch.cuda.is_available() else "cpu")
model_save_path = "./checkpoints_matching/roberta_matching/checkpoints/step-000008/rank_00.safetensors"{CHANGED}

maxlen = 256

auto_loader = AutoLoader("semantic-matching",
                         model_name="RoBERTa-base-ch",
                         only_download_config=True,
                         class_num=2)
model = auto_loader.get_model()
tokenizer = auto_loader.get_tokenizer()

predictor = Predictor(model, tokenizer)
model.load_state_dict(
    load_file(model_save_path)){CHANGED}

model.to(device)
model.eval()
{PREPARE}
for text_pair in zip(sources, sources[1:]):
    assert predictor.predict_cls_classifier(text_pair) in (0, 1)
"""
GPT2_TITLES = f"""
import torch
from torch.utils.data import Dataset
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.trainer import Trainer{CHANGED}

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
trainer = Trainer(
    env_type="pytorch", experiment_name="gpt2_title-generation", batch_size=8, gradient_accumulation_steps=1, lr=2e-3,
    weight_decay=1e-3, epochs=4, log_interval=1, eval_interval=10000, load_dir=None, pytorch_device=device,
    save_dir="checkpoints_gpt2_title-generation", checkpoint_activations=True, save_interval=1000,
)
auto_loader = AutoLoader("seq2seq", model_name="gpt2-base-ch", model_dir="./state_dict/")
model = auto_loader.get_model()
tokenizer = auto_loader.get_tokenizer()
{PREPARE}
class GPT2Seq2seqDataset(Dataset):
    def __init__(self, sents_src, sents_tgt, tokenizer, maxlen=512):
        super(GPT2Seq2seqDataset, self).__init__()
        self.sents_src = sents_src
        self.sents_tgt = sents_tgt
        self.tokenizer = tokenizer
        self.maxlen = maxlen

    def __getitem__(self, i):
        src = self.sents_src[i]
        tgt = self.sents_tgt[i]
        data = self.tokenizer.encode_plus(src, tgt, max_length=self.maxlen)

        output = {{
            "input_ids": data["input_ids"],
        }}
        return output

    def __len__(self):
        return len(self.sents_src)

    @staticmethod
    def collate_fn(batch):
        def padding(indice, max_length, pad_idx=0):
            pad_indice = [
                item + [pad_idx] * max(0, max_length - len(item)) for item in indice
            ]
            return torch.tensor(pad_indice)

        input_ids = [data["input_ids"] for data in batch]
        max_length = max([len(t) for t in input_ids])
        input_ids = padding(input_ids, max_length)

        data = {{
            "input_ids": input_ids,
            "labels": input_ids
        }}
        return data

train_dataset = GPT2Seq2seqDataset(sources, targets, tokenizer=tokenizer, maxlen=64)
val_dataset = GPT2Seq2seqDataset(sources[:3], targets[:3], tokenizer=tokenizer, maxlen=64)
optimizer = torch.optim.Adam(model.parameters(),
                             lr=1e-3,
                             weight_decay=1e-5)
trainer.train(model,
              train_dataset=train_dataset,
              valid_dataset=val_dataset,
              collate_fn=GPT2Seq2seqDataset.collate_fn,
              optimizer=optimizer
              )
"""
GLM_SAMPLES = f"""
import torch
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.compat import Predictor{CHANGED}

if __name__ == "__main__":
    model_name = 'GLM-large-ch'
    loader = AutoLoader("lm", model_name, model_dir="./checkpoints"){CHANGED}
    model, tokenizer = loader.get_model(), loader.get_tokenizer(){CHANGED}

    # model.load_state_dict(torch.load("../glm_pretrain/checkpoints/1000/pytorch_model.bin")["module"])

    predictor = Predictor(model, tokenizer)
    # generate samples
    text = ["one two? three: [gMASK]", "one two [MASK] three.", "one two, [sMASK], three."]
    for t in text:
        output = predictor.predict_generate_randomsample(
            t, out_max_length=20, top_k=50, repetition_penalty=4.0, top_p=1.0)
        assert isinstance(output, str)
"""
# What sets up processes in the script is `ParallelMesh`'s here.
MULTI_GPU_BLANKS = f"""
import torch
import random
import numpy as np
from shardzoo.mpu import ParallelMesh{CHANGED}
from shardzoo.compat import AutoLoader, Predictor{CHANGED}

model_parallel_size = 2
mpu = ParallelMesh(model_parallel_size){CHANGED}

def set_random_seed(seed):
    if seed is not None and seed > 0:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

set_random_seed(123)

loader = AutoLoader("lm", model_name="GLM-large-ch", mesh=mpu){CHANGED}
model = loader.get_model()
model.half()
tokenizer = loader.get_tokenizer()
model.parallel_output = False
model.eval()

torch.distributed.barrier(group=mpu.get_model_parallel_group())

text = "one two? three: [gMASK]"

predictor = Predictor(model, tokenizer)
out = predictor.predict_generate_randomsample(text, out_max_length=20)
if mpu.get_model_parallel_rank() == 0:
    print("pred is", out)
"""
OPT_PRETRAIN = f"""
import os
import torch
from torch.utils.data import Dataset
from shardzoo.compat import AutoLoader{CHANGED}
from shardzoo.trainer import Trainer{CHANGED}

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# single gpu
trainer = Trainer(
    env_type="pytorch", experiment_name="opt_13b", batch_size=2, gradient_accumulation_steps=1, lr=2e-3,
    weight_decay=1e-3, epochs=1, log_interval=1, eval_interval=10000, load_dir=None, pytorch_device=device,
    save_dir="checkpoints_opt_13b", checkpoint_activations=False, save_interval=1000,
)

src_dir = 'train.src'

model_dir = "./state_dict/"
os.makedirs(model_dir, exist_ok=True)
maxlen = 1024

model_name = "opt-125m-en"
loader = AutoLoader("lm", model_name, model_dir, load_pretrain_params=False){CHANGED}
model, tokenizer = loader.get_model(), loader.get_tokenizer(){CHANGED}

def read_file():
    src = []
    tgt = []

    with open(src_dir, 'r', encoding='utf-8') as f:
        lines = f.readlines()
        for line in lines:
            src.append(line.strip('\\n').lower())

    return src, src

DATASET
sents_src, sents_tgt = read_file()

train_dataset = GPT2Seq2seqDataset(sents_src, sents_tgt, tokenizer=tokenizer, maxlen=maxlen)
val_dataset = GPT2Seq2seqDataset(sents_src, sents_tgt, tokenizer=tokenizer, maxlen=maxlen)

optimizer = torch.optim.Adam(model.parameters(),
                             lr=1e-3,
                             weight_decay=1e-5)

trainer.train(model,
              train_dataset=train_dataset,
              valid_dataset=val_dataset,
              collate_fn=GPT2Seq2seqDataset.collate_fn,
              optimizer=optimizer
              )
"""
QWEN = f"""
import os
import torch
from shardzoo.compat import AutoLoader{CHANGED}

state_dict = "./checkpoints/"
model_name = 'qwen3-8b'

loader = AutoLoader("qwen3",
                    model_dir=state_dict,
                    model_name=model_name,
                    device='cpu',
                    use_cache=True)
model = loader.get_model()
tokenizer = loader.get_tokenizer()

model.eval()

# prepare the model input
prompt = "one two three"
messages = [
    {{"role": "user", "content": prompt}}
]
text = tokenizer.apply_chat_template(
    messages,
    tokenize=False,
    add_generation_prompt=True,
    enable_thinking=True # Switches between thinking and non-thinking modes. Default is True.
)
model_inputs = tokenizer([text], return_tensors="pt").to(model.device)

# conduct text completion
generated_ids = model.generate(
    **model_inputs,
    max_new_tokens=12
)
output_ids = generated_ids[0][len(model_inputs.input_ids[0]):].tolist()

# parsing thinking content
try:
    # rindex finding 151668 (</think>)
    index = len(output_ids) - output_ids[::-1].index(151668)
except ValueError:
    index = 0

thinking_content = tokenizer.decode(output_ids[:index], skip_special_tokens=True).strip("\\n")
content = tokenizer.decode(output_ids[index:], skip_special_tokens=True).strip("\\n")
assert 0 < len(output_ids) <= 12 and isinstance(content, str) and text.startswith("[user]")
"""
T2T = f"""
from shardzoo import finetuning as t2t{CHANGED}

trainer_arguments = t2t.TrainerArguments(
    model_name_or_path="state_dict/T5-base-ch", cache_dir="cache", train_file="pairs.json", output_dir="saved_model",
    overwrite_output_dir=True, max_source_length=20, max_target_length=8, num_train_epochs=1,
    per_device_train_batch_size=8, learning_rate=1e-2, MORE
)
trainer = t2t.Trainer(arguments=trainer_arguments)
"""
VALIDATED = (
    'validation_file="pairs.json", per_device_eval_batch_size=4, evaluation_strategy="epoch",'
)
TRAIN_AND_TEST = """
trainer.model_summary()
trainer.train(valid=VALID)
assert isinstance(trainer.generate_single("predict: one two", max_length=8), str)
"""
PROMPTS = """
trainer.convert_to_prompt_tuning(prompt_list=["<p1>", "<p2>"])
trainer.model_summary()
ids = trainer.tokenizer("<p1><p2> XXX")["input_ids"]
for name, param in trainer.model.shared.named_parameters():
    frozen, learned = param.data[ids[0] - 1][:10].clone(), param.data[ids[0]][:10].clone()
trainer.train(valid=True)
for name, param in trainer.model.shared.named_parameters():
    assert (param.data[ids[0] - 1][:10] == frozen).all()
    assert (param.data[ids[0]][:10] != learned).any()
"""


PARAPHRASING = f"""
from shardzoo import finetuning as t2t{CHANGED}

trainer_arguments = t2t.TrainerArguments(
    # model
    model_name_or_path="state_dict/T5-base-ch",
    cache_dir="cache",
    # data inputs
    train_file="./paraphrases.json",
    validation_file="./paraphrases.json",
    max_source_length=20,
    max_target_length=8,
    source_id="en",
    target_id="pa",
    # taining outputs
    output_dir="./t5_paraphrase",
    overwrite_output_dir=True,
    # training settings
    num_train_epochs=2,
    per_device_train_batch_size=16,
    learning_rate=1e-2,
    prefix="paraphrase: ",
    # validation settings
    per_device_eval_batch_size=16,
    evaluation_strategy="epoch",
)
trainer = t2t.Trainer(arguments=trainer_arguments)
trainer.model_summary()
trainer.train(valid=True)
input_text = "paraphrase: one two three."
texts = trainer.generate_diverse(input_text, max_length=8)
assert all(isinstance(text, str) for text in texts)
"""
TLDR_GPT = f"""
from shardzoo import finetuning as t2t{CHANGED}

trainer_arguments = t2t.TrainerArguments(
    # model
    model_name_or_path="state_dict/gpt2-base-ch",
    cache_dir="cache",
    # data inputs
    train_file="lines.txt",
    validation_file="lines.txt",
    block_size=24,
    # taining outputs
    output_dir="saved_gpt",
    overwrite_output_dir=True,
    # training settings
    num_train_epochs=2,
    per_device_train_batch_size=1,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    gradient_checkpointing=False,
    adafactor=True,
    fp16=False,
    # validation settings
    per_device_eval_batch_size=1,
    evaluation_strategy="epoch",
)
trainer = t2t.Trainer(arguments=trainer_arguments)
#trainer.freeze(embeddings=True)
trainer.model_summary()
trainer.train(valid=True)
input_text = "<start> one two three <end> SENTIMENT: "
assert isinstance(trainer.generate_single(input_text, max_length=64).split(" <end><start>")[0], str)
"""
DEEPSPEED_TEST = """
trainer.model_summary(no_print=True)
trainer.FreezeEmbeds()
trainer.train(valid=False, max_source_length=12, tensorboard=False, mode="seq2seq")
"""


# The mT5 for Romanian diacritics: its dataset class, collate function and optimizer as published. The trainer
# divides a stream between ranks, so that the dataset is made for one; the script's own replacement of padding in
# `input_ids`, which no embedding has, is that of the labels.
DIACRITICS = f"""
import unicodedata
from torch.utils.data import IterableDataset, get_worker_info
from transformers import Adafactor, AutoTokenizer
import shardzoo{CHANGED}
from shardzoo.trainer import Trainer{CHANGED}

class DistributedIterableDataset(IterableDataset):
    def __init__(self, dataset, rank, world_size):
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size

    def __iter__(self):
        worker_info = get_worker_info()
        mod = self.world_size
        shift = self.rank

        if worker_info:
            mod *= worker_info.num_workers
            shift = self.rank * worker_info.num_workers + worker_info.id

        ind = 0
        for data in self.dataset:
            ind += 1
            if (ind + shift) % mod == 0:
                yield {{
                        "source": unidecode(data["text"])+"</s>",
                        "target": data["text"]+"</s>"
                      }}

def unidecode(text):
    return "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))

{PREPARE}
train_dataset = DistributedIterableDataset([{{"text": text}} for text in targets], 0, 1)
max_length = 16
batch_size = 3
num_workers = 2
tokenizer = AutoTokenizer.from_pretrained("state_dict/T5-base-ch")

def my_collate(batch):
    text_batch_source = []
    text_batch_target = []
    for instance in batch:

        text_batch_source.append(instance["source"])
        text_batch_target.append(instance["target"])

    text_batch_source_out = tokenizer(text_batch_source,
                           max_length=max_length, truncation=True, padding="max_length", return_tensors="pt")
    text_batch_target_out = tokenizer(text_batch_target,
                                      max_length=max_length, truncation=True, padding="max_length", return_tensors="pt")

    text_batch_target_out["input_ids"][text_batch_target_out["input_ids"] == tokenizer.pad_token_id] = -100

    return {{"source": text_batch_source_out, "target": text_batch_target_out}}{CHANGED}

class Diacritics(Trainer):
    def forward_step(self, data, model, mems):
        batch_source, batch_target = data["source"], data["target"]
        outputs = model(input_ids=batch_source["input_ids"],
                            attention_mask=batch_source["attention_mask"],
                            labels=batch_target["input_ids"],
                            decoder_attention_mask=batch_target["attention_mask"])
        return {{"loss": outputs.loss, "logits": outputs.logits}}

trainer = Diacritics(env_type="ENVIRONMENT", num_gpus=GPUS, epochs=4, batch_size=batch_size, num_workers=num_workers,
                     lr_schedule="constant", log_interval=1, experiment_name="diacritics-GPUS")
model = shardzoo.from_pretrained("state_dict/T5-base-ch", trainer.mesh)
optimizer = Adafactor(
                    model.parameters(),
                    lr=1e-2,
                    eps=(1e-30, 1e-3),
                    clip_threshold=1.0,
                    decay_rate=-0.8,
                    beta1=None,
                    weight_decay=0.0,
                    relative_step=False,
                    scale_parameter=False,
                    warmup_init=False,
           )
trainer.train(model, optimizer, train_dataset=train_dataset, collate_fn=my_collate)
"""


def diacritics(environment: str, processes: int) -> str:
    return DIACRITICS.replace("ENVIRONMENT", environment).replace("GPUS", str(processes))


def t2t(more: str, rest: str, valid: bool = True) -> str:
    return T2T.replace("MORE", f'{more} prefix="predict: ",') + rest.replace("VALID", str(valid))


def glm(environment: str) -> str:
    several = environment == "deepspeed"
    values = {"GPUS": "2" if several else "1", "HOSTS": "'./hostfile'" if several else "None"}
    values |= {"ENVIRONMENT": environment, "CONFIG": "'./deepspeed.json'" if several else "None"}
    script = GLM_TITLES
    for name, value in values.items():
        script = script.replace(name, value)
    return script


def opt_pretrain() -> str:
    start = GPT2_TITLES.index("class GPT2Seq2seqDataset")
    end = GPT2_TITLES.index("train_dataset =")
    return OPT_PRETRAIN.replace("DATASET", GPT2_TITLES[start:end])


def multi_gpu_decoder() -> str:
    several = (
        'env_type="deepspeed+mpu", num_checkpoints=1, save_optim=True, save_rng=True, master_ip="127.0.0.1", '
        'master_port=17750, num_nodes=1, num_gpus=2, model_parallel_size=1, hostfile="./hostfile", '
        "deepspeed_config='./stage_1.json', training_script=__file__, load_type='latest',"
    )
    script = GPT2_TITLES.replace('env_type="pytorch",', several).replace(
        "batch_size=8", "batch_size=4"
    )
    model = 'AutoLoader("lm", model_name="aquila-7b", only_download_config=True, use_cache=False, '
    script = script.replace('AutoLoader("seq2seq", model_name="gpt2-base-ch", ', model)
    script = script.replace("valid_dataset=val_dataset,", "# valid_dataset=val_dataset,")
    script = script.replace("optimizer=optimizer", "# optimizer=optimizer")
    return script.replace("checkpoints_gpt2_title-generation", "several_decoders")


def environment_arguments() -> str:
    """`train_env_trainer.py`, whose command line has the arguments."""
    script = glm("pytorch").replace(
        "from shardzoo.trainer import Trainer", "from shardzoo.compat import EnvTrainer, EnvArgs"
    )
    begin, end = script.index("trainer = Trainer("), script.index("loader =")
    return script[:begin] + "env_args = EnvArgs()\ntrainer = EnvTrainer(env_args)\n" + script[end:]


ENVIRONMENT_ARGUMENTS = (
    "--epochs=2 --batch_size=4 --env_type=pytorch --lr=2e-3 --log_interval=1 --experiment_name=env --save_dir=env "
    "--num_checkpoints=1 --fp16=False --wandb=False --pytorch_device=cpu"
)


def multi_gpu_titles() -> str:
    several = (
        'env_type="pytorchDDP", num_checkpoints=1, master_ip="127.0.0.1", master_port=17750, num_nodes=1, num_gpus=2, '
        'model_parallel_size=1, hostfile="./hostfile", deepspeed_config="./deepspeed.json", training_script=__file__,'
    )
    script = BERT_TITLES.replace('env_type="pytorch",', several)
    return script.replace("batch_size=8", "batch_size=4").replace("checkpoints_seq2seq", "several")


def ner_generate(kind: str, run: str, wanted: str, more: str = "") -> str:
    target = '["LOC", "ORG", "PER"]'
    if kind == "crf":
        target = '["O", "B-LOC", "I-LOC", "B-ORG", "I-ORG", "B-PER", "I-PER"]'
    script = NER_GENERATE.replace("KIND", kind).replace("RUN", run).replace("WANTED", wanted)
    return script.replace("TARGET", target).replace("MORE", more)


SCRIPTS = {
    "FlagAI t5_title_generation": T5_TITLES,
    "FlagAI glm_title_generation": glm("deepspeed"),
    "FlagAI bert_title_generation": BERT_TITLES,
    "FlagAI roberta_title_generation/train": ROBERTA_TITLES,
    "FlagAI roberta_title_generation/generate": ROBERTA_TITLES_GENERATE,
    "FlagAI bert_title_generation_english": BERT_ENGLISH_TITLES,
    "FlagAI glm_poetry_generation": GLM_POETRY,
    "FlagAI glm_poetry_generation/generate": GLM_POETRY_GENERATE,
    "FlagAI roberta_faq/1_construct_data": FAQ_DATA,
    "FlagAI roberta_faq/2_test_bert_faq": FAQ_SEARCH.replace("INDEX", INDEX),
    "FlagAI opt": OPT,
    "FlagAI cpm_1": CPM,
    "FlagAI roberta_ner": ROBERTA_NER,
    "FlagAI roberta_ner/train_crf": ROBERTA_CRF,
    "FlagAI roberta_ner/generate_crf": ner_generate(
        "crf", "checkpoints_ner_crf/roberta_ner", "{'LOC': [' red']}"
    ),
    "FlagAI roberta_ner/train_global_pointer": ROBERTA_POINTER,
    "FlagAI roberta_ner/generate_global_pointer": ner_generate(
        "gp", "checkpoints_ner_gp/roberta_ner_global_pointer", "{'LOC': [' red'], 'PER': [t]}",
        "inner_dim=64, only_download_config=True,",
    ),
    "FlagAI roberta_semantic_matching": ROBERTA_MATCHING,
    "FlagAI gpt2_text_writting": GPT2_WRITING,
    "FlagAI quickstart/ner_ch": QUICK_NER,
    "FlagAI quickstart/title_ch": QUICK_TITLE,
    "FlagAI quickstart/title_en": QUICK_TITLE.replace("RoBERTa-base-ch", "BERT-base-en"),
    "FlagAI quickstart/writing_ch": QUICK_WRITING,
    "FlagAI quickstart/glm_title_ch": QUICK_GLM_TITLE,
    "FlagAI quickstart/glm_blank_filling_QA_ch": QUICK_BLANKS,
    "FlagAI roberta_semantic_matching/generate": MATCHING_GENERATE,
    "FlagAI roberta_title_generation/train_multi_gpu": multi_gpu_titles(),
    "FlagAI gpt2_title_generation": GPT2_TITLES,
    "FlagAI gpt2_title_generation/train_multi_gpu": multi_gpu_decoder(),
    "FlagAI glm_title_generation/train_env_trainer": environment_arguments(),
    "FlagAI glm_blank_filling": GLM_SAMPLES,
    "FlagAI quickstart/glm_blank_filling_QA_ch_mutigpu": MULTI_GPU_BLANKS,
    "FlagAI opt_pretrain": opt_pretrain(),
    "FlagAI Qwen/generate": QWEN,
    "t2t tldr": t2t(f"{VALIDATED} gradient_accumulation_steps=1,", TRAIN_AND_TEST),
    "t2t gradient_checkpointing": t2t("gradient_checkpointing=True,", TRAIN_AND_TEST, valid=False),
    "t2t soft_prompt_tuning": t2t(
        f'{VALIDATED} source_id="s", target_id="t", warmup_ratio=0.1, lr_scheduler_type="linear", fp16=False,'
        'logging_strategy="epoch", save_strategy="epoch", save_total_limit=1,', PROMPTS,
    ),
    "t2t tldr-gpt": TLDR_GPT,
    "t2t paraphrasing": PARAPHRASING,
    "t2t deepspeed_test": t2t('deepspeed="zero_3.json",', DEEPSPEED_TEST),
    "diacritics": diacritics("pytorch", 1),
    "diacritics on two processes": diacritics("pytorchDDP", 2),
    "t2t model_parallel": t2t(f"{VALIDATED} model_parallel_gpus=2,", TRAIN_AND_TEST),
}  # fmt: skip
# A script that uses what another one has trained.
FOLLOWS = {
    "FlagAI roberta_ner/generate_crf": "FlagAI roberta_ner/train_crf",
    "FlagAI roberta_ner/generate_global_pointer": "FlagAI roberta_ner/train_global_pointer",
    "FlagAI roberta_semantic_matching/generate": "FlagAI roberta_semantic_matching",
    "FlagAI glm_poetry_generation/generate": "FlagAI glm_poetry_generation",
    "FlagAI roberta_title_generation/generate": "FlagAI roberta_title_generation/train",
    "FlagAI roberta_faq/2_test_bert_faq": "FlagAI roberta_faq/1_construct_data",
}
# Start processes, or DeepSpeed.
SEVERAL = (
    "FlagAI glm_title_generation",
    "FlagAI roberta_title_generation/train_multi_gpu",
    "FlagAI gpt2_title_generation/train_multi_gpu",
    "FlagAI quickstart/glm_blank_filling_QA_ch_mutigpu",
    "t2t deepspeed_test",
    "t2t model_parallel",
    "diacritics",  # reads by workers
    "diacritics on two processes",
)
ZERO_3 = {  # t2t-tuner's published file, at a smaller batch
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True}, "allgather_partitions": True,
        "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True, "reduce_bucket_size": 2e8,
        "contiguous_gradients": True, "round_robin_gradients": True,
    },
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
             "min_loss_scale": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                 "warmup_num_steps": "auto"}},
    "gradient_accumulation_steps": 2, "gradient_clipping": "auto", "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 4,
}  # fmt: skip
CONFIG = {  # FlagAI's published file, at a smaller batch
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "steps_per_print": 50,
    "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True, "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 3, "contiguous_gradients": False, "overlap_comm": True, "reduce_scatter": True,
        "reduce_bucket_size": 5e7, "allgather_bucket_size": 5e7, "cpu_offload": False,
    },
    "fp16": {"enabled": False, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "optimizer": {"type": "Adam", "params": {"lr": 5e-6, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 1e-2}},
    "activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": False},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models under FlagAI's names, and data."""
    root = tmp_path_factory.mktemp("scripts")
    models = root / "state_dict"
    save_model(models / "T5-base-ch", "T5ForConditionalGeneration", "t5")
    save_model(models / "RoBERTa-base-ch", "BertForMaskedLM", "bert")
    save_model(models / "gpt2-base-ch", "GPT2LMHeadModel", "gpt2")
    train_tokenizer(
        "glm-bpe", [text(seed, 12) for seed in range(200)], 340, models / "GLM-large-ch"
    )
    save_glm(models / "GLM-large-ch", "gpt2", max_sequence_length=600)
    tokenizer = tokenizer_like("gpt2")
    tokenizer.save_pretrained(models / "opt-125m-en")
    sizes = {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.OPTConfig(
        vocab_size=len(tokenizer), word_embed_proj_dim=32, max_position_embeddings=400, **sizes
    )
    transformers.OPTForCausalLM(config).save_pretrained(models / "opt-125m-en")
    save_model(models / "CPM-large-ch", "GPT2LMHeadModel", "gpt2", n_positions=256)
    save_model(models / "aquila-7b", "LlamaForCausalLM", "gpt2")
    save_model(models / "qwen3-8b", "Qwen3ForCausalLM", "gpt2")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(models / "qwen3-8b")
    (models / "BERT-base-en").symlink_to("RoBERTa-base-ch")
    (root / "checkpoints").symlink_to(models)  # FlagAI's default folder of models
    rows = [(f"{text(n, 5)} red", text(n, 2)) for n in range(16)]
    for side, name in enumerate(("train.src", "train.tgt")):
        (root / name).write_text("".join(row[side] + "\n" for row in rows))
    poems = [f"{source[:9]}：五言绝句" for source, _ in rows]
    (root / "poems.src").write_text("\n".join(poems) + "\n", encoding="utf-8")
    news = ["id\tkind\tsub\ttitle\ttext", *(f"1\ta\tb\t{t}\t{s}" for s, t in rows)]
    (root / "news.tsv").write_text("\n".join(news) + "\n")
    answers = [f"{source},{n},{target} {n}" for n, (source, target) in enumerate(rows)]
    (root / "faq.csv").write_text("\n".join(["title,question,reply", *answers]) + "\n")
    records = [json.dumps({"translation": {"s": source, "t": target}}) for source, target in rows]
    (root / "pairs.json").write_text("\n".join(records))
    pairs = [json.dumps({"translation": {"en": source, "pa": target}}) for source, target in rows]
    (root / "paraphrases.json").write_text("\n".join(pairs))
    lines = [f"<start> {source} <end> SENTIMENT: {target} <end>" for source, target in rows]
    (root / "lines.txt").write_text("\n".join(lines))
    (root / "hostfile").write_text("localhost slots=2\n")
    (root / "deepspeed.json").write_text(json.dumps(CONFIG))
    (root / "stage_1.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    (root / "zero_3.json").write_text(json.dumps(ZERO_3))
    return root


def changed_lines(script: str) -> int:
    return sum(line.endswith(CHANGED) for line in script.splitlines())


@pytest.mark.parametrize("name", by_turns(SCRIPTS, 4))
def test_a_script_runs(name, folder, monkeypatch):
    """In this process, or if it starts several, as a command."""
    monkeypatch.chdir(folder)
    if name in FOLLOWS:
        before = folder / f"{FOLLOWS[name].replace(' ', '_').replace('/', '_')}.py"
        if not before.exists():
            before.write_text(SCRIPTS[FOLLOWS[name]])
            runpy.run_path(str(before), run_name="__main__")
    path = folder / f"{name.replace(' ', '_').replace('/', '_')}.py"
    path.write_text(SCRIPTS[name])
    if name in SEVERAL:
        command = ["python", str(path)]
        if name.endswith("mutigpu"):
            command = ["python", "-m", "torch.distributed.run", "--nproc-per-node", "2", str(path)]
        ran = subprocess.run(
            command, env=warm_environment(), capture_output=True, text=True, timeout=280
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    else:
        words = ENVIRONMENT_ARGUMENTS.split() if name.endswith("env_trainer") else []
        monkeypatch.setattr("sys.argv", [str(path), *words])
        runpy.run_path(str(path), run_name="__main__")
    curves = sorted(Path(folder).rglob("metrics.jsonl"), key=lambda file: file.stat().st_mtime)
    if "trainer.train" in SCRIPTS[name] or name.startswith("t2t"):
        records = [json.loads(line) for line in curves[-1].read_text().splitlines()]
        losses = [record["train/loss"] for record in records if "train/loss" in record]
        assert losses[-1] < losses[0] or len(losses) == 1
    if name.startswith("diacritics"):
        size = 6 if "two" in name else 3
        assert len(losses) == 64 // size
        assert f"{64 % size} of 64 samples were left out at the end" in ran.stdout


def test_few_lines_of_the_scripts_had_to_change():
    counts = {name: changed_lines(script) for name, script in SCRIPTS.items()}
    assert statistics.median(counts.values()) <= 2
    assert max(counts.values()) <= 4


# LiBai's published configuration of mT5, `projects/MT5/configs/mt5_pretrain.py`, as overrides of
# `pretrain.py --config recipes/mt5-libai.yaml`, which has its model and objective.
LIBAI = (
    "tokenization.tokenizer.vocab_file=vocabulary dataloader.train.dataset[0].data_prefix=corpus "
    "dataloader.train.dataset[0].indexed_dataset.data_prefix=corpus "
    "model.cfg.hidden_size=768 model.cfg.hidden_layers=12 model.cfg.num_attention_heads=12 "
    "model.cfg.is_encoder_decoder=False model.cfg.amp_enabled=True model.cfg.pretrained_model_path=None "
    "train.output_dir=out train.train_micro_batch_size=4 train.train_epoch=1 train.train_iter=24000 "
    "train.log_period=10 train.amp.enabled=False train.warmup_ratio=0.0417 train.checkpointer.period=10 "
    "train.checkpointer.max_to_keep=20 train.input_placement_device=cpu "
    "train.dist.tensor_parallel_size=1 train.dist.pipeline_parallel_size=1 train.dist.pipeline_num_layers=24 "
    "train.evaluation.enabled=True train.evaluation.eval_period=5000 "
    "train.zero_optimization.enabled=True train.zero_optimization.stage=2 "
    "train.activation_checkpoint.enabled=False train.num_accumulation_steps=8 graph.enabled=True "
    "optim.lr=1e-4 optim.weight_decay=0.01 optim.eps=1e-8 optim.params.clip_grad_max_norm=1.0"
)
# The recipe; the number of processes instead of that of replicas; and the schedule.
LIBAI_CHANGED = f"--config {RECIPES / 'mt5-libai.yaml'} num_gpus=1 lr_schedule=constant_with_warmup"
# A short run of a small model; the rest is as in LiBai's file.
LIBAI_SMALL = (
    "hidden_size=32 num_hidden_layers=1 num_attention_heads=2 sequence_length=48 target_length=24 train.train_iter=20 "
    "train.train_micro_batch_size=2 train.num_accumulation_steps=1 optim.lr=1e-2 "
    "eval_sequences=4 final_eval_sequences=4"
)
# The other configurations that LiBai publishes for families of the zoo: its own of BERT, GPT-2, RoBERTa and T5.
LIBAI_FILES = (
    "tokenization.tokenizer.vocab_file=VOCABULARY dataloader.train.dataset[0].data_prefix=corpus "
    "dataloader.train.dataset[0].indexed_dataset.data_prefix=corpus model.cfg.hidden_size=32 "
    "model.cfg.hidden_layers=2 model.cfg.num_attention_heads=2 train.input_placement_device=cpu "
    "train.dist.pipeline_num_layers=2 train.train_micro_batch_size=2 train.amp.enabled=False train.output_dir=out"
)
LIBAI_OTHERS = {
    "bert_large_pretrain": "bert-large-uncased",
    "gpt2_pretrain": "gpt2",
    "roberta_pretrain": "roberta-large",
    "t5_large_pretrain": "t5-v1_1-base",
}
LIBAI_TUNING = (
    "shardzoo finetune --model llama --task text2text-generation --train-file alpaca.json --source-id instruction "
    "--target-id output --max-source-length 32 --max-target-length 16 --train-steps 2"
)
# Its projects, as commands. `tools/train.sh tools/train_net.py CONFIG 2` is the command with two processes.
LIBAI_PROJECTS = {
    "MagicPrompt": (
        "shardzoo data prepare --input texts.jsonl --tokenizer gpt2 --workers 2 --output prompts",
        "shardzoo pretrain --init-from gpt2 data=prompts sequence_length=48 train.train_iter=4 "
        "train.train_micro_batch_size=2 eval_sequences=4 final_eval_sequences=4 train.output_dir=magic",
        "shardzoo generate --model magic/hf --prompt one --max-new-tokens 4",
    ),
    "text_classification": (
        "shardzoo finetune --model bert --train-file afqmc.json --pair-id pair --max-source-length 32 "
        "--batch-size 4 --train-steps 2 --tp 2 --output-dir classes",
    ),
    "SimCSE": (
        "shardzoo finetune --model bert --task embedding --train-file same.json --pooling cls "
        "--dropout-rate 0.1 --max-source-length 32 --train-steps 2 --output-dir simcse",
    ),
    "Couplets": (
        "shardzoo finetune --model t5 --train-file couplets.source --max-source-length 32 --max-target-length 32 "
        "--train-steps 2 --tp 2 --output-dir couplets",
    ),
    "Llama": (
        f"{LIBAI_TUNING} --pp 2 --output-dir sft",
        f"{LIBAI_TUNING} --lora-rank 2 --output-dir adapter",
        "shardzoo generate --model sft/hf --prompt one --max-new-tokens 4 --tp 2",
    ),
    "MT5/configs/t5_inference": (
        "shardzoo generate --model t5 --prompt one --max-new-tokens 4 --tp 2 --pp 2",
    ),
    "GLM": (
        "shardzoo generate --model glm --glm-vocabulary bert --prompt one --max-new-tokens 4 --tp 2 --pp 2",
    ),
}


@pytest.fixture(scope="module")
def libai_folder(tmp_path_factory) -> Path:
    """A folder with texts, a bare vocabulary of BERT, models, and data as the projects' readers take it."""
    root = tmp_path_factory.mktemp("libai")
    texts = [". ".join(text(6 * n + part, 10) for part in range(6)) + "." for n in range(60)]
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    words = sorted({word for one in texts for word in one.replace(".", " ").split()})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "."]
    (root / "vocab.txt").write_text("\n".join([*special, *words]))
    save_model(root / "vocabulary", "MT5ForConditionalGeneration", "t5")
    for name, architecture in (
        ("gpt2", "GPT2LMHeadModel"),
        ("bert", "BertForMaskedLM"),
        ("t5", "T5ForConditionalGeneration"),
    ):
        save_model(root / name, architecture, name)
    save_model(root / "llama", "LlamaForCausalLM", "gpt2")
    tokenizer_like("bert").save_pretrained(root / "glm")
    save_glm(root / "glm", "bert")
    rows = [(text(n, 6), text(n + 500, 3)) for n in range(40)]
    files = {
        "afqmc": [{"s": a, "pair": b, "t": n % 2} for n, (a, b) in enumerate(rows)],
        "same": [{"anchor": a, "positive": a} for a, _ in rows],
        "alpaca": [{"instruction": a, "output": b} for a, b in rows],
    }
    for name, records in files.items():
        (root / f"{name}.json").write_text("\n".join(map(json.dumps, records)))
    (root / "couplets.source").write_text("\n".join(a for a, _ in rows))
    (root / "couplets.target").write_text("\n".join(b for _, b in rows))
    return root


def run_in(folder: Path, command: str) -> str:
    ran = subprocess.run(
        command.split(),
        cwd=folder,
        env=warm_environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.before_release
@pytest.mark.parametrize("name", LIBAI_PROJECTS)
def test_libais_projects_are_commands(name, libai_folder):
    for command in LIBAI_PROJECTS[name]:
        shown = run_in(libai_folder, command)
        if " generate " in command:
            [answer] = [line for line in shown.splitlines() if line.startswith("{")]
            assert "generated_text" in json.loads(answer)
        if "--output-dir" in command:
            folder = libai_folder / command.split()[-1]
            assert "train/loss" in (folder / "metrics.jsonl").read_text()


# The launches of LiBai's page for mT5. Two machines are two `torchrun` on this one.
TWO_MACHINES = (
    "torchrun --nnodes 2 --node-rank {rank} --master-addr 127.0.0.1 --master-port {port} "
    "--nproc-per-node 4 pretrain.py"
)
LIBAI_LAUNCHES = {
    "8 cards, data parallel": ("python pretrain.py", "num_gpus=8"),
    "8 cards, pipeline": ("python pretrain.py", "pipeline_parallel_size=8"),
    "8 cards, 2 x 2 x 2": (
        "python pretrain.py",
        "num_gpus=8 model_parallel_size=2 pipeline_parallel_size=2",
    ),
    "2 machines of 4 cards": (TWO_MACHINES, "model_parallel_size=2 pipeline_parallel_size=2"),
}


@pytest.mark.before_release
@pytest.mark.parametrize("name", LIBAI_LAUNCHES)
def test_libais_launches_of_eight_processes(name, libai_folder, tmp_path):
    """Each layout has the loss of the first step of one process with the same global batch."""
    launcher, layout = LIBAI_LAUNCHES[name]
    settings = (
        f"--config {RECIPES / 'mt5-libai.yaml'} data={libai_folder / 'texts.jsonl'} "
        f"tokenizer={libai_folder / 'vocabulary'} hidden_size=32 num_hidden_layers=4 num_attention_heads=2 "
        "sequence_length=48 target_length=24 train.train_iter=2 train.global_batch_size=16 "
        "train.train_micro_batch_size=2 eval_sequences=8 final_eval_sequences=8 precision=fp32 tf32=False"
    )
    command = launcher.replace("pretrain.py", str(RECIPES.parent / "pretrain.py"))
    words = f"{settings} {layout} train.output_dir={tmp_path / 'out'}"
    commands = [f"{command} {words}".format(rank=0, port=free_port())]
    if launcher == TWO_MACHINES:
        port = free_port()
        commands = [f"{command} {words}".format(rank=rank, port=port) for rank in (0, 1)]
    alone = (
        f"python {RECIPES.parent / 'pretrain.py'} {settings} train.output_dir={tmp_path / 'alone'}"
    )
    run_in(tmp_path, alone)
    with ThreadPoolExecutor(len(commands)) as machines:
        list(machines.map(lambda line: run_in(tmp_path, line), commands))
    curves = []
    for run in ("alone", "out"):
        records = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").open()]
        curves.append([record["train/loss"] for record in records if "train/loss" in record])
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert len(curves[0]) == 2


@pytest.mark.before_release
@pytest.mark.parametrize("name", LIBAI_OTHERS)
def test_libais_other_configurations_train_on_its_data(name, libai_folder, tmp_path):
    """`tools/preprocess_data.py` with a bare vocabulary and sentences, and then the file's own settings."""
    kind = name.split("_")[0]
    vocabulary = "gpt2" if kind in ("gpt2", "roberta") else "vocab.txt"
    if kind == "roberta":
        vocabulary = "bert"
    end = " --no-append-eos --split-sentences" if vocabulary == "vocab.txt" else " --no-append-eos"
    prefix = tmp_path / "corpus"
    run_in(
        libai_folder,
        f"shardzoo data prepare --input texts.jsonl --tokenizer {vocabulary} --output {prefix}{end}",
    )
    words = LIBAI_FILES.replace("VOCABULARY", vocabulary).replace("=corpus", f"={prefix}")
    words = words.replace("=out", f"={tmp_path / 'out'}")
    short = (
        "train.num_accumulation_steps=1 train.train_iter=4 train.log_period=1 sequence_length=48 "
        "held_out_fraction=0.3 eval_sequences=4 final_eval_sequences=4"
    )
    run_in(
        libai_folder,
        f"shardzoo pretrain --model {LIBAI_OTHERS[name]} train.dist.tensor_parallel_size=2 {words} {short}",
    )
    records = [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").open()]
    assert len([record for record in records if "train/loss" in record]) == 4


def test_libais_configuration_of_mt5_trains(folder, monkeypatch):
    monkeypatch.chdir(folder)
    save_model(folder / "vocabulary", "MT5ForConditionalGeneration", "t5")
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text(n, 60)}) + "\n" for n in range(60))
    )
    preparing = ["data", "prepare", "--input", "texts.jsonl", "--output", "corpus"]
    assert main([*preparing, "--tokenizer", "vocabulary"]) in (0, None)
    words = [*LIBAI.split(), *LIBAI_CHANGED.split()]
    made = read_arguments(words, quiet=True)
    assert (made.train_steps, made.micro_batch_size, made.log_interval, made.eval_interval) == (
        24000,
        4,
        10,
        5000,
    )
    assert (made.save_interval, made.save_total_limit, made.output_dir, made.warmup_ratio) == (
        10,
        20,
        "out",
        0.0417,
    )
    assert (made.model_parallel_size, made.precision, made.data) == (1, "fp32", ("corpus",))
    assert (made.gradient_accumulation_steps, made.zero_stage, made.tokenizer) == (
        8,
        2,
        "vocabulary",
    )
    assert (made.hidden_size, made.num_hidden_layers, made.init_from) == (768, 12, None)
    command = ["python", str(RECIPES.parent / "pretrain.py"), *words, *LIBAI_SMALL.split()]
    ran = subprocess.run(
        command, env=warm_environment(), capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    curve = [
        json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [record["train/loss"] for record in curve if "train/loss" in record]
    assert len(losses) == 2
    assert losses[1] < losses[0] - 0.1
    assert len(list((folder / "out" / "checkpoints").glob("step-*"))) == 2
    counts = [*map(changed_lines, SCRIPTS.values()), len(LIBAI_CHANGED.split()) - 1]
    assert statistics.median(counts) <= 2


def test_flagais_loader_makes_new_models_and_names_the_task_to_use(folder):
    from shardzoo.compat import AutoLoader

    place = {"model_name": "RoBERTa-base-ch", "model_dir": str(folder / "state_dict")}
    loaded = AutoLoader("masklm", **place).get_model()
    new = AutoLoader("masklm", load_pretrain_params=False, **place).get_model()
    assert new.config == loaded.config
    assert any((a != b).any() for a, b in zip(new.parameters(), loaded.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"inner_dim is for the tasks with -gp, not for ner"):
        AutoLoader("ner", class_num=3, inner_dim=8, **place)


def test_a_second_run_is_refused_before_anything_is_loaded(tmp_path):
    from shardzoo.trainer import Trainer

    run = tmp_path / "t5/checkpoints/step-000004"
    run.mkdir(parents=True)
    again = {"experiment_name": "t5", "save_dir": str(tmp_path), "epochs": 1}
    with pytest.raises(
        ValueError, match=r"saved at step 4; resume it .* overwrite=True, or choose"
    ):
        Trainer(**again)
    script = tmp_path / "script.py"
    script.write_text(f"from shardzoo.trainer import Trainer\n\nTrainer(**{again})\n")
    ran = subprocess.run(
        ["python", str(script)], env=warm_environment(), capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 1
    assert [line for line in ran.stderr.splitlines() if "torchao" not in line][-1].startswith(
        "error: "
    )
    assert "Traceback" not in ran.stderr
    Trainer(**again, overwrite=True)
    Trainer(**again, resume=True)
    Trainer(experiment_name="t5", save_dir=str(tmp_path))  # It may only evaluate.
    assert run.is_dir()
