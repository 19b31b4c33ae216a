"""Which replica has probably computed the beginning of a prompt, as one front door remembers it.

A hint and nothing more: replicas forget, and other front doors place requests too. A wrong one
costs the time of computing what would have been computed anywhere else.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from cachetools import LRUCache, TTLCache

from expertmesh.actors.attention.messages import GenerateRequest
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.state.keys import chain, named_key, root_key

# Of remembered pages and sessions: those of 4 million tokens, some 27 MB.
ENTRIES = 1 << 16
# Prompts that agree for 32,768 tokens agree as far as anybody looks: some milliseconds.
MOST_PAGES = 512
# A popular prefix is known in several places; more of them would only make entries larger.
MOST_HOLDERS = 8
FORGET_SECONDS = 3600.0
# More than there ever are at a time, those that have left included.
MOST_REPLICAS = 4096
# So many requests more than the least busy replica may one have for the sake of its cache: as a
# number, and as a share of what the least busy one has. Beyond that load is spread.
SLACK_REQUESTS = 4
SLACK_SHARE = 0.5
# So many tokens that need no computing are worth one running request.
TOKENS_PER_REQUEST = 64

Why = Literal["session", "prefix", "spread", "load"]


class Replica(Protocol):
    """holder: a name that no other process ever has. running: requests that it has from this front
    door. load: how much it has to do, in running requests."""

    @property
    def holder(self) -> str: ...

    @property
    def running(self) -> int: ...

    @property
    def load(self) -> float: ...


Link = TypeVar("Link", bound=Replica)


@dataclass(frozen=True, slots=True)
class Route:
    """What of a request is looked for: keys of its prompt's pages, and of its session."""

    tokens: int
    pages: list[bytes]
    session: bytes | None


@dataclass(frozen=True, slots=True)
class Choice(Generic[Link]):
    """known: tokens that probably need no computing there. why: session or prefix: for the sake of
    what is cached there; spread: those that have it have too much to do; load: nothing is known."""

    link: Link
    known: int
    why: Why


class PrefixIndex:
    """Bounded in entries and in age. Lives on one event loop."""

    def __init__(self, entries: int = ENTRIES, clock: Callable[[], float] = time.monotonic) -> None:
        # By holder, when it was last given a request: of equals the one that has waited longest, or
        # a quiet server would fill one cache and leave the others empty.
        self._given: LRUCache[str, int] = LRUCache(MOST_REPLICAS)
        self._turn = 0
        # Holders by key, the latest first.
        self._holders: TTLCache[bytes, tuple[str, ...]] = TTLCache(
            entries, FORGET_SECONDS, timer=clock
        )

    def route(self, request: GenerateRequest) -> Route:
        """The last token is always computed, so a page that ends with the prompt is not looked
        for. Tenants have different keys for the same tokens."""
        root = root_key(b"", request.tenant)
        ids = request.prompt_ids
        whole = min((len(ids) - 1) // PAGE_TOKENS, MOST_PAGES) * PAGE_TOKENS
        session = named_key(root, b"session", request.session) if request.session else None
        return Route(len(ids), chain(root, ids[:whole]), session)

    def choose(self, links: Sequence[Link], route: Route) -> Choice[Link]:
        """The replica with the least to do for this request, what it need not compute taken off;
        among those only that do not have too many requests already."""
        known = self._known(route)
        bound = _bound(min(link.running for link in links))
        near = [link for link in links if link.running <= bound]

        def cost(link: Link) -> tuple[float, int]:
            saved = known.get(link.holder, 0) / TOKENS_PER_REQUEST
            return link.load - saved, self._given.get(link.holder, 0)

        best = min(near, key=cost)
        tokens = known.get(best.holder, 0)
        if not any(link.holder in known for link in links):
            return Choice(best, 0, "load")
        if tokens:
            by_session = best.holder in self._sitting(route)
            return Choice(
                best, min(tokens, route.tokens - 1), "session" if by_session else "prefix"
            )
        return Choice(best, 0, "spread")

    def placed(self, route: Route, holder: str) -> None:
        """The request goes to the replica, which will have its prompt's state: others that come
        meanwhile do best to wait for that."""
        self._turn += 1
        self._given[holder] = self._turn
        # From the end on: what is looked up first must be what is forgotten last.
        for key in reversed(route.pages):
            self._add(key, holder)
        if route.session is not None:
            self._holders[route.session] = (holder,)

    def seated(self, tenant: str, session: str, holder: str) -> None:
        """The replica has the session's state in memory."""
        self._holders[named_key(root_key(b"", tenant), b"session", session)] = (holder,)

    def _add(self, key: bytes, holder: str) -> None:
        others = [one for one in self._holders.get(key, ()) if one != holder]
        self._holders[key] = (holder, *others[: MOST_HOLDERS - 1])

    def _sitting(self, route: Route) -> tuple[str, ...]:
        """Who has the request's session."""
        return () if route.session is None else self._holders.get(route.session, ())

    def _known(self, route: Route) -> dict[str, int]:
        """Tokens from the prompt's first on, by holder. A session is as good as all of them."""
        known: dict[str, int] = {}
        having: set[str] = set()
        for number, key in enumerate(route.pages):
            holders = self._holders.get(key, ())
            left = having.intersection(holders) if number else set(holders)
            if left != having:
                known |= dict.fromkeys(having - left, number * PAGE_TOKENS)
                having = left
            if not having:
                break
        known |= dict.fromkeys(having, len(route.pages) * PAGE_TOKENS)
        return known | dict.fromkeys(self._sitting(route), route.tokens)


def _bound(least: int) -> float:
    return least + max(SLACK_REQUESTS, SLACK_SHARE * least)
