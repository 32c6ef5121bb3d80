"""Reorders the channels of a model, so that 2:4 pruning keeps more of its weights' magnitude.

The output channels of a layer and the input channels of those that read it are reordered together: what the model
computes stays the same. ``_flow`` says which these are, ``_search`` which order they get.
"""

from __future__ import annotations

import json
import os
import string
import warnings
from typing import Any

import torch
from torch import fx, nn

from apex.contrib.sparsity import _graph, _search
from apex.contrib.sparsity._fixed import fixed_among
from apex.contrib.sparsity._flow import Flow
from apex.contrib.sparsity._masters import followers_of, pairs_of, unfollowed
from apex.contrib.sparsity._trace import traces
from apex.contrib.sparsity.permutation_search_kernels import _magnitudes

_Graph = dict[str, dict[str, Any]]


def convert_fx_node_name(fx_node_name: str) -> str:
    """The name with "." for each "_": a node's name in the graphs below."""
    return fx_node_name.replace("_", ".")


def get_node_parent_children(fx_node: fx.Node) -> tuple[list[str], list[str]]:
    """The converted names of the nodes that this one reads, and of those that read it."""
    names = [
        [convert_fx_node_name(node.name) for node in nodes]
        for nodes in (fx_node.all_input_nodes, fx_node.users)
    ]
    return names[0], names[1]


def node_name_matches(node_name: str, module_name: str) -> bool:
    """Whether they are one name but for punctuation, capitals and the "module." of DistributedDataParallel."""
    plain = [
        "".join(c for c in name if c not in string.punctuation).lower() for name in (node_name, module_name)
    ]
    return plain[1] in (plain[0], f"module{plain[0]}")


def replicate_sequence(sequence: list[int], replications: int) -> list[int]:
    """An order of so many times the channels, each part in the order `sequence`."""
    return [channel + len(sequence) * part for part in range(replications) for channel in sequence]


