"""What is known of prefixes on the device: pages and snapshots by the names of their content.

A chain key names a whole prefix, so the tree needs no search: a node is found by its key, and its
parent's key is part of it. Latent pages and snapshots are two payloads joined by position: every
node has a page, few have a snapshot, and either may be gone while the other stays (kv-state 3.1).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from expertmesh.actors.state.eviction import SnapshotOrder
from expertmesh.actors.state.item import Header, Kind, Lineage
from expertmesh.actors.state.pages import OwnershipError

NOTHING = -1


@dataclass(slots=True)
class Node:
    """A prefix that ends at `position`. page, snapshot: where on the device; NOTHING when not.
    lent: pages in which its snapshot lies instead."""

    key: bytes
    parent: bytes
    position: int
    tokens: tuple[int, ...]  # of its own page
    lineage: Lineage
    page: int = NOTHING
    snapshot: int = NOTHING
    lent: tuple[int, ...] = ()

    @property
    def saved(self) -> bool:
        """Whether its snapshot is on the device."""
        return self.snapshot != NOTHING or bool(self.lent)

    def header(self, kind: Kind, layout: bytes) -> Header:
        return Header(self.key, kind, self.parent, self.position, self.tokens, self.lineage, layout)


class PrefixTree:
    """Nodes by key. Snapshots in an order of use of their own; pages have theirs in the pool."""

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._by_page: dict[int, Node] = {}
        self._snapshots: dict[int, Node] = {}
        self._lent: dict[int, Node] = {}  # by each of the pages
        self.order = SnapshotOrder[int]()

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    @property
    def snapshots(self) -> int:
        """In places of their own."""
        return len(self._snapshots)

    @property
    def lent_pages(self) -> int:
        return len(self._lent)

    def get(self, key: bytes) -> Node | None:
        return self._nodes.get(key)

    def node(self, header: Header) -> Node | None:
        """The node of a header, made if need be. None when the name is that of other tokens: names
        may collide, and then only the first is known by it."""
        node = self._nodes.get(header.key)
        if node is None:
            node = self._nodes[header.key] = Node(
                header.key, header.parent, header.position, header.tokens, header.lineage
            )
        elif (node.tokens, node.position) != (header.tokens, header.position):
            return None
        return node

    def put_page(self, node: Node, page: int) -> None:
        node.page = page
        self._by_page[page] = node

    def put_snapshot(self, node: Node, snapshot: int, rung: bool = False) -> None:
        """rung: see SnapshotOrder."""
        node.snapshot = snapshot
        self._snapshots[snapshot] = node
        self.order.made(snapshot, rung=rung)

    def least_snapshot(self) -> Node | None:
        """The one of least use."""
        least = self.order.victim()
        return None if least is None else self._snapshots[least]

    def drop_page(self, page: int) -> Node | None:
        """Forgets what is in this page of the device; its node, if there was one."""
        node = self._by_page.pop(page, None)
        if node is not None:
            node.page = NOTHING
            self._prune(node)
        return node

    def drop_snapshot(self, node: Node) -> int:
        """Forgets a node's snapshot; which one of the device it was."""
        snapshot, node.snapshot = node.snapshot, NOTHING
        del self._snapshots[snapshot]
        self.order.gone(snapshot)
        self._prune(node)
        return snapshot

    def lend(self, node: Node, pages: Sequence[int]) -> int:
        """Its snapshot lies in these pages from now on; which place of the device is free."""
        node.lent = tuple(pages)
        self._lent.update(dict.fromkeys(pages, node))
        return self.drop_snapshot(node)

    def drop_lent(self, node: Node) -> tuple[int, ...]:
        """Forgets a node's snapshot; in which pages it lay."""
        pages, node.lent = node.lent, ()
        for page in pages:
            del self._lent[page]
        self._prune(node)
        return pages

    def oldest_lent(self) -> Node | None:
        return next(iter(self._lent.values()), None)

    def lent_to(self, page: int) -> Node | None:
        """Whose snapshot lies in this page."""
        return self._lent.get(page)

    def of_page(self, page: int) -> Node | None:
        return self._by_page.get(page)

    def check(self, places: int) -> None:
        """Every node is worth its place, and no payload is of two. places: of snapshots in use,
        none of them being written. Raises OwnershipError."""
        pages = [node.page for node in self if node.page != NOTHING]
        saved = [node.snapshot for node in self if node.snapshot != NOTHING]
        lent = [page for node in self for page in node.lent]
        if sorted(pages) != sorted(self._by_page) or sorted(saved) != sorted(self._snapshots):
            raise OwnershipError(f"nodes have pages {pages} and snapshots {saved}, the tree others")
        if sorted(lent) != sorted(self._lent) or self._lent.keys() & self._by_page.keys():
            raise OwnershipError(f"snapshots lie in pages {lent}, of which the tree knows others")
        if len(saved) != places or any(n.page == NOTHING and not n.saved for n in self):
            raise OwnershipError(f"{places} snapshots are in use, nodes have {saved}")

    def _prune(self, node: Node) -> None:
        if node.page == NOTHING and not node.saved:
            self._nodes.pop(node.key, None)
