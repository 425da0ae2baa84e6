import numpy as np
from numpy.typing import NDArray

def sample_index(
    lengths: NDArray[np.int64], first: int, stride: int, count: int
) -> NDArray[np.int64]: ...
def sentence_index(
    sizes: NDArray[np.int32],
    marks: NDArray[np.int64],
    max_length: int,
    short_probability: float,
    least_sentences: int,
    seed: int,
) -> NDArray[np.int64]: ...