def _permuted(tensor, dim, sequence, dryrun):
    """Reorders dimension `dim` in place; of a multiple of the channels, each part. False where they do not fit."""
    if sorted(sequence) != list(range(len(sequence))):
        raise ValueError(f"an order names each channel from 0 to {len(sequence) - 1} once: {sequence}")
    if not sequence or tensor.dim() <= dim or tensor.shape[dim] % len(sequence):
        return False
    if not dryrun:
        whole = replicate_sequence(sequence, tensor.shape[dim] // len(sequence))
        with torch.no_grad():
            index = torch.tensor(whole, dtype=torch.int64, device=tensor.device)
            tensor.detach().copy_(tensor.detach().index_select(dim, index))
    return True


class Permutation:
    """The permutations of one model at a time. ASP calls ``permute_model``; the steps below it are there for users of
    public apex's.

    Graphs are dicts, one entry a node, that JSON can hold.
    """

    __model: nn.Module | None = None
    __sparse_parameters: list[tuple] = []
    __all_parameters: list[tuple] = []
    __optimizer: Any = None
    __verbosity = 0
    __save_permutation_graph = False
    __permutation_output_dir = "."
    __flow: Flow | None = None
    __permuted_in_C: list[str] = []
    __permuted_in_K: list[str] = []
    __missed: list[str] = []
    __done: list = []

    # ---- settings ------------------------------------------------------------------------------------

    @classmethod
    def set_identical_seed(cls, identical_seed: int = 1) -> None:
        """Seeds the search, which is the same on every rank for the same seed. Torch's, numpy's and Python's own
        generators stay as they are."""
        _magnitudes.seed(identical_seed)

    @classmethod
    def reset_seed(cls) -> None:
        """Starts the search's random numbers anew, as before each matrix."""
        _magnitudes.seed()

    @classmethod
    def set_tcpstore_port(cls, tcpstore_port: int) -> None:
        """Without effect: ranks speak through the default process group."""

    @classmethod
    def set_permutation_saving_params(
        cls,
        allow_permutation: bool = False,
        save_permutation_graph: bool = False,
        permutation_output_dir: str = ".",
    ) -> None:
        """Whether and where graphs are saved as JSON. allow_permutation: ASP's, which asks it before it calls."""
        cls.__save_permutation_graph = save_permutation_graph
        cls.__permutation_output_dir = permutation_output_dir

    @classmethod
    def set_permutation_params_from_asp(
        cls,
        model: nn.Module,
        sparse_parameters: list[tuple],
        all_parameters: list[tuple],
        verbosity: int = 0,
        optimizer: Any = None,
    ) -> None:
        """Says what is pruned.

        Args:
            sparse_parameters: (module name, module, parameter name, parameter, mask, pruned values or None).
            all_parameters: (module name, module, parameter name, parameter or buffer).
            verbosity: above 0, each group of channels is printed with what became of it.
            optimizer: its master weights and states are reordered with the parameters.
        """
        cls.__model, cls.__optimizer, cls.__verbosity = model, optimizer, verbosity
        cls.__sparse_parameters, cls.__all_parameters = sparse_parameters, all_parameters
        cls.__permuted_in_C, cls.__permuted_in_K, cls.__missed, cls.__flow = [], [], [], None
        cls.__done = []

    @classmethod
    def get_permutation_stats(cls) -> tuple[list[str], list[str], list[str]]:
        """Names of the tensors reordered along C, of those reordered along K, and of dimensions that were missed:
        always none, since a group is reordered as a whole or not at all."""
        return cls.__permuted_in_C, cls.__permuted_in_K, cls.__missed

    # ---- the whole -----------------------------------------------------------------------------------

    @classmethod
    def permute_model(
        cls,
        model: nn.Module,
        dump_fx_graph: bool = False,
        save_dumped_fx_graph: str = "./model_permutation_graph.json",
    ) -> bool:
        """Searches and applies all permutations. False, with a warning, where torch.fx cannot trace the model. Another
        warning says why channels stay, where what depends on their order is not known."""
        graph, traced = cls.build_offline_permutation_graph(model, dump_fx_graph, save_dumped_fx_graph)
        if traced:
            cls.apply_offline_permutation(model, graph)
        return traced

    @classmethod
    def build_offline_permutation_graph(
        cls,
        model: nn.Module,
        dump_fx_graph: bool = False,
        save_dumped_fx_graph: str = "./model_offline_permutation_graph.json",
    ) -> tuple[_Graph, bool]:
        """The graph with parents, children, siblings, flags and searched orders, and whether it could be traced."""
        graph, traced = cls.build_fx_graph(model)
        if not traced:
            return {}, False
        relations = (cls.find_real_parents, cls.find_real_children, cls.find_real_siblings)
        for step in (*relations, cls.extract_all_unique_siblings, cls.init_permutation_flag):
            graph = step(graph)
        graph = cls.search_for_good_permutation(graph)
        if dump_fx_graph:
            cls.save_graph_to_json(graph, save_dumped_fx_graph)
        return graph, True

    # ---- the graph and its steps ---------------------------------------------------------------------

    @classmethod
    def print_raw_fx_graph(
        cls, model: nn.Module, print_tabular: bool = False, generate_python_code: bool = False
    ) -> fx.GraphModule | None:
        """Traces and prints the graph: print_tabular as a table, which needs the package tabulate;
        generate_python_code: its code too. None, with a warning, where the model cannot be traced."""
        found = cls.__trace(model)
        if found is None:
            return None
        traced = fx.GraphModule(model, found[0].graph)
        traced.graph.print_tabular() if print_tabular else print(traced.graph)
        if generate_python_code:
            print(traced.code)
        return traced

    trace_and_print_raw_fx_graph = print_raw_fx_graph

    @staticmethod
    def __trace(model, then=list):
        """What `then` makes of the model's graphs. None, with a warning, where that fails."""
        try:
            return then(traces(model))
        except Exception as error:
            warnings.warn(
                f"channels are not reordered: torch.fx cannot trace {type(model).__name__}: {error}; "
                "pruning goes on without, as with allow_permutation=False",
                stacklevel=3,
            )
            return None

    @classmethod
    def build_fx_graph(
        cls,
        model: nn.Module,
        dump_fx_graph: bool = False,
        save_dumped_fx_graph: str = "./model_fx_graph.json",
    ) -> tuple[_Graph, bool]:
        """The traced model as a dict of nodes (parents, children, fx_op, module_type, groups_param, C_param, K_param),
        and whether it could be traced."""

        def followed(found):
            tensors = [*model.parameters(), *model.buffers()]
            fixed: dict[tuple, str] = {(key, None): why for key, why in fixed_among(tensors).items()}
            fixed |= unfollowed(cls.__optimizer, tensors)
            flow = Flow(model, found, fixed)
            graphs = [_graph.nodes_of(traced.graph, flow.modules) for traced in found]
            return flow, {name: entry for nodes in reversed(graphs) for name, entry in nodes.items()}

        made = cls.__trace(model, followed)
        if made is None:
            return {}, False
        cls.__flow, graph = made
        cls.__warn_of(cls.__flow.unsure)
        if dump_fx_graph:
            cls.save_graph_to_json(graph, save_dumped_fx_graph)
        return graph, True

    @staticmethod
    def __warn_of(unsure):
        """Says once why channels stay that could be reordered if more were known."""
        reasons = list(dict.fromkeys(unsure))
        if reasons:
            more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
            warnings.warn(
                f"some channels are not reordered, since what depends on their order is not known: "
                f"{'; '.join(reasons[:5])}{more}. Pruning goes on without, as with allow_permutation=False",
                stacklevel=3,
            )

    @classmethod
    def __built(cls):
        if cls.__flow is None:
            raise RuntimeError("there is no graph yet: Permutation.build_fx_graph(model) makes it")
        return cls.__flow

    @classmethod
    def __step(cls, fx_graph, name):
        if cls.__save_permutation_graph:
            cls.save_graph_to_json(
                fx_graph, os.path.join(cls.__permutation_output_dir, f"model_graph_{name}.json")
            )
        return fx_graph

    @classmethod
    def find_real_parents(cls, fx_graph: _Graph) -> _Graph:
        """Adds real_parents to each node: the layers that make the channels that it reads, or passes on."""
        return cls.__step(_graph.add_parents(fx_graph, cls.__built()), "find_real_parent")

    @classmethod
    def find_real_children(cls, fx_graph: _Graph) -> _Graph:
        """Adds real_children to each node: the layers that read the channels that it makes, or passes on."""
        return cls.__step(_graph.add_children(fx_graph, cls.__built()), "find_real_children")

    @classmethod
    def recursive_find_real_children(cls, node_name: str, fx_graph: _Graph) -> tuple[list[str], list[str]]:
        """The real children of one node, and their types."""
        children = _graph.add_children({node_name: dict(fx_graph[node_name])}, cls.__built())[node_name][
            "real_children"
        ]
        return children, [fx_graph[child]["module_type"] for child in children]

    @classmethod
    def find_real_siblings(cls, fx_graph: _Graph) -> _Graph:
        """Adds real_siblings to each node: the other layers that read the same channels."""
        return cls.__step(_graph.add_siblings(fx_graph, cls.__built()), "find_real_siblings")

    @classmethod
    def extract_all_unique_siblings(cls, fx_graph: _Graph) -> _Graph:
        """Adds the entry unique_siblings: the layers of each group that shares an order, and their types."""
        return cls.__step(_graph.add_groups(fx_graph, cls.__built()), "extract_all_unique_siblings")

    @classmethod
    def init_permutation_flag(cls, fx_graph: _Graph) -> _Graph:
        """Adds permutation_type to each node: along which dimensions its parameters can be reordered, "None", "C", "K"
        or "KC"."""
        return cls.__step(_graph.add_flags(fx_graph, cls.__built()), "init_permutation_flag")

    @classmethod
    def search_for_good_permutation(cls, fx_graph: _Graph) -> _Graph:
        """Adds permutation_sequence to unique_siblings: each group's order of channels, empty where it has none."""
        sparse = {id(p) for _, _, _, p, _, _ in cls.__sparse_parameters}
        spaces = cls.__built().roots
        found = _search.orders_of(spaces, sparse)
        if cls.__verbosity > 0:
            for space, (order, reason) in zip(spaces, found, strict=True):
                names = ", ".join(site.name for site in space.places) or "no parameter"
                print(f"[Permutation] {space.size} channels of {names}: {'reordered' if order else reason}")
        fx_graph["unique_siblings"]["permutation_sequence"] = [order or [] for order, _ in found]
        return cls.__step(fx_graph, "search_for_good_permutation")

    @classmethod
    def fetch_C_permutation_sequence_value(cls, node_name: str, fx_graph: _Graph) -> list[int]:
        """The searched order of a node's input channels, or an empty list."""
        return _graph.sequence(fx_graph, cls.__built(), node_name, "C")

    @classmethod
    def fetch_K_permutation_sequence_value(cls, node_name: str, fx_graph: _Graph) -> list[int]:
        """The searched order of a node's output channels, or an empty list."""
        return _graph.sequence(fx_graph, cls.__built(), node_name, "K")

    @classmethod
    def apply_offline_permutation(cls, model: nn.Module, fx_graph: _Graph) -> _Graph:
        """Reorders the parameters by the orders in the graph, which ``search_for_good_permutation`` put there.

        Master weights, optimizer states and gradients of a parameter go with it; masks become all ones. After an error
        everything is as before.
        """
        orders = fx_graph["unique_siblings"]["permutation_sequence"]
        along: dict[str, dict[str, None]] = {"C": {}, "K": {}}
        chosen: list[tuple] = []
        for space, order in zip(cls.__built().roots, orders, strict=True):
            if order:
                chosen.append((space, order))
                for site in space.sites:
                    along[site.kind][site.name] = None
                    fx_graph[convert_fx_node_name(site.node)][f"{site.kind.lower()}_permuted"] = "True"
        cls.__step(fx_graph, "apply_offline_permutation")  # the file first: it may fail, and changes nothing
        pairs = pairs_of(cls.__optimizer)
        cls.__done = _search.apply_orders(chosen, lambda tensor: followers_of(cls.__optimizer, tensor, pairs))
        cls.transfer_to_dense_mask()
        cls.__permuted_in_C += along["C"]
        cls.__permuted_in_K += along["K"]
        return fx_graph

    @classmethod
    def undo_offline_permutation(cls) -> None:
        """Takes back the orders that ``apply_offline_permutation`` gave last. Masks stay all ones."""
        _search.undo(cls.__done)
        cls.__permuted_in_C, cls.__permuted_in_K = [], []

    @classmethod
    def transfer_to_dense_mask(cls) -> None:
        """Makes the masks of all pruned parameters all ones."""
        for _, _, _, _, mask, _ in cls.__sparse_parameters:
            mask.fill_(1)

    # ---- one node ------------------------------------------------------------------------------------

    @classmethod
    def apply_permutation_in_C_dim(
        cls, node_name: str, permutation_sequence: list[int], dryrun: bool = False
    ) -> bool:
        """Reorders the input channels of a layer's pruned weights, or of its ``weight`` where none is pruned.

        Nothing else changes with it. False where there is no such layer or the order does not fit; dryrun: only that.
        Raises ValueError for an order that does not name each channel once.
        """
        pruned = [p for name, _, _, p, _, _ in cls.__sparse_parameters if node_name_matches(node_name, name)]
        named = [(n, p) for name, _, n, p in cls.__all_parameters if node_name_matches(node_name, name)]
        found = pruned or [p for n, p in named if n == "weight"]
        if not found or not all(_permuted(p, 1, permutation_sequence, True) for p in found):
            return False
        return all(_permuted(p, 1, permutation_sequence, dryrun) for p in found)

    @classmethod
    def apply_permutation_in_K_dim(
        cls,
        node_name: str,
        permutation_sequence: list[int],
        fx_graph: _Graph | None = None,
        dryrun: bool = False,
    ) -> bool:
        """Reorders the first dimension of a layer's parameters and running statistics. As above."""
        found = [p for name, _, _, p in cls.__all_parameters if node_name_matches(node_name, name)]
        if not found or not all(_permuted(p, 0, permutation_sequence, True) for p in found):
            return False
        return all(_permuted(p, 0, permutation_sequence, dryrun) for p in found)

    @classmethod
    def save_graph_to_json(
        cls, graph: _Graph, save_dumped_graph_path_with_name: str = "./model_fx_graph.json"
    ) -> None:
        """Writes the graph as JSON."""
        with open(save_dumped_graph_path_with_name, "w", encoding="utf-8") as file:
            json.dump(graph, file)
