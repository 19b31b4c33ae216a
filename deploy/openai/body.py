"""Reading a JSON body: bounded in bytes and depth, strict in its numbers."""

import asyncio
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from expertmesh.deploy.openai.errors import ApiError, bad

# Work on bodies above this size leaves the event loop: it would stall every running stream.
HEAVY_BYTES = 16 * 1024


async def read_json(
    request: Request, limit: int, max_depth: int, *, empty_ok: bool = False
) -> tuple[dict[str, Any], bool]:
    """(the request's JSON object, whether working on it belongs in a thread).

    empty_ok: no body at all counts as {}. Raises ApiError 400 or 413, or ClientDisconnect.
    Top-level nulls are dropped: clients send null for "unset", so it must mean the absent key.
    """
    raw = await _read(request, limit)
    if empty_ok and not raw:
        return {}, False
    if len(raw) > HEAVY_BYTES:
        return await asyncio.to_thread(parse, raw, max_depth), True
    return parse(raw, max_depth), False


async def _read(request: Request, limit: int) -> bytes:
    too_large = ApiError(413, f"the request body exceeds the limit of {limit} bytes")
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise too_large  # before a byte of it is read
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise too_large
        pieces.append(piece)
    if declared is not None and declared.isdigit() and size < int(declared):
        raise ClientDisconnect
    return b"".join(pieces)


def parse(raw: bytes, max_depth: int) -> dict[str, Any]:
    """JSON object -> dict without null values. orjson refuses NaN, Infinity and lone surrogates."""
    if not raw:
        raise bad("the request body is empty; a JSON object is expected", code="invalid_json")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad("the request body must be a JSON object", code="invalid_json")
    if too_deep(value, max_depth):
        raise bad(f"the request body nests deeper than {max_depth} levels", code="invalid_json")
    return {key: item for key, item in value.items() if item is not None}


def too_deep(value: object, limit: int) -> bool:
    """Whether containers nest deeper than `limit`. Level by level: recursion is the attack."""
    level = [value]
    for _ in range(limit + 1):
        deeper: list[object] = []
        for item in level:
            if isinstance(item, dict):
                deeper += [child for child in item.values() if isinstance(child, dict | list)]
            elif isinstance(item, list):
                deeper += [child for child in item if isinstance(child, dict | list)]
        if not deeper:
            return False
        level = deeper
    return True
