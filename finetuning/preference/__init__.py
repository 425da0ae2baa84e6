"""Trains models on preferences between answers: DPO, IPO, KTO, ORPO, SimPO, and reward models.

The losses and the data are TRL's. Other than there, log-probabilities are computed from logits that
stay split over the vocabulary, and encoder-decoders are trained too.
"""
