"""Traffic of synthetic coding agents, as prompts that grow turn by turn.

Agents of a few kinds begin with their kind's instructions and tools (12K tokens); each turn appends
the last answer and a tool's result (2.2K tokens in the mean, heavy-tailed) up to 80K; some turns go
back and take another way (fork), some change what was said last and ask again (edit). Agents
overlap in time. Shaped after the coding-agent traces of kv-state 2.3; the numbers are drawn.
"""

import heapq
import random
from dataclasses import dataclass
from typing import NamedTuple


class Piece(NamedTuple):
    """`length` tokens of their own."""

    name: int
    length: int


@dataclass(frozen=True)
class Turn:
    """One request: its prompt, and how many tokens it generates."""

    time: float
    agent: int
    prompt: tuple[Piece, ...]
    answer: int

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.prompt)


@dataclass(frozen=True)
class Shape:
    """Tokens, and chances per turn. scale: all lengths are divided by it."""

    agents: int = 40
    kinds: int = 3
    first: int = 12_000
    last: int = 80_000
    step: int = 2_242
    answer: int = 300
    fork: float = 0.06
    edit: float = 0.06
    overlap: int = 12
    scale: int = 1


def agent_turns(shape: Shape, seed: int = 0) -> list[Turn]:
    """All turns in the order of their arrival."""
    rng, turns, names = random.Random(seed), list[Turn](), iter(range(1 << 62))
    tools = [Piece(next(names), shape.first // shape.scale) for _ in range(shape.kinds)]
    free = [(0.0, agent) for agent in range(shape.overlap)]  # when a place is free again
    heapq.heapify(free)
    for agent in range(shape.agents):
        now, _ = heapq.heappop(free)
        kind = tools[rng.randrange(shape.kinds)]
        history: list[tuple[Piece, ...]] = []
        prompt: tuple[Piece, ...] = (kind, Piece(next(names), 1 + shape.step // shape.scale))
        while sum(piece.length for piece in prompt) * shape.scale < shape.last:
            turns.append(Turn(now, agent, prompt, max(1, shape.answer // shape.scale)))
            history.append(prompt)
            now += min(rng.lognormvariate(1.65, 1.0), 90.0)
            if len(history) > 2 and rng.random() < shape.fork:
                prompt = history[rng.randrange(1, len(history) - 1)]
            elif len(history) > 1 and rng.random() < shape.edit:
                prompt = prompt[:-1]
            size = rng.lognormvariate(0, 0.8) * shape.step / 1.377 / shape.scale  # mean: step
            prompt = (*prompt, Piece(next(names), max(1, int(size))))
        heapq.heappush(free, (now, agent))
    return sorted(turns, key=lambda turn: turn.time)


def page_chain(turn: Turn, known: dict[tuple[int, object], int], page: int = 64) -> list[int]:
    """Numbers of the prompt's whole pages; equal where the whole prefix is. known: of all turns."""
    chain, parent, content, room = list[int](), -1, list[tuple[int, int]](), page
    for piece in turn.prompt:
        at = 0
        while piece.length - at >= room:
            content.append((piece.name, at))
            at, room = at + room, page
            parent = known.setdefault((parent, tuple(content)), len(known))
            chain.append(parent)
            content = []
        if at < piece.length:
            content.append((piece.name, at))
            room -= piece.length - at
    return chain
