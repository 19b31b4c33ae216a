"""Reading a JSON body: bounded in bytes, time and depth, strict in its numbers and names."""

import asyncio
import json
import re
import zlib
from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request

from expertmesh.deploy.openai.errors import ApiError, bad
from expertmesh.deploy.openai.served import Limits

# Work on bodies above this size leaves the event loop: it would stall every running stream.
HEAVY_BYTES = 16 * 1024
_UPLOAD_SECONDS = Limits().upload_seconds
_GZIP = 16 + zlib.MAX_WBITS
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


async def read_json(
    request: Request,
    limit: int,
    max_depth: int,
    *,
    seconds: float = _UPLOAD_SECONDS,
    empty_ok: bool = False,
) -> tuple[dict[str, Any], bool]:
    """(the request's JSON object, whether working on it belongs in a thread).

    limit: bytes, of what is sent and of what it inflates to. seconds: for all of it to arrive.
    empty_ok: no body at all counts as {}. Raises ApiError 400, 408, 413, 415; ClientDisconnect.
    Top-level nulls are dropped: clients send null for "unset", so it must mean the absent key.
    """
    if not empty_ok:
        check_media_type(request)
    packed = _packed(request)
    try:
        async with asyncio.timeout(seconds):
            raw = await _read(request, limit)
    except TimeoutError:
        raise ApiError(408, f"the request body did not arrive within {seconds:g} s") from None
    if empty_ok:
        if not raw:
            return {}, False
        check_media_type(request)
    if packed:
        raw = await asyncio.to_thread(inflate, raw, limit)
    if len(raw) > HEAVY_BYTES:
        return await asyncio.to_thread(parse, raw, max_depth), True
    return parse(raw, max_depth), False


def check_media_type(request: Request) -> None:
    """415 for a body that says it is not JSON. One that says nothing is read as JSON."""
    given = request.headers.get("content-type")
    if given is None:
        return
    kind = given.partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"the content-type must be application/json, not '{kind[:80]}'")


def _packed(request: Request) -> bool:
    """Whether the body is gzip. Raises ApiError 415 for any other coding."""
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding in ("gzip", "x-gzip"):
        return True
    if coding not in ("", "identity"):
        raise ApiError(415, f"the content-encoding must be gzip or identity, not '{coding[:80]}'")
    return False


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)  # before a byte of it is read
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        pieces.append(piece)
    if declared is not None and declared.isdigit() and size < int(declared):
        raise ClientDisconnect
    return b"".join(pieces)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body exceeds the limit of {limit} bytes")


def inflate(raw: bytes, limit: int) -> bytes:
    """One gzip member of at most `limit` bytes; no more than that is ever made of it.

    Several members in a row are legal gzip, but no client sends them, and a body of a million
    empty ones takes minutes.
    """
    stream = zlib.decompressobj(wbits=_GZIP)
    try:
        out = stream.decompress(raw, limit + 1)
    except zlib.error as error:
        raise _bad_gzip(str(error)) from None
    if len(out) > limit:
        raise _too_large(limit)
    if not stream.eof:
        raise _bad_gzip("it ends too early")
    if stream.unused_data:
        raise _bad_gzip("something follows its end")
    return out


def _bad_gzip(reason: str) -> ApiError:
    return bad(f"the request body is not valid gzip: {reason}", code="invalid_encoding")


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
    keys = _count_keys(value, max_depth)
    if raw.count(b":") != keys and _STRING.sub(b"", raw).count(b":") != keys:
        raise _duplicate(raw)
    return {key: item for key, item in value.items() if item is not None}


def _count_keys(value: object, max_depth: int) -> int:
    """Keys of all objects together. Level by level: recursion is the attack. Raises ApiError when
    containers nest deeper than max_depth."""
    keys = 0
    level = [value]
    for _ in range(max_depth + 1):
        deeper: list[object] = []
        for item in level:
            if isinstance(item, dict):
                keys += len(item)
                deeper += [child for child in item.values() if isinstance(child, dict | list)]
            elif isinstance(item, list):
                deeper += [child for child in item if isinstance(child, dict | list)]
        if not deeper:
            return keys
        level = deeper
    raise bad(f"the request body nests deeper than {max_depth} levels", code="invalid_json")


def _duplicate(raw: bytes) -> ApiError:
    """A key that is there twice means one thing here and another to a proxy that checks it."""
    twice: list[str] = []

    def object_of(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                twice.append(key)
            seen.add(key)

    json.loads(raw, object_pairs_hook=object_of, parse_int=str, parse_float=str)
    name = twice[0][:80] if twice else ""
    return bad(f"the key '{name}' is there twice in one object", name, "invalid_json")
