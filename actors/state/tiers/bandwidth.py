"""How fast a tier gives back what it holds, measured."""


class Bandwidth:
    """Seconds for n bytes = latency + n / rate, fitted to recent reads with exponentially fading
    weights. Starts from a cautious guess, which the first few reads outweigh.

    Threads may measure at the same time: a measurement may be lost then, and nothing else.
    """

    def __init__(self, bytes_per_s: float, latency_s: float, memory: int = 64) -> None:
        self._keep = 1 - 1 / memory
        # Sums of 1, bytes, seconds, bytes^2, bytes * seconds: two points of the guess's line.
        self._sums = [0.0] * 5
        for nbytes in (4096, 1 << 20):
            self._add(nbytes, latency_s + nbytes / bytes_per_s)

    def measured(self, nbytes: int, seconds: float) -> None:
        self._add(nbytes, seconds, self._keep)

    def seconds(self, nbytes: int, reads: int = 1) -> float:
        """Estimate for so many bytes in so many reads."""
        ones, sizes, times, squares, products = self._sums
        mean_size, mean_time = sizes / ones, times / ones
        spread = squares / ones - mean_size * mean_size
        if spread > 1e-6 * mean_size * mean_size:
            slope = (products / ones - mean_size * mean_time) / spread
            latency = mean_time - slope * mean_size
            if slope > 0 and latency >= 0:
                return reads * latency + slope * nbytes
        # Reads of one size, or noise: everything is put down to the bytes.
        return nbytes * mean_time / mean_size

    def _add(self, nbytes: int, seconds: float, keep: float = 1.0) -> None:
        terms = (1.0, nbytes, seconds, nbytes * nbytes, nbytes * seconds)
        self._sums = [keep * old + new for old, new in zip(self._sums, terms, strict=True)]
