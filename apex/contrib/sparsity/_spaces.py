"""Channels that have to be reordered together, and the places in parameters where they lie."""

from __future__ import annotations

import dataclasses
import math

import torch


@dataclasses.dataclass(eq=False)
class Site:
    """Where channels [begin, begin + length) of a space lie in a tensor: along `dim`, from `offset` on.

    kind: "C", a weight's input channels; "K", its output channels, or what is added to or multiplies channels.
    makes: whether the space's channels come from here. rows: (first, end) of dimension 0 that the site is about.
    """

    node: str
    name: str
    tensor: torch.Tensor
    dim: int
    kind: str
    length: int
    offset: int = 0
    begin: int = 0
    makes: bool = False
    rows: tuple[int, int] | None = None

    @property
    def place(self):
        return id(self.tensor), self.dim, self.offset, self.length, self.begin, self.rows

    def overlaps(self, other):
        """Whether both are about some elements of one tensor along the same dimension."""
        apart = self.offset + self.length <= other.offset or other.offset + other.length <= self.offset
        if self.rows and other.rows:
            apart = apart or self.rows[1] <= other.rows[0] or other.rows[1] <= self.rows[0]
        return self.tensor is other.tensor and self.dim == other.dim and not apart

    def part_of(self, tensor):
        """The view of `tensor`, of the site's shape, that the site is about."""
        chosen = tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]
        return chosen.narrow(self.dim, self.offset, self.length)

    def columns(self, begin, length):
        """[rows, length] of the weight for channels [begin, begin + length) of the space; None if it has none."""
        if not self.begin <= begin < self.begin + self.length:
            return None
        part = self.part_of(self.tensor.detach()).narrow(self.dim, begin - self.begin, length)
        return part.movedim(self.dim, -1).reshape(-1, length)

    def permute(self, tensor, order):
        """Reorders `tensor`, the site's own or one of its shape; order: int64, of the whole space. A tensor with one
        element for all of them stays."""
        if tensor.shape[self.dim] != self.tensor.shape[self.dim]:
            return
        part = self.part_of(tensor)
        local = order[self.begin : self.begin + self.length] - self.begin
        part.copy_(part.index_select(self.dim, local.to(tensor.device)))


class Space:
    """Channels with one order: a node of a union-find forest, whose roots hold what is known.

    size: how many; block: orders keep channels within blocks of so many (grouped convolutions); frozen: why their
    order cannot change, or None.
    """

    def __init__(self, size):
        self.parent: Space | None = None
        self.size, self.block = size, size
        self.frozen: str | None = None
        self.sites: list[Site] = []

    @property
    def root(self):
        space = self
        while space.parent is not None:
            space = space.parent
        return space

    @property
    def places(self):
        """The sites, one for each place: a layer that is called twice has two of each."""
        return list({site.place: site for site in self.sites}.values())

    def freeze(self, why):
        root = self.root
        root.frozen = root.frozen or why

    def limit(self, block):
        root = self.root
        root.block = math.gcd(root.block, block)

    def add(self, site):
        self.root.sites.append(site)

    def unite(self, other):
        """One order for both; where their sizes differ neither has any."""
        one, two = self.root, other.root
        if one is two:
            return
        if one.size != two.size:
            why = f"{one.size} channels meet {two.size}"
            one.freeze(why), two.freeze(why)
            return
        two.parent = one
        one.limit(two.block)
        one.frozen = one.frozen or two.frozen
        one.sites += two.sites
        two.sites = []


def settle(spaces, pinned):
    """The roots of `spaces`, after tensors that several sites are about are taken into account.

    pinned: {(id of a tensor, dimension): why it must stay as it is}; None: all dimensions; "rows": its parts. One place
    in two spaces makes them one; places that overlap otherwise, and pinned tensors, freeze theirs.
    """
    by_tensor: dict[tuple, list] = {}
    for space in spaces:
        for site in space.sites:
            by_tensor.setdefault((id(site.tensor), site.dim), []).append((site, space))
    for found in by_tensor.values():
        for index, (site, space) in enumerate(found):
            for dim in (None, site.dim, "rows" if site.rows else None):
                if (id(site.tensor), dim) in pinned:
                    space.freeze(f"{site.name} {pinned[id(site.tensor), dim]}")
            for other, owner in found[:index]:
                if site.place == other.place:
                    space.unite(owner)
                elif site.overlaps(other):
                    space.freeze(f"{site.name} has channels of several kinds")
                    owner.freeze(f"{site.name} has channels of several kinds")
    return list(dict.fromkeys(space.root for space in spaces))
