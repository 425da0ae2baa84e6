"""The processes of a run: starting and joining them, their ranks, their errors and signals."""
