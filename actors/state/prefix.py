"""What one sequence knows of its own state: its names, where it may begin, and what it leaves."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.item import Header, Kind, Lineage, Name
from expertmesh.actors.state.keys import grow
from expertmesh.actors.state.offload.context import OffloadedContext
from expertmesh.actors.state.store import Fetch, Loaded
from expertmesh.actors.state.tip import Tip
from expertmesh.actors.state.tree import Node


class Owner(Protocol):
    """What the cache needs of a sequence. readable: most tokens that need not be computed again
    (log-probabilities and routing are only known of tokens that are). context: who has its old
    pages, NO_PAGE in `pages`, where not all stay on the device; near: those that are there."""

    number: int
    tokens: list[int]
    prompt_len: int
    computed: int
    slot: int
    pages: list[int]
    prefix: "Prefix"
    context: OffloadedContext | None

    @property
    def readable(self) -> int: ...

    @property
    def near(self) -> list[int]: ...


class Start(NamedTuple):
    """Where a sequence can begin: at `position`, with `names` (pages in order, the snapshot last)
    in memory."""

    position: int
    names: list[Name]


NOWHERE = Start(0, [])


@dataclass(slots=True)
class Prefix:
    """root: of the tenant's chains. tip: the state of a session that it goes on from. switches:
    where the path of this sequence changes, see keys.py. keys, names: of its whole pages, made as
    they are needed. nodes: of the first pages that were in memory when last looked for, and are of
    its tokens; None: loaded. published: how many of them others can find. wanted: positions at
    which snapshots are due. saving: those of the step under way, with their place. junction: where
    it parts from what was known. rungs: those of the ladder that it has left. saved_at: position of
    the last state that a loss of this process leaves. checkpoints: names of snapshots that only
    this sequence uses. start, shared, lent: where it begins, the pages that it reads for that, and
    those in which the snapshot lies where it has no place of its own. fetch, asked_at, loaded: what
    comes from lower tiers, since when, and what has come. noted, looked: whether the disk was
    looked at anew, and whether the tiers were asked. asks, aim: how often they were, and where it
    could begin by their last answer. hit: tokens of the prompt that the first start did not
    compute.
    """

    root: bytes
    layout: bytes
    switches: tuple[int, ...]
    tip: Tip | None = None
    keys: list[bytes] = field(default_factory=list)
    names: list[Name] = field(default_factory=list)
    nodes: list[Node | None] = field(default_factory=list)
    published: int = 0
    wanted: list[int] = field(default_factory=list)
    saving: list[tuple[int, int]] = field(default_factory=list)
    junction: int = 0
    rungs: list[int] = field(default_factory=list)
    saved_at: int = 0
    checkpoints: list[Name] = field(default_factory=list)
    start: Start = NOWHERE
    shared: list[int] = field(default_factory=list)
    lent: tuple[int, ...] = ()
    fetch: Fetch | None = None
    asked_at: float = 0.0
    noted: bool = False
    looked: bool = False
    asks: int = 0
    aim: int = 0
    loaded: dict[Name, Loaded] = field(default_factory=dict)
    hit: int | None = None

    def key(self, page: int, tokens: list[int]) -> bytes:
        """Of whole page `page` of these tokens."""
        grow(self.keys, self.root, tokens, page + 1, self.switches)
        return self.keys[page]

    def page_names(self, count: int, tokens: list[int]) -> list[Name]:
        """Of the first whole pages of these tokens."""
        grow(self.keys, self.root, tokens, count, self.switches)
        self.names += [Name(key, Kind.PAGE) for key in self.keys[len(self.names) : count]]
        return self.names[:count]

    def all_keys(self, tokens: list[int]) -> list[bytes]:
        """Of all whole pages of these tokens, which are the first of the sequence's."""
        return [self.key(page, tokens) for page in range(len(tokens) // PAGE_TOKENS)]

    def header(self, kind: Kind, page: int, tokens: list[int]) -> Header:
        end = (page + 1) * PAGE_TOKENS
        return Header(
            key=self.key(page, tokens),
            kind=kind,
            parent=self.keys[page - 1] if page else self.root,
            position=end,
            tokens=tuple(tokens[end - PAGE_TOKENS : end]),
            lineage=self.lineage(end),
            layout=self.layout,
        )

    def lineage(self, end: int) -> Lineage:
        return "decode" if any(at < end for at in self.switches) else "prefill"

    def fits(self, header: Header, tokens: list[int]) -> bool:
        """Whether a piece of state is of this very prefix: names might collide, tokens do not."""
        return header.layout == self.layout and self.agrees(header, tokens)

    def agrees(self, of: Header | Node, tokens: list[int]) -> bool:
        """The same of what has the layout of this device."""
        begin = (of.position - 1) // PAGE_TOKENS * PAGE_TOKENS
        return of.tokens == tuple(tokens[begin : of.position])

    def has_come(self, loaded: dict[Name, Loaded]) -> None:
        """From lower tiers, instead of what had come before."""
        self.loaded, self.nodes = loaded, []

    def let_go(self) -> None:
        """Of everything that was loaded or is being loaded."""
        if self.fetch is not None:
            self.fetch.cancel()
        self.fetch = None
        self.has_come({})

    def rename(self, switches: tuple[int, ...]) -> None:
        """Its path is another one, and so are its names: those of any prompt."""
        self.tip, self.switches = None, switches
        self.keys, self.names, self.nodes = [], [], []


def ladder(length: int, step: int) -> list[int]:
    """Positions of snapshots along a prompt: every `step` tokens, before its last page."""
    return list(range(step, last_start(length) + 1, step))


def last_start(tokens: int) -> int:
    """The last position on the grid from which a token is left to compute (kv-state 3.1)."""
    return max(0, tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


def thin(positions: list[int], tip: int, step: int) -> list[int]:
    """Which positions of a ladder stay when the sequence has come to `tip`: the farthest of each
    octave of distance, so that what an edit at distance d costs is about d (kv-state 3.2).

    The farthest, for those are what the next octave is filled with as the tip moves on.
    """
    kept: dict[int, int] = {}
    for position in sorted(positions):
        kept.setdefault(max(1, (tip - position) // step).bit_length(), position)
    return list(kept.values())
