"""The graph of a model as a dict of nodes for JSON, with what the flow of its channels (``_flow``) says of each."""

from __future__ import annotations


def _converted(name):
    return name.replace("_", ".")


def _parameter(module, *names):
    found = [getattr(module, name) for name in names if hasattr(module, name)]
    return str(found[0]) if found else "None"


def nodes_of(graph, modules):
    """{name: parents, children, fx_op; of a layer: its type and numbers of channels}, without input and output."""
    found: dict[str, dict] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        entry = found[_converted(node.name)] = {
            "parents": [_converted(parent.name) for parent in node.all_input_nodes],
            "children": [_converted(child.name) for child in node.users],
            "fx_op": node.op,
        }
        if node.op == "get_attr":
            entry |= {"module_type": "get_attr", "groups_param": "None", "target": node.target}
        elif node.op == "call_module":
            module = modules[node.target]
            entry |= {
                "module_type": f"{type(module).__module__}.{type(module).__qualname__}",
                "target": node.target,
                "groups_param": _parameter(module, "groups"),
                "C_param": _parameter(module, "in_channels", "in_features", "embed_dim"),
                "K_param": _parameter(module, "out_channels", "out_features", "embed_dim"),
            }
    return found


def _nodes(space, wanted):
    """Names of the nodes of the space's sites that are `wanted`, each once, in their order."""
    return list(dict.fromkeys(_converted(site.node) for site in space.sites if wanted(site)))


def _makes(site):
    return site.makes


def _reads(site):
    return site.kind == "C"


def _is_at(name, *kinds):
    return lambda site: _converted(site.node) == name and site.kind in kinds


def _related(fx_graph, flow, key, relevant, related):
    """Adds `key` to each node: nodes of `related` sites in the spaces where the node has `relevant` ones."""
    for name, entry in fx_graph.items():
        spaces = [space for space in flow.roots if any(relevant(name, site) for site in space.sites)]
        found = dict.fromkeys(other for space in spaces for other in _nodes(space, related) if other != name)
        entry[key] = sorted(found)
    return fx_graph


def add_parents(fx_graph, flow):
    def receives(name, site):
        return _converted(site.node) == name and not site.makes

    return _related(fx_graph, flow, "real_parents", receives, _makes)


def add_children(fx_graph, flow):
    return _related(fx_graph, flow, "real_children", lambda name, site: _is_at(name, "K")(site), _reads)


def add_siblings(fx_graph, flow):
    return _related(fx_graph, flow, "real_siblings", lambda name, site: _is_at(name, "C")(site), _reads)


def add_groups(fx_graph, flow):
    names = [_nodes(space, _reads) for space in flow.roots]
    types = [[fx_graph[name].get("module_type") for name in group] for group in names]
    fx_graph["unique_siblings"] = {"name": names, "module_type": types}
    return fx_graph


def _layers(fx_graph):
    return {name: entry for name, entry in fx_graph.items() if name != "unique_siblings"}


def add_flags(fx_graph, flow):
    for name, entry in _layers(fx_graph).items():
        free = [site for space in flow.roots if not space.frozen for site in space.sites]
        kinds = {site.kind for site in free if _converted(site.node) == name}
        entry["permutation_type"] = "".join(kind for kind in "KC" if kind in kinds) or "None"
        entry["c_permuted"] = entry["k_permuted"] = "False"
    return fx_graph


def sequence(fx_graph, flow, node_name, kind):
    """The order of a node's channels along `kind`, of all of them, from the groups' orders; [] if none has one."""
    orders = fx_graph["unique_siblings"]["permutation_sequence"]
    parts: dict[int, list[int]] = {}
    found = False
    for space, order in zip(flow.roots, orders, strict=True):
        for site in filter(_is_at(node_name, kind), space.sites):
            found = found or bool(order)
            own = order or list(range(space.size))
            parts[site.offset] = [site.offset + channel for channel in own]
    return [channel for offset in sorted(parts) for channel in parts[offset]] if found else []
