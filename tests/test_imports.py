"""No module imports itself through others; imports for type checkers and inside functions count."""

from __future__ import annotations

import grimp
import networkx as nx


def test_modules_form_no_import_cycles() -> None:
    graph = grimp.build_graph("placer", "placer_server", "placer_client", cache_dir=None)
    imports = nx.DiGraph(
        (module, imported)
        for module in graph.modules
        for imported in graph.find_modules_directly_imported_by(module)
    )
    cycles = [sorted(each) for each in nx.strongly_connected_components(imports) if len(each) > 1]
    assert cycles == []
