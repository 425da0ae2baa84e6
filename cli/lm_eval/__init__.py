"""The command of lm-evaluation-harness, with models of the zoo."""
