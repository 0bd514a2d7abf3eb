"""What recording costs, measured on this machine: every figure is a comparison made side by side in one run.

``python -m benchmarks --list`` names the rows; each runs in a process of its own.
"""
