"""The collector: reads the rings of a session, assembles requests, writes the store. A process of its own."""
