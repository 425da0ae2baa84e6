from torch import Tensor

class Channel:
    most_ranks: int
    def __init__(
        self,
        descriptor: int,
        rank: int,
        processes: list[int],
        capacity: int,
        slots: int,
        timeout: float,
        spin: float,
    ) -> None: ...
    def start(self, kind: int, dtype: int, tensor: Tensor, out: Tensor, count: int) -> int: ...
    def start_all_to_all(
        self,
        dtype: int,
        tensor: Tensor,
        out: Tensor,
        sent: list[int],
        received: list[int],
        longest: int,
    ) -> int: ...
    def finish(self, number: int) -> None: ...
    def set_timeout(self, seconds: float) -> None: ...
    @staticmethod
    def count_bytes(ranks: int, capacity: int, slots: int) -> int: ...
