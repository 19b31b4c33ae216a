"""Plain records of the sketch: a short code per cached row (kv-state 3.3 d).

Letters: C = R + r columns of a cached row, S of them kept, W of these in 8 bits and the others in
4, B = W + (S - W) / 2 bytes of a code, T tokens, H heads.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Basis:
    """Coordinates y = (z - mean) @ encode_CS of a row z, in which q . z ~ q . mean + (q @
    decode_CS) . y, and z ~ mean + decode_CS @ y. float32, most important first.
    """

    mean_C: Tensor
    encode_CS: Tensor
    decode_CS: Tensor
    wide: int

    @property
    def kept(self) -> int:
        return self.encode_CS.shape[1]

    @property
    def nbytes(self) -> int:
        return self.mean_C.nbytes + self.encode_CS.nbytes + self.decode_CS.nbytes

    @property
    def code_bytes(self) -> int:
        return self.wide + (self.kept - self.wide) // 2
