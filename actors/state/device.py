"""What the device holds of prefixes: pages, places of snapshots, and the names of both."""

from collections.abc import Sequence

import torch
from torch import Tensor

from expertmesh.actors.state.filling import take_out
from expertmesh.actors.state.item import Header, Item, Kind, Name
from expertmesh.actors.state.lending import Lending
from expertmesh.actors.state.model_state import ModelState
from expertmesh.actors.state.pages import NOBODY, Pool, SharedPool
from expertmesh.actors.state.tree import NOTHING, Node, PrefixTree


class DeviceState:
    """Engine's thread only. `pages.free` counts named pages that nobody uses.

    Snapshots have places of their own, pages that sequences do not need are for both: a snapshot
    that must leave its place lies in pages, as long as these were idle for longer than it was, and
    goes as pages do. What is of least use makes way.
    """

    def __init__(self, state: ModelState) -> None:
        self.state, self.layout = state, state.layout.fingerprint
        self.pages = SharedPool("page", state.pages, self._page_lost)
        self.tree = PrefixTree()
        self.evicted_pages = self.evicted_snapshots = 0
        self._places = Pool("snapshot", state.snapshots) if state.snapshots else None
        # None: a snapshot that leaves its place is forgotten.
        self.lending = Lending(state) if state.snapshots and state.page_bytes else None

    def tick(self) -> None:
        """A request begins: by these, use is dated."""
        self.tree.order.tick()
        self.pages.now = self.tree.order.now

    def used(self, node: Node, deeper: bool) -> None:
        """A request begins from a node's snapshot. deeper: which leaves one further on."""
        if node.lent:
            # Superseded ones would make room first: they age on.
            self.pages.touch(() if deeper else node.lent)
        else:
            self.tree.order.used(node.snapshot, deeper=deeper)

    # --- looking ------------------------------------------------------------------------------

    def has(self, name: Name) -> bool:
        return self.find(name) is not None

    def find(self, name: Name) -> Node | None:
        """The node that has what is named on the device."""
        node = self.tree.get(name.key)
        if node is None:
            return None
        here = node.page != NOTHING if name.kind is Kind.PAGE else node.saved
        return node if here else None

    def lent(self, name: Name) -> tuple[int, ...]:
        """Pages in which the named snapshot lies, if it has no place of its own."""
        node = self.find(name) if self.tree.lent_pages else None
        return () if node is None else node.lent

    def items(self, names: Sequence[Name]) -> list[Item]:
        """Host copies of those of the names that are on the device."""
        found = []
        for name in names:
            node = self.find(name)
            if node is not None:
                header = node.header(name.kind, self.layout)
                tensors = (self.page(node.page),) if name.kind is Kind.PAGE else self.saved(node)
                found.append(take_out(header, tensors))
        return found

    def page(self, page: int) -> Tensor:
        """Latents [mla layers, 64, R + r]."""
        return self.state.paged()[:, page]

    def saved(self, node: Node) -> tuple[Tensor, Tensor]:
        """KDA matrices and conv windows of a node's snapshot; copies where it lies in pages."""
        if node.lent and self.lending is not None:
            kda, conv = (torch.empty_like(x) for x in self.slot(0))
            self.lending.read(node.lent, kda, conv)
            return kda, conv
        return self.state.saved_kda[:, node.snapshot], self.state.saved_conv[:, node.snapshot]

    def slot(self, slot: int) -> tuple[Tensor, Tensor]:
        """The same of a running sequence, as they are now."""
        return self.state.kda[:, slot], self.state.conv[:, slot]

    def restore(self, slot: int, lent: Sequence[int]) -> None:
        """A copy of the snapshot in these pages, whoever has them by now: until the next step
        begins, nothing is written there."""
        assert self.lending is not None
        self.lending.read(lent, *self.slot(slot))

    # --- naming -------------------------------------------------------------------------------

    def name_page(self, header: Header, owner: int, page: int) -> int:
        """From now on others find this page. Which page has the content: another, when a sequence
        was faster with the same tokens; then `owner` reads that one and has given back its own."""
        node = self.tree.node(header)
        if node is None:
            return page
        if node.page == NOTHING:
            self.pages.keep(page)
            self.tree.put_page(node, page)
        elif node.page != page:
            self.pages.share(owner, [node.page])
            self.pages.give_back(owner, [page])
        return node.page

    def name_snapshot(self, header: Header, place: int, rung: bool = False) -> Node | None:
        """From now on others find what is in this place. None when it was known already. rung: it
        is one of a ladder, there for edits alone."""
        node = self.tree.node(header)
        if node is None or node.saved:
            self.give_place_back(place)
            return None
        self.tree.put_snapshot(node, place, rung)
        return node

    def take_place(self, rung: bool = False) -> int | None:
        """Room for a snapshot; the one of least use makes way, to pages where there are some. None
        when all are being written, or when a rung of a ladder would drive out what is likelier to
        be of use.

        A sequence that starts from that one in this very step has copied it before it changes.
        """
        if self._places is None:
            return None
        if not self._places.free:
            least = self.tree.least_snapshot()
            if least is None:
                return None
            likely = self.tree.order.likely(least.snapshot)
            if not (likely and self._lend(least)):
                if likely and rung:
                    return None
                self.forget_snapshot(least)
        return self._places.take(0, 1)[0]

    def _lend(self, node: Node) -> bool:
        """Pages take a node's snapshot, where some are free or were idle for longer."""
        if self.lending is None:
            return False
        used = self.tree.order.last_use(node.snapshot)
        pages = self.pages.take_older(NOBODY, self.lending.pages, used)
        if pages is None:
            return False
        self.lending.write(node.snapshot, pages)
        for page in pages:
            self.pages.keep(page)
        self.give_place_back(self.tree.lend(node, pages))
        self.pages.give_back(NOBODY, pages)
        return True

    def give_place_back(self, place: int) -> None:
        assert self._places is not None
        self._places.give_back(0, [place])

    # --- forgetting ---------------------------------------------------------------------------

    def forget_snapshot(self, node: Node) -> None:
        if node.lent:
            for page in self.tree.drop_lent(node):
                self.pages.forget(page)
        else:
            self.give_place_back(self.tree.drop_snapshot(node))
        self.evicted_snapshots += 1

    def forget_page(self, page: int) -> Node | None:
        """Nobody finds this page any more, nor the snapshot behind it. The node they were of."""
        node = self.tree.of_page(page)
        if node is not None:
            if node.saved:
                self.forget_snapshot(node)
            self.tree.drop_page(page)
            self.pages.forget(page)
        return node

    def _page_lost(self, page: int) -> None:
        node = self.tree.lent_to(page)
        if node is not None:  # of no use without this page
            self.forget_snapshot(node)
            return
        self.tree.drop_page(page)
        self.evicted_pages += 1

    def evict(self, pages: int, snapshots: int) -> None:
        """Forgets up to so many pages that nobody uses, and snapshots, those of least use first."""
        self.pages.forget_idle(pages)
        while snapshots and (node := self.tree.oldest_lent() or self.tree.least_snapshot()):
            self.forget_snapshot(node)
            snapshots -= 1

    def check(self) -> None:
        """Raises OwnershipError where the books contradict each other."""
        self.pages.check()
        self.tree.check(self.state.snapshots - (self._places.free if self._places else 0))
