def pytest_collection_modifyitems(items):
    """The module with the longest proof first: several run at once, and none shall be left alone at the end."""
    items.sort(key=lambda item: "test_kill_storm" not in item.nodeid)
