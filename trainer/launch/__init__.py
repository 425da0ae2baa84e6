"""The processes of a run: how they start and join, their ranks, their errors and signals."""
