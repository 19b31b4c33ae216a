"""What is kept of a session besides its pages and its snapshot, as one small item."""

import struct
from collections.abc import Sequence

import msgspec
import torch

from expertmesh.actors.state.item import Header, Item, Kind, Name
from expertmesh.actors.state.keys import KEY_BYTES, named_key, root_key
from expertmesh.actors.state.tip import Tip

# No mode in it: a session has one name, however its state was computed.
_SESSION = b"session"


class Manifest(msgspec.Struct, kw_only=True, frozen=True):
    """tokens: of the conversation, all that were handed out, as uint32. keys: of its whole pages,
    32 bytes each; tip: see Tip.key. mode: as in root_key. version: the item's position; the
    greatest one of a name counts, whoever wrote it. deleted: the session is gone, and older
    versions elsewhere with it. seed: what the last answer was drawn with, position by position;
    None where it was greedy."""

    tenant: str
    session: str
    mode: str
    tokens: bytes
    position: int
    switches: list[int]
    keys: bytes
    tip: bytes
    seed: int | None
    created: float
    used: float
    version: int
    suspended: bool = False
    deleted: bool = False

    @property
    def count(self) -> int:
        return len(self.tokens) // 4

    def point(self) -> Tip:
        """Where it goes on."""
        keys = [self.keys[at : at + KEY_BYTES] for at in range(0, len(self.keys), KEY_BYTES)]
        return Tip(self.position, tuple(self.switches), tuple(keys), self.tip)

    def begins(self, tokens: Sequence[int]) -> bool:
        """Whether `tokens` go on from the saved state: they begin with what is in it, and at least
        one follows, for there is nothing to draw from otherwise."""
        if len(tokens) <= self.position:
            return False
        return pack_tokens(tokens[: self.position]) == self.tokens[: 4 * self.position]


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def session_name(fingerprint: bytes, tenant: str, session: str) -> Name:
    """Where a tenant's session is found; another model's, or another tenant's, is not."""
    return Name(named_key(root_key(fingerprint, tenant), _SESSION, session), Kind.SESSION)


def to_item(manifest: Manifest, fingerprint: bytes, layout: bytes) -> Item:
    """layout: StateLayout.fingerprint."""
    name = session_name(fingerprint, manifest.tenant, manifest.session)
    header = Header(
        key=name.key,
        kind=Kind.SESSION,
        parent=bytes(KEY_BYTES),
        position=manifest.version,
        tokens=(),
        lineage="decode",
        layout=layout,
    )
    data = torch.frombuffer(bytearray(msgspec.msgpack.encode(manifest)), dtype=torch.uint8)
    return Item(header, (data,))


def from_bytes(data: bytes, name: Name, fingerprint: bytes) -> Manifest | None:
    """None unless it is the manifest of that name, with keys that follow from its tokens."""
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except msgspec.DecodeError:
        return None
    if session_name(fingerprint, manifest.tenant, manifest.session) != name:
        return None
    if manifest.deleted:
        return manifest
    if manifest.position > manifest.count:
        return None
    root = root_key(fingerprint, manifest.tenant, manifest.mode)
    tokens = struct.unpack(f"<{manifest.count}I", manifest.tokens[: 4 * manifest.count])
    made = Tip.of(root, tokens, manifest.position, manifest.switches)
    return manifest if manifest.point() == made else None
