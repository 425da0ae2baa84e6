"""What only a CPU needs: pooled memory, large matrix products, and the operators of a decoding
step.

    pool.py       large results reuse the memory of freed results
    products.py   large matrix products use the pool, and our kernel where PyTorch's is slower
    few_rows.py   linear layers, norms and attention of the few rows of a decoding step

The ops beside this folder ask it; nothing above `ops/` knows it. docs/kernels.md says when each
part runs and what it brings.
"""
