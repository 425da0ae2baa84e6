"""Reads and writes tokenized corpora on disk: Megatron-LM's `.bin`/`.idx` pairs."""
