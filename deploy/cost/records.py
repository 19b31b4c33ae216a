"""What the three ledgers hold: one pydantic model per kind, version 1 of each.

Money is Decimal, always in the currency the user named, and prices are always the user's.
"""

from datetime import datetime
from decimal import Decimal
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=0, le=1 << 60)]
Seconds = Annotated[float, Field(gt=0, le=1e10, allow_inf_nan=False)]
Amount = Annotated[Decimal, Field(ge=0, allow_inf_nan=False, max_digits=30)]
Currency = Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
Short = Annotated[str, Field(max_length=500)]
HOUR = Decimal(3600)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    at: AwareDatetime = Field(description="When it was recorded.")


class _Priced(_Record):
    """Work of known length on hardware at a price per hour."""

    seconds: Seconds
    gpus: Amount = Field(description="How many are paid for; a machine without any counts as one.")
    price_per_gpu_hour: Amount | None = None
    currency: Currency | None = None
    prompt_tokens: Count = 0
    generated_tokens: Count = 0
    requests: Count = Field(description="All that were sent or taken.")
    completed: Count = Field(description="Of these, those that ended as they should.")
    memory_bytes: Count | None = None
    memory_of: Literal["processes", "front door"] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.price_per_gpu_hour is None) != (self.currency is None):
            raise ValueError("price_per_gpu_hour and currency are given together or not at all")
        if self.completed > self.requests:
            raise ValueError(f"completed {self.completed} exceeds requests {self.requests}")
        return self

    @property
    def cost(self) -> Decimal | None:
        """GPU-hours times the price; None without a price."""
        if self.price_per_gpu_hour is None:
            return None
        return self.gpus * Decimal(str(self.seconds)) / HOUR * self.price_per_gpu_hour


class LoadTest(_Priced):
    """One run of the own load generator. failures: by reason; with completed they are all
    requests. no_usage: completed ones whose tokens the server did not tell."""

    LEDGER: ClassVar[str] = "load tests"

    kind: Literal["load_test"] = "load_test"
    url: Short
    model: Short
    concurrency: Annotated[int, Field(ge=1)]
    max_tokens: Annotated[int, Field(ge=1)]
    failures: dict[Short, Count] = {}
    no_usage: Count = 0
    first_token_median_s: float | None = None
    first_token_p99_s: float | None = None

    @model_validator(mode="after")
    def _all_accounted_for(self) -> Self:
        if self.completed + sum(self.failures.values()) != self.requests:
            raise ValueError("completed and failures do not add up to requests")
        return self


class Session(_Priced):
    """A server's work since its start. Recorded again, the later record of a `session` stands for
    the earlier: both count from the same start. requests: the answers that ended well, and what
    failed, whoever's fault that was."""

    LEDGER: ClassVar[str] = "sessions"

    kind: Literal["session"] = "session"
    session: Short


class PlatformCharge(_Record):
    """One line of a bill, as its platform reports it. Credits are negative."""

    LEDGER: ClassVar[str] = "platform"

    kind: Literal["platform"] = "platform"
    start: datetime
    end: datetime
    resource: Short
    cost: Annotated[Decimal, Field(allow_inf_nan=False, max_digits=30)]
    currency: Currency
    quantity: Annotated[Decimal, Field(allow_inf_nan=False)] | None = None
    unit: Short = ""
    invoice: Short = ""
    prompt_tokens: Count | None = None
    generated_tokens: Count | None = None
    requests: Count | None = None
    completed: Count | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if (self.start.tzinfo is None) != (self.end.tzinfo is None):
            raise ValueError("start and end: both with a time zone, or neither")
        if self.end < self.start:
            raise ValueError(f"end {self.end} is before start {self.start}")
        return self

    @property
    def identity(self) -> str:
        """Everything but when it was recorded: the same line of a bill is not counted twice."""
        return self.model_dump_json(exclude={"at"})


Record = LoadTest | Session | PlatformCharge
