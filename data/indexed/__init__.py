"""Tokenized corpora on disk: Megatron's `.bin`/`.idx` pairs."""
