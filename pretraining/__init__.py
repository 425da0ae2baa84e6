"""Pretrains a model: from arguments and text to a trained, exported and checked model.

The way of a batch from the corpus to its loss, for a GPT-2 over two tensor-parallel ranks. Both
ranks read the same batch. B is the size of a micro-batch, S its length, H the hidden size, V the
vocabulary with its padding.

1. `cli/pretrain.py: main` reads the arguments, starts the ranks, and calls `Pretraining.run`
   (`run.py`), which prepares the corpus and the model and calls `Trainer.train`.
2. `trainer/batches/training_data.py` makes a `ResumableLoader`
   (`data/loading/loader.py`). It asks the objective's dataset for samples
   (`data/objectives/gpt.py`: int64 [S]), and `PretrainingCollate` (`corpora.py`) for batches:
   `input_ids` and `labels`, int64 [B, S].
3. `trainer/loop.py: run` calls `TrainingStep.run` (`trainer/step.py`) for each step. It moves the
   micro-batches to the device, counts their targets, and gives the engine a function that computes
   the loss of a micro-batch, for `forward_backward` (`trainer/engines/`).
4. The engine calls this function, which calls `Trainer.forward_step`, and that the model. What is
   called is `engine.model`, DeepSpeed's or DDP's wrapper; `engine.module` is the model within.
5. `CausalLM.compute_outputs` (`models/language_model.py`) runs the family's `run_backbone`
   (`models/gpt2/model.py`). `VocabParallelEmbedding` (`mpu/embedding.py`) looks up the rows that
   this rank has, V / 2 of them, and sums over the ranks: [B, S, H].
6. `run_stack` (`models/pipeline.py`) runs the blocks (`models/blocks/`). In each, a
   column-parallel projection gives this rank's heads, [B, S, 3H / 2], a row-parallel one sums over
   the ranks: [B, S, H] again. The MLP does the same.
7. `compute_loss` (`models/language_model.py`) shifts the labels and gives the rows that have one to
   `VocabParallelHead.losses` (`mpu/head.py`). Each rank multiplies by its part of the vocabulary,
   [rows, V / 2]; `mpu/cross_entropy.py` exchanges two numbers a row. The loss is the sum over all
   rows divided by the number of targets of the whole global batch.
"""
