"""One request while it is in the engine."""

import secrets

from expertmesh.actors.attention.adjustments import Penalties, penalties_for
from expertmesh.actors.attention.messages import GenerateRequest, TokenLogprobs
from expertmesh.actors.attention.timings import Times
from expertmesh.actors.attention.validation import end_ids
from expertmesh.actors.constraint.matcher import Matcher
from expertmesh.actors.model.batch import NO_PAGE
from expertmesh.actors.state.offload.context import OffloadedContext
from expertmesh.actors.state.prefix import Prefix

NO_SLOT = -1
NO_PREFIX = Prefix(b"", b"", ())
NONE = frozenset[int]()
# Below this a division by the temperature only loses bits: the draw would be the argmax.
GREEDY_TEMPERATURE = 1e-5


class Sequence:
    """Tokens, place in the queue, and what it owns of the state.

    tokens: prompt, then generated. computed: how many of them are in the state. A preempted
    sequence starts again, at 0 or where the cache has its state: its prompt goes through prefill,
    its generated tokens one by one through decode, and nothing is sampled before computed reaches
    len(tokens). That is the same arithmetic in the same order as the first time, so the
    continuation is bit-exact. A resumed request starts in the same way, with tokens that another
    engine has generated. prefix: what the cache knows of it. context: who has its old pages when
    not all of them stay on the device; their numbers in `pages` are NO_PAGE.

    rank: (due step, number); the smaller, the sooner it is served. It never changes, so a
    preempted sequence keeps its place.
    """

    __slots__ = (
        "bypassed",
        "chunk_end",
        "computed",
        "context",
        "end_ids",
        "greedy",
        "high_water",
        "id",
        "masked_until",
        "matcher",
        "number",
        "pages",
        "params",
        "penalties",
        "preemptions",
        "prefix",
        "priority",
        "prompt_counted",
        "prompt_len",
        "prompt_logprobs",
        "prompt_reported",
        "rank",
        "routing",
        "seed",
        "slot",
        "special",
        "times",
        "tokens",
    )

    def __init__(
        self,
        request: GenerateRequest,
        number: int,
        rank: int,
        eos_ids: frozenset[int],
        arrived: float = 0.0,
        matcher: Matcher | None = None,
    ) -> None:
        """arrived: time.perf_counter's. matcher: of the request's constraint, past resume_ids."""
        params = request.params
        self.id, self.params, self.priority = request.request_id, params, request.priority
        self.number, self.rank = number, (rank, number)
        self.times = Times(arrived)
        self.matcher = matcher
        resumed = request.resume_ids
        self.tokens = request.prompt_ids + resumed
        self.prompt_len = len(request.prompt_ids)
        self.computed = self.chunk_end = 0
        self.slot, self.pages = NO_SLOT, list[int]()
        self.prefix: Prefix = NO_PREFIX
        self.context: OffloadedContext | None = None
        self.preemptions = self.bypassed = 0
        self.prompt_counted = self.prompt_reported = bool(resumed)
        # Positions computed before the last preemption or by another engine, now done again. The
        # last token that was handed out had not been computed.
        self.high_water = len(self.tokens) - 1 if resumed else 0
        self.routing = bytearray()  # routed experts not handed out yet

        self.end_ids = end_ids(params, eos_ids)
        self.masked_until = self.prompt_len + params.min_tokens  # no end id in a shorter text
        self.greedy = params.temperature < GREEDY_TEMPERATURE or params.top_k == 1
        # Without a seed one is drawn here, once: a replay must not draw again.
        self.seed = (secrets.randbits(64) if params.seed is None else params.seed) % 2**64
        self.penalties: Penalties | None = penalties_for(params, request.prompt_ids)
        if self.penalties is not None:
            for token in resumed:
                self.penalties.add(token)
        self.prompt_logprobs: list[TokenLogprobs | None] | None = (
            None if params.prompt_logprobs is None or resumed else [None]
        )
        self.special = (
            not self.greedy
            or self.penalties is not None
            or bool(params.logit_bias)
            or bool(params.min_tokens and self.end_ids)
            or params.logprobs is not None
            or matcher is not None
        )

    def __lt__(self, other: "Sequence") -> bool:
        return self.rank < other.rank

    @property
    def near(self) -> list[int]:
        """Its pages that are on the device."""
        if self.context is None:
            return self.pages
        return [page for page in self.pages if page != NO_PAGE]

    @property
    def lost(self) -> bool:
        """Whether some of its old pages cannot be had, so that it must begin again."""
        return self.context is not None and bool(self.context.lost)

    @property
    def readable(self) -> int:
        """How many tokens need not be computed if their state is known: not the last, from which
        the next one comes, nor one whose log-probabilities or experts are still to be reported."""
        limit = len(self.tokens) - 1
        if self.params.want_routed_experts:
            limit = min(limit, self.high_water)
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_len:
            limit = min(limit, len(self.prompt_logprobs) - 1)
        return limit

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    def unwanted_ends(self) -> frozenset[int]:
        """End ids that should not come next. A constrained text ends with one of them all the same
        when its grammar leaves nothing else."""
        early = len(self.tokens) < self.masked_until
        ignored = self.matcher.ends if self.matcher is not None and self.params.ignore_eos else NONE
        return ignored | self.end_ids if early else ignored

    def ends_with(self, token: int) -> bool:
        """Whether this token, just generated, is the last. What a matcher's end ids end has ended
        for good."""
        return token in self.end_ids or (self.matcher is not None and token in self.matcher.ends)

    def is_stop_id(self, token: int, eos_ids: frozenset[int]) -> bool:
        """Whether it ends the text as one of stop_token_ids, not as the model's own."""
        if self.matcher is not None and token in self.matcher.ends:
            return False
        return token not in eos_ids or self.params.ignore_eos

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if self.penalties is not None:
            self.penalties.add(token)
