"""The REST service: placements solved in processes of their own, answered from a store when asked again.

request -> routes -> jobs -> worker (one process a solve) -> store
"""
