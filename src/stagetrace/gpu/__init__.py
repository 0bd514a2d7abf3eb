"""GPU counters: read from the driver in a thread of the collector's process, and joined to stages and requests.

Never in an engine's process: there, nothing of this is loaded.
"""
