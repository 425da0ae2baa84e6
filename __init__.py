"""shardzoo: a tensor-parallel model zoo. Importing it is cheap; torch is loaded by the parts that need it."""

__version__ = "0.1.0"
