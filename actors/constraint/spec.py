"""What a request asks of the form of its answer. Only text travels; every process compiles it.

The grammar library is llguidance: Lark with special tokens by name, JSON schemas, regular
expressions.
"""

from typing import Literal

import msgspec

Kind = Literal["json_schema", "regex", "choice", "grammar", "composed"]

# Compiling takes time and stack in proportion to the text; see trial.py for what it may take.
MAX_TEXT = 256 * 1024


class ConstraintError(ValueError):
    """A constraint that cannot be used, or whose text cannot go on. The message says why."""


class Constraint(msgspec.Struct, frozen=True, omit_defaults=True):
    """The set of texts an answer may be, from its first token to its end.

    kind and text: "json_schema": a JSON schema. "regex": the whole answer matches it. "choice": a
    JSON array of strings. "grammar": Lark, or GBNF (what has `::=` in it). "composed": llguidance's
    own JSON form, a list of named grammars of which the first is the start; chat answers have it.
    field: the part of the request it came from, for error messages.
    """

    kind: Kind
    text: str
    field: str = "structured_outputs"
